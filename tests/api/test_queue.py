"""Caps of the queue: what cannot be taken soon is turned away, with the time to come back."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx

from invar.engine.request import EngineRequest

from .scripted import RunningServer, Step, running, token
from .test_limits import error_of


@contextmanager
def held(**options: Any) -> Iterator[tuple[RunningServer, threading.Event]]:
    """A server on which nothing gets on until the event is set."""
    go = threading.Event()

    def script(request: EngineRequest) -> Iterator[Step]:
        while not go.is_set():
            time.sleep(0.002)
            yield []
        yield [token("Hello")]

    with running(script, **options) as server:
        yield server, go
        go.set()


def send(server: RunningServer, **fields: Any) -> httpx.Response:
    return server.complete(max_tokens=2, **fields)


def wait_until(server: RunningServer, count: int) -> None:
    end = time.monotonic() + 10
    while len(server.engine.running) < count:
        assert time.monotonic() < end
        time.sleep(0.002)


def rejections(server: RunningServer, reason: str) -> float:
    for line in server.http.get("/metrics").text.splitlines():
        if line.startswith("vllm:admission_rejections_total{") and f'"{reason}"' in line:
            return float(line.rsplit(" ", 1)[1])
    return 0.0


def test_a_cap_by_requests() -> None:
    with held(max_running=2, max_queued_requests=3) as (server, go), ThreadPoolExecutor(8) as pool:
        sent = [pool.submit(send, server, stream=i % 2 == 0) for i in range(5)]
        wait_until(server, 5)
        for stream in (False, True):
            refused = send(server, stream=stream)
            assert error_of(refused, 503)["code"] == "queue_full"
            assert 1 <= int(refused.headers["retry-after"]) <= 120
        assert error_of(server.http.get("/ready"), 503)["code"] == "queue_full"
        assert server.http.get("/health").status_code == 200
        assert rejections(server, "max_num_queued_reqs") == 2
        go.set()
        assert {one.result().status_code for one in sent} == {200}
        assert server.idle()
        assert server.http.get("/ready").status_code == 200
        assert send(server).status_code == 200


def test_a_cap_of_nothing_lets_in_what_runs_at_once() -> None:
    with held(max_running=2, max_queued_requests=0) as (server, go), ThreadPoolExecutor(8) as pool:
        sent = [pool.submit(send, server) for _ in range(2)]
        wait_until(server, 2)
        error_of(send(server), 503)
        go.set()
        assert {one.result().status_code for one in sent} == {200}
        assert server.idle()
        assert send(server, n=8, temperature=1).status_code == 200  # alone, it need not wait


def test_a_cap_by_tokens() -> None:
    with held(max_queued_tokens=60) as (server, go), ThreadPoolExecutor(8) as pool:
        prompt = [5] * 40
        sent = [pool.submit(send, server, prompt=[5] * 100)]  # nothing waits before it
        wait_until(server, 1)
        error_of(send(server, prompt=[5]), 503)
        go.set()
        assert sent[0].result().status_code == 200
        assert server.idle()
        assert server.server.admission.queued_tokens == 0
        go.clear()
        sent = [pool.submit(send, server, prompt=prompt)]
        wait_until(server, 1)
        refused = send(server, prompt=prompt)
        assert error_of(refused, 503)["code"] == "queue_full"
        assert int(refused.headers["retry-after"]) >= 1
        sent.append(pool.submit(send, server, prompt=[5] * 15))
        wait_until(server, 2)
        assert rejections(server, "max_num_queued_tokens") == 2
        go.set()
        assert {one.result().status_code for one in sent} == {200}
        assert server.idle()
        assert server.server.admission.queued_tokens == 0


def test_what_leaves_the_queue_makes_room() -> None:
    """Clients that go and requests that expire hold nothing."""
    with held(max_running=1, max_queued_requests=1, max_queued_tokens=1000) as (server, go):
        for _ in range(10):
            for read_s in (0.02, 0.001):
                try:
                    timeout = httpx.Timeout(10, read=read_s)
                    body = {"prompt": [5] * 50, "max_tokens": 2}
                    server.http.post("/v1/completions", json=body, timeout=timeout)
                except httpx.ReadTimeout:
                    pass
            headers = {"x-request-timeout-ms": "20"}
            body = {"prompt": [5] * 50, "max_tokens": 2, "stream": True}
            answer = server.http.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code in (503, 504)
        assert server.idle()
        assert server.server.admission.queued_tokens == 0
        go.set()
        assert send(server).status_code == 200
