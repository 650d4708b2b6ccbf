"""vLLM's module with the flags of a large machine: refused for the devices alone."""

from __future__ import annotations

import sys
from pathlib import Path

import httpx
from cli.commands import listening

from .model import TINY
from .modules import module

MODULE = "invar.entrypoints.openai.api_server"
FLAGS = (
    "--model", TINY, "--max-model-len", "128000", "--gpu-memory-utilization", "0.92",
    "--enable-prefix-caching", "--port", "8000", "--swap-space", "32", "--max-num-seqs", "256",
    "--quantization", "fp8",
)  # fmt: skip


def test_eight_devices_are_refused_and_all_else_is_understood() -> None:
    result = module(MODULE, "--tensor-parallel-size", "8", *FLAGS)
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert "--tensor-parallel-size: 8 devices asked for, found 1 (cpu)" in line


def test_without_them_it_serves(tmp_path: Path) -> None:
    """The tiny model has a shorter context, and is brought to FP8 as it is loaded."""
    changed = {"--max-model-len": "2048", "--port": "0", "--swap-space": "1"}
    words = [changed.get(before, word) for before, word in zip(("", *FLAGS), FLAGS, strict=False)]
    words = [*words, "--kv-store", str(tmp_path), "--response-store", "off"]
    with listening(sys.executable, "-m", MODULE, *words) as server:
        assert "2048 tokens a request, 256 requests together" in server.printed()
        body = {"prompt": [3, 4, 5], "max_tokens": 3}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] == 3
        assert server.end() == 0


def test_what_needs_calibration_is_refused() -> None:
    result = module(MODULE, "--model", TINY, "--quantization", "awq", "--port", "0")
    assert result.returncode == 1
    assert "quantization" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
