"""A client that leaves is cancelled within a step, wherever it left."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from invar.engine.request import EngineRequest

from .scripted import RunningServer, Step, endless, running, token


def open_request(
    server: RunningServer, path: str, body: dict[str, Any], headers: str = ""
) -> socket.socket:
    data = json.dumps(body).encode()
    connection = socket.create_connection(server.address)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    connection.sendall(f"{head}{headers}content-length: {len(data)}\r\n\r\n".encode() + data)
    return connection


def wait_for(condition: Any, within_s: float = 5.0) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 200}
CALLS = [
    ("/v1/chat/completions", CHAT | {"stream": True}),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", CHAT | {"n": 3, "temperature": 1}),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 200, "stream": True}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 200}),
]


@pytest.mark.parametrize(("path", "body"), CALLS)
def test_b41_a_client_that_leaves_during_generation(path: str, body: dict[str, Any]) -> None:
    with running(endless(pause_s=0.02)) as server:
        connection = open_request(server, path, body)
        wait_for(lambda: server.engine.steps >= 2)
        choices = len(server.engine.running)
        connection.close()
        before = server.engine.steps
        assert server.idle()
        # One step may be running when the socket closes, one when the abort is sent.
        assert server.engine.steps - before <= 4
        assert len(server.engine.aborted) == choices


def test_b41_a_client_that_leaves_while_its_prompt_is_computed() -> None:
    release = threading.Event()

    def long_prefill(request: EngineRequest) -> Iterator[Step]:
        while not release.is_set():
            time.sleep(0.01)
            yield []
        yield [token("Hello")]

    with running(long_prefill) as server:
        for stream in (True, False):
            connection = open_request(server, "/v1/chat/completions", CHAT | {"stream": stream})
            wait_for(lambda: server.engine.running)
            connection.close()
            assert server.idle()
        release.set()


def test_b41_baseline_after_200_aborts() -> None:
    with running(endless(pause_s=0.001)) as server:
        for round_ in range(20):
            connections = [
                open_request(server, *CALLS[(round_ + i) % len(CALLS)]) for i in range(10)
            ]
            wait_for(lambda: server.engine.running)
            for connection in connections:
                connection.close()
        assert server.idle(10)
        assert server.complete(max_tokens=3).json()["usage"]["completion_tokens"] == 3
        metrics = server.http.get("/metrics").text
    line = next(
        line
        for line in metrics.splitlines()
        if line.startswith("vllm:request_success_total") and '"abort"' in line
    )
    assert float(line.split()[-1]) > 100


def test_a_reader_that_stops_holds_nobody_up() -> None:
    with running(endless(pause_s=0)) as server:
        stuck = open_request(server, "/v1/chat/completions", CHAT | {"stream": True})
        wait_for(lambda: server.engine.running)
        assert server.complete(max_tokens=50).status_code == 200
        assert server.idle()
        stuck.close()


@pytest.mark.parametrize(("path", "body"), CALLS)
@pytest.mark.parametrize("how", ["half", "reset", "pipelined"])
def test_b41_other_ways_to_leave(path: str, body: dict[str, Any], how: str) -> None:
    """A half that is closed, a reset, and a client that had sent another request ahead."""
    with running(endless(pause_s=0.02)) as server:
        connection = open_request(server, path, body)
        if how == "pipelined":
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        wait_for(lambda: server.engine.steps >= 2)
        choices = len(server.engine.running)
        if how == "half":
            connection.shutdown(socket.SHUT_WR)
        else:
            reset = struct.pack("ii", how == "reset", 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
            connection.close()
        before = server.engine.steps
        assert server.idle()
        assert server.engine.steps - before <= 4
        assert len(server.engine.aborted) == choices
        connection.close()
