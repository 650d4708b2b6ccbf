"""TensorRT-LLM's `--max-batch-size` is `--max-num-seqs`."""

from __future__ import annotations

from cli.commands import serving

from .model import TINY


def test_max_batch_size() -> None:
    with serving(TINY, "--max-batch-size", "48", "--max-num-tokens", "640") as server:
        assert "48 requests together, 640 tokens a step" in server.printed()
        assert "notice" not in server.printed()
        assert "nothing to do" not in server.printed()
