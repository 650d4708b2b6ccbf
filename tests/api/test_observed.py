"""What a request leaves behind: its access line and its metrics, and nothing of what was said."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from observe.exposed import samples

from invar.api.keys import key_ring
from invar.engine.request import EngineRequest
from invar.observe.access_log import AccessLog
from invar.observe.metrics import MAX_NAMES
from invar.observe.requests import RequestRecord

from .scripted import RunningServer, Script, Step, endless, running, says, token
from .test_disconnects import CHAT, open_request, wait_for


@contextmanager
def logged(script: Script, tmp_path: Path, **options: Any) -> Iterator[tuple[RunningServer, Path]]:
    path = tmp_path / "access.log"
    with path.open("wb") as file, running(script, **options) as server:
        metrics = server.server.metrics
        server.server.access_log = AccessLog(file.fileno(), metrics.count_dropped_line)
        yield server, path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def found(server: RunningServer) -> dict[str, float]:
    return samples(server.http.get("/metrics").text)


def test_one_line_a_request_without_its_text(tmp_path: Path) -> None:
    with logged(says("Hello", " world"), tmp_path) as (server, path):
        body = {"prompt": "my secret", "user": "person@example.test", "n": 2, "stream": True}
        headers = {"x-request-id": "mine"}
        server.http.post("/v1/completions?x=%0Asecret", json=body, headers=headers)
        server.chat(max_tokens=1)
        server.chat(temperature=7)
        server.http.get("/secret%0Apath")
    text = path.read_text()
    for private in ("my secret", "person@", "%0Asecret", "Hello"):
        assert private not in text
    streamed, plain, wrong, lost = lines(path)
    assert streamed["request_id"] == "mine"
    assert streamed["time"].endswith("Z")
    assert streamed["client"].startswith("127.0.0.1:")
    expected = {
        "method": "POST", "route": "/v1/completions", "status": 200, "dialect": "openai",
        "stream": True, "choices": 2, "prompt_tokens": 10, "cached_tokens": 1, "output_tokens": 6,
        "finish_reason": "stop",
    }  # fmt: skip
    assert {name: streamed[name] for name in expected} == expected
    assert 0 <= streamed["queue_ms"] <= streamed["ttft_ms"] <= streamed["e2e_ms"]
    assert (plain["output_tokens"], plain["finish_reason"], plain["stream"]) == (1, "length", False)
    assert (wrong["status"], wrong["error"]) == (400, "invalid_request_error")
    assert "prompt_tokens" not in wrong
    assert (lost["status"], lost["route"], lost["path"]) == (404, "other", "/secret%0Apath")


CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(("data", "status", "error", "method"), [
    (b"my secret\r\n\r\n", 400, "invalid_request_error", "-"),
    (b"\x16\x03\x01\x02\x00\x01 my secret", 400, "invalid_request_error", "-"),
    (b"GET /health HTTP/1.1\r\nmy secret\r\n\r\n", 400, "invalid_request_error", "-"),
    (b"GET /health HTTP/1.1\r\n\r\nmy secret\r\n\r\n", 400, "invalid_request_error", "-"),
    (b"GET /secret HTTP/1.1\r\nx-a: " + b"my secret" * 20_000, 431, "headers_too_large", "-"),
    (CHUNKED + b"my secret\r\n", 400, "invalid_request_error", "POST"),
    (CHUNKED + b"2\r\n{}\r\n0\r\nmy secret\r\n\r\n", 400, "invalid_request_error", "POST"),
])  # fmt: skip
def test_a_request_that_is_none_has_its_line_too(
    tmp_path: Path, data: bytes, status: int, error: str, method: str
) -> None:
    with logged(says("Hello"), tmp_path) as (server, path):
        with socket.create_connection(server.address, timeout=10) as client:
            answer = b""
            try:
                client.sendall(data)
                while part := client.recv(65536):
                    answer += part
            except OSError:  # reset, since it went on sending
                pass
        counted = found(server)
    assert b"secret" not in path.read_bytes()
    line, *more = [line for line in lines(path) if line["route"] not in ("/health", "/metrics")]
    assert not more
    assert (line["status"], line["error"], line["method"]) == (status, error, method)
    assert line["client"].startswith("127.0.0.1:")
    assert "disconnected" not in line
    if answer:
        assert f"x-request-id: {line['request_id']}".encode() in answer
    route = "/v1/completions" if method == "POST" else "other"
    name = 'invar:http_requests_total{route="%s",status="%d"}'
    assert counted[name % (route, status)] == 1


def test_a_route_keeps_its_name_where_it_is_not_reached(tmp_path: Path) -> None:
    with logged(says("Hello"), tmp_path) as (server, path):
        server.http.get("/v1/completions")
        server.http.post("/v1/messages", headers={"x-request-timeout-ms": "soon"})
        server.http.get("/v1/models/a/b")
    seen = [(line["status"], line["route"]) for line in lines(path)]
    assert seen == [
        (405, "/v1/completions"),
        (400, "/v1/messages"),
        (404, "/v1/models/{model:path}"),
    ]


def test_a_key_by_name_and_digest(tmp_path: Path) -> None:
    with logged(says("Hello"), tmp_path, keys=key_ring(["sk-one", "sk-two"], None)) as (
        server,
        path,
    ):
        server.chat()
        server.http.headers["authorization"] = "Bearer sk-two"
        server.chat()
    refused, known = lines(path)
    assert (refused["status"], refused["error"]) == (401, "invalid_api_key")
    assert "key" not in refused
    digest = hashlib.sha256(b"sk-two").hexdigest()
    assert (known["key"], known["key_id"]) == ("key-2", digest[:8])
    assert "sk-" not in path.read_text()


def test_a_client_that_leaves(tmp_path: Path) -> None:
    with logged(endless(), tmp_path) as (server, path):
        for stream in (True, False):
            connection = open_request(server, "/v1/chat/completions", CHAT | {"stream": stream})
            wait_for(lambda: server.engine.running)
            connection.close()
            assert server.idle()
        wait_for(lambda: found(server).get(LEFT) == 2.0)
    for line in lines(path)[:2]:
        assert line["disconnected"]
        assert line["finish_reason"] == "abort"


LEFT = 'invar:client_disconnects_total{engine="0",model_name="scripted"}'


def test_a_log_that_nobody_reads_costs_lines_and_not_the_server() -> None:
    reader, writer = os.pipe()
    dropped = []
    log = AccessLog(writer, lambda: dropped.append(1))
    record = RequestRecord("id", "GET", "/" + "x" * 190, "-")
    for _ in range(25_000):
        log.write(record)
    assert 4_000 < len(dropped) <= 15_000  # the rest waits, is being written, or in the pipe
    os.close(reader)
    log.close()
    assert len(dropped) > 15_000  # what waited is lost too
    os.close(writer)


def test_lines_of_many_requests_stay_whole(tmp_path: Path) -> None:
    with logged(says("Hello"), tmp_path) as (server, path):
        threads = [threading.Thread(target=lambda: server.http.get("/health")) for _ in range(40)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(lines(path)) == 40


def until(event: threading.Event) -> Script:
    """Says nothing before the event, then one token a step."""

    def script(request: EngineRequest) -> Iterator[Step]:
        while not event.wait(0.002):
            yield []
        while True:
            time.sleep(0.01)
            yield [token("zz")]

    return script


def test_b85_every_request_ends_in_one_reason() -> None:
    go = threading.Event()
    with running(until(go)) as server:
        # Five end before their first token, five in the middle of a stream; two are wrong.
        early = [open_request(server, "/v1/chat/completions", CHAT) for _ in range(5)]
        wait_for(lambda: len(server.engine.running) == 5)
        for connection in early:
            connection.close()
        assert server.idle()
        go.set()
        late = [
            open_request(server, "/v1/chat/completions", CHAT | {"stream": True}) for _ in range(5)
        ]
        for connection in late:
            assert connection.recv(20)
            connection.close()
        assert server.idle()
        for _ in range(5):
            assert server.complete(max_tokens=3).status_code == 200
        for _ in range(2):
            assert server.complete(temperature=9).status_code == 400
        values = found(server)
    model = 'engine="0",model_name="scripted"'
    series = 'vllm:request_success_total{{engine="0",finished_reason="{}",model_name="scripted"}}'
    ended = {r: values[series.format(r)] for r in ("stop", "length", "abort", "error")}
    assert ended == {"stop": 0, "length": 5, "abort": 10, "error": 0}
    assert values[f"vllm:e2e_request_latency_seconds_count{{{model}}}"] == 15
    assert values[f"vllm:request_max_num_generation_tokens_count{{{model}}}"] == 15
    assert values[f"vllm:num_requests_running{{{model}}}"] == 0
    assert values[f"vllm:num_requests_waiting{{{model}}}"] == 0
    assert values['invar:http_requests_total{route="/v1/completions",status="200"}'] == 5
    assert values['invar:http_requests_total{route="/v1/completions",status="400"}'] == 2
    assert values['invar:http_errors_total{code="invalid_request_error"}'] == 2
    handler = 'handler="/v1/completions",method="POST"'
    assert values[f'http_requests_total{{{handler},status="2xx"}}'] == 5
    assert values[f"http_request_duration_seconds_count{{{handler}}}"] == 7


@pytest.mark.parametrize("kind", ["paths", "models", "fields"])
def test_b87_series_are_bounded_and_tell_nobody(kind: str) -> None:
    with running(says("Hello")) as server:
        server.http.headers["authorization"] = "Bearer sk-private"
        server.chat(user="person@example.test")
        before = len(found(server))
        for number in range(100):
            if kind == "paths":
                server.http.get(f"/random/{number}")
            elif kind == "models":
                server.chat(model=f"model{number}")
            elif number < 10:
                server.chat(**{f"field{number}{more}": 1 for more in range(100)})
        text = server.http.get("/metrics").text
    assert "person" not in text
    assert "private" not in text
    assert "random" not in text
    assert "model4" not in text
    assert len(samples(text)) - before <= (MAX_NAMES + 2 if kind == "fields" else 10)
