"""llama-server's command line: an answer without `model`; -c is each request's limit."""

from __future__ import annotations

import re

import httpx
from cli.commands import serving

from .model import model_file

CHAT = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 16}


def test_serves_with_llama_servers_flags() -> None:
    words = ["-m", model_file(), "-c", "8192", "-fa", "--parallel", "4", "--host", "0.0.0.0"]
    with serving(*words) as server:
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=CHAT, timeout=120)
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["message"]["content"]
        assert "8192 tokens a request, 4 requests together" in server.printed()
        assert "without an API key" in server.printed()
        # -c is not shared between the four: 4 x 8192 tokens of 22.5 KiB each, and little more.
        size = re.search(r"KV cache +([\d.]+) MiB", server.printed())
        assert size is not None
        assert 720 <= float(size[1]) <= 760
        too_long = {"prompt": [5] * 8192, "max_tokens": 1}
        refused = httpx.post(f"{server.url}/v1/completions", json=too_long, timeout=120)
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        models = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert models[0]["max_model_len"] == 8192
        assert server.end() == 0


def test_two_clients_get_what_one_gets() -> None:
    from concurrent.futures import ThreadPoolExecutor

    body = CHAT | {"temperature": 1.0, "seed": 7}
    with serving("-m", model_file(), "-c", "1024", "--parallel", "4") as server:

        def ask(_: int) -> str:
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
            text: str = answer.json()["choices"][0]["message"]["content"]
            return text

        alone = ask(0)
        with ThreadPoolExecutor(6) as pool:
            assert set(pool.map(ask, range(6))) == {alone}
