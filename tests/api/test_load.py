"""Many clients at once over the real engine: raw sockets, those that leave, those that are slow."""

from __future__ import annotations

import json
import random
import selectors
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from invar.config import EngineConfig

from .test_real_engine import TINY, RealServer, real_server

STREAM = {"prompt": [3, 4, 5], "max_tokens": 16, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def real() -> Iterator[RealServer]:
    with real_server(EngineConfig(model=str(TINY), max_num_seqs=8, num_threads=2)) as server:
        yield server


def address(real: RealServer) -> tuple[str, int]:
    url = real.http.base_url
    assert url.port is not None
    return url.host, url.port


def ask(real: RealServer, path: str = "/v1/completions", **fields: Any) -> socket.socket:
    body = json.dumps(STREAM | fields).encode()
    client = socket.create_connection(address(real), timeout=60)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    client.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    return client


def read_all(clients: list[socket.socket], within_s: float = 120) -> list[bytes]:
    """What each is sent up to the end of its answer, reading from all of them at once."""
    said = dict.fromkeys(clients, b"")
    end = time.monotonic() + within_s
    with selectors.DefaultSelector() as ready:
        for client in clients:
            ready.register(client, selectors.EVENT_READ)
        while ready.get_map():
            assert time.monotonic() < end
            for key, _ in ready.select(1):
                client = key.fileobj
                assert isinstance(client, socket.socket)
                part = client.recv(1 << 16)
                said[client] += part
                if not part or said[client].endswith(b"0\r\n\r\n"):
                    ready.unregister(client)
    return list(said.values())


def text_of(said: bytes) -> str:
    frames = [line[6:] for line in said.split(b"\n") if line.startswith(b"data: {")]
    return "".join(json.loads(frame)["choices"][0]["text"] for frame in frames)


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


def test_200_streams_at_once(real: RealServer) -> None:
    seeds = [index % 5 for index in range(200)]
    alone = [real.complete(seed=seed, **STREAM | {"stream": False}) for seed in range(5)]
    texts = [answer["choices"][0]["text"] for answer in alone]
    clients = [ask(real, seed=seed) for seed in seeds]
    answers = read_all(clients)
    for seed, said in zip(seeds, answers, strict=True):
        assert said.startswith(b"HTTP/1.1 200")
        assert b"data: [DONE]" in said
        assert text_of(said) == texts[seed]
    for client in clients:
        client.close()
    real.settle()


LEAVING = ("close", "half", "reset")


def leave(client: socket.socket, how: str) -> None:
    if how == "half":
        client.shutdown(socket.SHUT_WR)
        return
    if how == "reset":
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def storm(real: RealServer, rng: random.Random, count: int) -> None:
    """Clients that leave in the queue, in their prompt, in their answer, in each of three ways."""
    half_open = []
    for _ in range(count // 20):
        clients = []
        for _ in range(20):
            fields = {
                "prompt": [rng.randrange(5, 90)] * rng.choice((1, 40, 900)),
                "max_tokens": rng.choice((1, 100, 1000)),
                "n": rng.choice((1, 1, 3)),
                "temperature": 1,
                "stream": rng.random() < 0.6,
            }
            clients.append(ask(real, **fields))
        time.sleep(rng.random() * 0.05)
        for client in clients:
            how = rng.choice(LEAVING)
            leave(client, how)
            if how == "half":
                half_open.append(client)
    real.settle()
    for client in half_open:
        client.settimeout(5)
        try:
            while client.recv(1 << 16):
                pass
        except ConnectionError:
            pass
        client.close()


def test_a_storm_of_clients_that_leave_holds_nothing(real: RealServer) -> None:
    rng = random.Random(7)
    storm(real, rng, 100)  # what is allocated once is allocated now
    before = resident()
    storm(real, rng, 300)
    assert resident() - before < 32 << 20
    assert real.complete(max_tokens=3, ignore_eos=True)["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("how", LEAVING)
@pytest.mark.parametrize("fields", [
    {"stream": True}, {"stream": False}, {"stream": True, "n": 3}, {"stream": False, "n": 3},
])  # fmt: skip
@pytest.mark.parametrize("stage", ["queued", "prompt", "answer"])
def test_b41_pages_come_back_wherever_a_client_leaves(
    real: RealServer, how: str, fields: dict[str, Any], stage: str
) -> None:
    """Before the answer would have ended."""
    engine = real.loaded.engine
    fields = {"temperature": 1, "max_tokens": 1000, "prompt": [7, 8], **fields}
    if stage == "prompt":
        fields |= {"prompt": list(range(5, 90)) * 23, "max_tokens": 50}
    others = [ask(real, max_tokens=1900, n=8, temperature=1)] if stage == "queued" else []
    deadline = time.monotonic() + 20
    while stage == "queued" and engine.stats().running < 8:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    client, before = ask(real, **fields), engine.generated_tokens
    while stage != "prompt" and not engine.stats().waiting and engine.generated_tokens < before + 8:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    leave(client, how)
    for other in others:
        other.close()
    real.settle()
    whole = {"queued": 8 * 1900, "prompt": 1000, "answer": 1000 * fields.get("n", 1)}
    assert engine.generated_tokens - before < whole[stage]
    client.close()


def test_what_expires_in_the_queue_is_never_computed(real: RealServer) -> None:
    """Behind requests that take the whole engine; what runs is cut with its error as the end."""
    engine = real.loaded.engine
    before, end = engine.generated_tokens, time.monotonic() + 20
    busy = ask(real, max_tokens=1900, n=8, temperature=1)
    while engine.generated_tokens < before + 64:  # all eight run
        assert time.monotonic() < end
        time.sleep(0.002)
    rows = engine.prompt_tokens
    for stream in (False, True):
        body = STREAM | {"prompt": [7] * 900, "stream": stream}
        headers = {"x-request-timeout-ms": "30"}
        answer = real.http.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "deadline_exceeded"
    assert engine.stats().running == 8
    assert engine.prompt_tokens == rows
    busy.close()
    real.settle()
    body = STREAM | {"max_tokens": 2000, "n": 8, "temperature": 1}
    headers = {"x-request-timeout-ms": "200"}
    said = real.http.post("/v1/completions", json=body, headers=headers).text
    assert json.loads(said.rstrip().split("data: ")[-1])["error"]["code"] == "deadline_exceeded"
    real.settle()


def test_a_reader_that_stops_is_cancelled_and_its_pages_come_back() -> None:
    config = EngineConfig(model=str(TINY), max_num_seqs=8, num_threads=2)
    with real_server(config, stall_timeout_s=0.5) as real:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(address(real))
        fields = STREAM | {"max_tokens": 1900, "n": 64, "temperature": 1, "logprobs": 20}
        body = json.dumps(fields).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        client.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        end = time.monotonic() + 5
        while not real.loaded.engine.has_unfinished and time.monotonic() < end:
            time.sleep(0.005)
        assert real.complete(max_tokens=5, ignore_eos=True)["usage"]["completion_tokens"] == 5
        end = time.monotonic() + 60
        while real.loaded.engine.has_unfinished:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert real.loaded.engine.generated_tokens < 64 * 1900
        real.settle()
        client.close()
