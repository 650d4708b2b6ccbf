"""LangChain and LlamaIndex get the bytes that plain HTTP gives."""

from __future__ import annotations

from pathlib import Path

import httpx

from .conftest import Tiny
from .environment import answers_of


def completion(tiny: Tiny, max_tokens: int) -> str:
    body = {"prompt": "one two", "max_tokens": max_tokens, "temperature": 0}
    answer = httpx.post(f"{tiny.url}/v1/completions", json=body, timeout=60)
    text: str = answer.json()["choices"][0]["text"]
    return text


def test_langchain(tiny: Tiny, tmp_path: Path) -> None:
    (text,) = tiny.chat(temperature=0, max_tokens=12)
    found = answers_of("use_langchain.py", tiny.url, tmp_path)
    names = ("invoke", "stream", "responses", "responses_stream")
    assert [found[name] for name in names] == [text] * 4
    assert found["async"] == [text] * 2
    two = tiny.chat([{"role": "user", "content": "Two"}], temperature=0, max_tokens=12)
    assert found["batch"] == [text, *two]
    assert found["usage"]["output_tokens"] == found["stream_usage"] == 12
    assert found["finish"] == "length"
    assert found["completion"] == completion(tiny, 6)
    assert found["error"] == "context_length_exceeded"


def test_llama_index(tiny: Tiny, tmp_path: Path) -> None:
    (text,) = tiny.chat(temperature=0, max_tokens=12)
    found = answers_of("use_llama_index.py", tiny.url, tmp_path)
    assert [found[name] for name in ("chat", "stream", "async")] == [text] * 3
    assert found["complete"] == found["complete_stream"] == completion(tiny, 12)
