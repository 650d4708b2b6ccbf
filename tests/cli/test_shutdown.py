"""The end of a server: what its clients hear, how long it takes, what is in the log."""

from __future__ import annotations

import json
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from .commands import Serving, listening

SIGNALS = [signal.SIGTERM, signal.SIGINT]


@contextmanager
def scripted(timeout_s: int, step_s: float = 0.01, context: int = 100_000) -> Iterator[Serving]:
    script = Path(__file__).with_name("scripted_serve.py")
    words = (timeout_s, step_s, context)
    with listening(sys.executable, str(script), *map(str, words)) as server:
        yield server


def connect(server: Serving) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def ask(server: Serving, length: int | None = None, **fields: Any) -> socket.socket:
    """An open request, whose body is announced as ``length`` bytes."""
    client = connect(server)
    body = json.dumps({"prompt": "a", "max_tokens": 50_000, **fields}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    client.sendall(f"{head}content-length: {length or len(body)}\r\n\r\n".encode() + body)
    return client


def rest(client: socket.socket) -> bytes:
    data = b""
    while part := client.recv(65536):
        data += part
    return data


def error_of(answer: bytes) -> dict[str, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503")
    assert b"x-request-id: " in head
    assert b"retry-after: " in head
    if b"transfer-encoding: chunked" in head:
        body = body.split(b"\r\n")[1]
    error: dict[str, Any] = json.loads(body)["error"]
    return error


def log_of(server: Serving) -> str:
    time.sleep(0.1)  # the reader of the pipe
    return server.printed()


@pytest.mark.parametrize("number", SIGNALS)
def test_requests_that_are_not_waited_for_hear_it(number: int) -> None:
    with scripted(timeout_s=1) as server:
        stream, whole = ask(server, stream=True), ask(server)
        assert stream.recv(12) == b"HTTP/1.1 200"
        began = time.monotonic()
        assert server.end(number) == 0
        assert time.monotonic() - began < 4
        said = rest(stream)
        last = said.rstrip().split(b"data: ")[-1].split(b"\n")[0]
        assert json.loads(last)["error"]["code"] == "server_shutting_down"
        assert b"[DONE]" not in said
        assert b'"finish_reason":"' not in said
        assert said.endswith(b"0\r\n\r\n")
        assert error_of(rest(whole))["code"] == "server_shutting_down"
        assert "Traceback" not in log_of(server)
        assert "Exception" not in log_of(server)


def test_requests_that_end_in_time_are_whole() -> None:
    with scripted(timeout_s=20) as server:
        stream = ask(server, stream=True, max_tokens=100)
        assert stream.recv(12) == b"HTTP/1.1 200"
        assert server.end() == 0
        said = rest(stream)
        assert b'"finish_reason":"length"' in said
        assert b"[DONE]" in said


@pytest.mark.parametrize("number", SIGNALS)
def test_a_second_signal_ends_at_once(number: int) -> None:
    with scripted(timeout_s=60) as server:
        stream, whole = ask(server, stream=True), ask(server)
        assert stream.recv(12) == b"HTTP/1.1 200"
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert server.process.poll() is None
        began = time.monotonic()
        assert server.end(number) == 0
        assert time.monotonic() - began < 2
        assert b"server_shutting_down" in rest(stream)
        assert error_of(rest(whole))["code"] == "server_shutting_down"
        assert "Traceback" not in log_of(server)


def test_a_second_signal_does_not_wait_for_a_long_step() -> None:
    with scripted(timeout_s=1, step_s=60) as server:
        whole = ask(server)
        time.sleep(0.5)
        server.process.send_signal(signal.SIGTERM)
        assert error_of(rest(whole))["code"] == "server_shutting_down"
        began = time.monotonic()
        assert server.end() == 1  # the engine did not end
        assert time.monotonic() - began < 4


def test_a_body_that_does_not_come_holds_nothing_up() -> None:
    with scripted(timeout_s=60) as server:
        partial, head = ask(server, length=10_000), connect(server)
        head.sendall(b"GET /health HTTP/1.1\r\nhos")
        time.sleep(0.3)
        began = time.monotonic()
        assert server.end() == 0
        assert time.monotonic() - began < 4
        assert error_of(rest(partial))["code"] == "server_shutting_down"
        assert rest(head) == b""
        assert "Traceback" not in log_of(server)


def test_a_reader_that_has_stopped_holds_nothing_up() -> None:
    with scripted(timeout_s=1, step_s=0) as server:
        stuck = ask(server, stream=True, n=20, temperature=1)
        time.sleep(2)  # until no more can be sent
        began = time.monotonic()
        assert server.end() == 0
        assert time.monotonic() - began < 4
        assert b"[DONE]" not in rest(stuck)
        assert "Traceback" not in log_of(server)
