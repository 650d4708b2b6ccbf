"""vLLM's module with the flags of a large machine: refused for the devices alone."""

from __future__ import annotations

import sys
from pathlib import Path

import httpx
import pytest
from cli.commands import listening
from golden.quantised_form import FORMS
from golden.tiny_models import model_path
from models.memory_source import MemorySource
from models.test_quantised_checkpoints import write_form

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
    words = words_for(Path(TINY), tmp_path, "2048")
    with listening(sys.executable, "-m", MODULE, *words) as server:
        assert "2048 tokens a request, 256 requests together" in server.printed()
        body = {"prompt": [3, 4, 5], "max_tokens": 3, "ignore_eos": True}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] == 3
        assert server.end() == 0


def words_for(model: Path, folder: Path, length: str) -> list[str]:
    """The flags as they are typed, on a free port and with a small store."""
    changed = {"--model": str(model), "--max-model-len": length, "--port": "0", "--swap-space": "1"}
    words = [changed.get(before, word) for before, word in zip(("", *FLAGS), FLAGS, strict=False)]
    return [*words, "--kv-store", str(folder), "--response-store", "off"]


def test_a_tiny_deepseek_runs_with_all_of_them(tmp_path: Path) -> None:
    """Latent attention and experts, with a context as long as the row asks for."""
    source = MemorySource.read(model_path("deepseek_v3"))
    source.metadata["deepseek2.context_length"] = 131072
    model = source.write(tmp_path / "deepseek.gguf")
    words = words_for(model, tmp_path / "kv", "128000")
    with listening(sys.executable, "-m", MODULE, *words) as server:
        printed = server.printed()
        assert "128000 tokens a request, 256 requests together" in printed
        assert "of deepseek.gguf are quantised to FP8 as they are loaded" in printed
        body = {"prompt": [3, 4, 5], "max_tokens": 3, "ignore_eos": True, "temperature": 0}
        answers = [
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
            for _ in range(2)
        ]
        assert answers[0]["usage"]["completion_tokens"] == 3
        assert answers[0]["choices"] == answers[1]["choices"]
        assert server.end() == 0


@pytest.mark.parametrize("form", ["fp8 all", "fp8 rows", "fp8 blocks"])
def test_fp8_on_an_fp8_checkpoint_is_one_notice(form: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_form(model, FORMS[form])
    words = words_for(model, tmp_path / "kv", "512")
    with listening(sys.executable, "-m", MODULE, *words) as server:
        printed = server.printed()
        notices = [line for line in printed.splitlines() if "quantization" in line.lower()]
        assert len(notices) == 1, printed
        assert "model is that already" in notices[0]
        body = {"prompt": [3, 4, 5], "max_tokens": 3, "ignore_eos": True}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
        assert answer["usage"]["completion_tokens"] == 3


def test_what_needs_calibration_is_refused() -> None:
    result = module(MODULE, "--model", TINY, "--quantization", "awq", "--port", "0")
    assert result.returncode == 1
    assert "quantization" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
