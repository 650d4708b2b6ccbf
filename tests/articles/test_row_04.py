"""vLLM's first command line: an answer, or the count of devices that were found."""

from __future__ import annotations

import httpx
from cli.commands import invar, serving

from .model import TINY, model_file

CHAT = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8}


def test_an_answer() -> None:
    words = (model_file(), "--host", "0.0.0.0", "--max-model-len", "512")
    with serving(*words) as server:
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=CHAT, timeout=120)
        assert answer.json()["choices"][0]["message"]["content"]
        assert "without an API key" in server.printed()
        assert server.end() == 0


def test_two_devices_are_refused_with_their_count() -> None:
    words = ("--host", "0.0.0.0", "--port", "8000", "--tensor-parallel-size", "2")
    result = invar("serve", TINY, *words)
    assert result.returncode == 1
    assert "--tensor-parallel-size: 2 devices asked for, found 1 (cpu)" in result.stderr
    assert len(result.stderr.splitlines()) == 1
