"""`x-request-timeout-ms`: what nobody waits for any more is not computed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from invar.engine.request import EngineRequest

from .scripted import RunningServer, Step, endless, events, running, says
from .test_limits import error_of


def ask(server: RunningServer, timeout_ms: object, **fields: Any) -> httpx.Response:
    body = {"prompt": "Hi", "max_tokens": 200, **fields}
    headers = {"x-request-timeout-ms": str(timeout_ms)}
    return server.http.post("/v1/completions", json=body, headers=headers)


def silent(request: EngineRequest) -> Iterator[Step]:
    """A request in the queue, or in a long prompt."""
    while True:
        time.sleep(0.005)
        yield []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_what_expires_before_its_first_token_is_a_504(stream: bool, n: int) -> None:
    with running(silent) as server:
        began = time.monotonic()
        answer = ask(server, 200, stream=stream, n=n)
        assert 0.2 <= time.monotonic() - began < 5
        assert error_of(answer, 504)["code"] == "deadline_exceeded"
        assert answer.headers["x-should-retry"] == "false"
        assert server.idle()
        assert len(server.engine.aborted) == n


def test_what_runs_is_cut() -> None:
    with running(endless(pause_s=0.01), max_model_len=100_000) as server:
        answer = ask(server, 200, max_tokens=50_000)
        assert error_of(answer, 504)["code"] == "deadline_exceeded"
        data = events(ask(server, 300, max_tokens=50_000, stream=True))
        assert json.loads(data[-1])["error"]["code"] == "deadline_exceeded"
        assert len(data) > 2
        assert "[DONE]" not in data
        assert all(json.loads(d)["choices"][0]["finish_reason"] is None for d in data[:-1])
        assert server.idle()


def test_what_ends_in_time_is_whole() -> None:
    with running(says("Hello", " world")) as server:
        assert ask(server, 20_000).json()["choices"][0]["text"] == "Hello world"
        assert events(ask(server, 20_000, stream=True))[-1] == "[DONE]"


@pytest.mark.parametrize("value", ["0", "-5", "1.5", "soon", "", "9" * 30, str(10**9 - 1)])
def test_a_header_that_is_no_time(hello: RunningServer, value: str) -> None:
    assert error_of(ask(hello, value))["param"] == "x-request-timeout-ms"


def test_a_time_that_is_over_when_the_prompt_is_read(hello: RunningServer) -> None:
    before = len(hello.engine.seen)

    def slow() -> Iterator[bytes]:
        yield b'{"prompt": "Hi"'
        time.sleep(0.2)
        yield b"}"

    headers = {"x-request-timeout-ms": "50", "content-type": "application/json"}
    answer = hello.http.post("/v1/completions", content=slow(), headers=headers)
    assert error_of(answer, 504)["code"] == "deadline_exceeded"
    assert len(hello.engine.seen) == before
