"""Streams that say nothing for a while, and streams that nobody reads."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from contextlib import suppress

import httpx
import pytest

from invar.api.limits import Limits
from invar.api.protocol import Connection
from invar.engine.request import EngineRequest
from invar.serving.async_engine import Generation

from .scripted import Step, endless, running, says, token
from .test_disconnects import open_request, wait_for

STREAM = {"prompt": "Hi", "stream": True}


def paused(before_s: float, between_s: float) -> object:
    def script(request: EngineRequest) -> Iterator[Step]:
        for pause_s, piece in ((before_s, "Hello"), (between_s, " world")):
            end = time.monotonic() + pause_s
            while time.monotonic() < end:
                time.sleep(0.01)
                yield []
            yield [token(piece)]

    return script


def unread_bytes(generation: Generation) -> int:
    """Looked at from another thread than the one that changes it."""
    while True:
        with suppress(RuntimeError):  # it changed meanwhile
            return generation.unread_bytes


def blocks(answer: httpx.Response) -> list[str]:
    return [block for block in answer.text.split("\n\n") if block]


def test_comments_while_there_is_nothing_to_say() -> None:
    script = paused(0.0, 1.0)
    with running(script, limits=Limits(keep_alive_s=0.2)) as server:  # type: ignore[arg-type]
        found = blocks(server.complete(stream=True))
        assert found.count(": keep-alive") >= 2
        assert found[-1] == "data: [DONE]"
        assert "Hello" in found[0]
        texts = [json.loads(b[6:])["choices"][0]["text"] for b in found[:-1] if b[0] != ":"]
        assert "".join(texts) == "Hello world"
        # The official client skips them.
        stream = server.client.completions.create(model="scripted", prompt="Hi", stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == "Hello world"


def test_comments_while_the_first_word_is_awaited() -> None:
    script = paused(1.0, 0.0)
    with running(script, limits=Limits(keep_alive_s=0.2)) as server:  # type: ignore[arg-type]
        found = blocks(server.complete(stream=True))
        assert found[0] == ": keep-alive"
        assert found[-1] == "data: [DONE]"


def test_no_comments_unless_wanted() -> None:
    script = paused(0.3, 0.3)
    with running(script, limits=Limits(keep_alive_s=0)) as server:  # type: ignore[arg-type]
        assert ": keep-alive" not in blocks(server.complete(stream=True))


@pytest.mark.parametrize("limits", [
    Limits(stall_timeout_s=0.5, unread_bytes=1 << 40),
    Limits(stall_timeout_s=600, unread_bytes=50_000),
], ids=["time", "bytes"])  # fmt: skip
def test_a_reader_that_has_stopped_is_cancelled(limits: Limits) -> None:
    with running(endless(pause_s=0), limits=limits, max_model_len=1_000_000) as server:
        body = STREAM | {"max_tokens": 900_000, "n": 10, "temperature": 1, "logprobs": 5}
        stuck = open_request(server, "/v1/completions", body)
        wait_for(lambda: server.engine.running)
        assert server.complete(max_tokens=20).status_code == 200
        most, end = 0, time.monotonic() + 60
        while server.engine.running and time.monotonic() < end:
            live = list(server.server.engine._live.values())
            most = max([most, *(unread_bytes(one.generation) for one in live)])
            time.sleep(0.01)
        assert server.idle()
        assert len(server.engine.aborted) == 10
        assert most < 8 << 20
        stuck.close()


def test_a_reader_that_has_stopped_is_noticed_though_nothing_more_comes() -> None:
    """What waits then is a comment that cannot be sent."""
    limits = Limits(keep_alive_s=0.2, stall_timeout_s=0.5)
    with running(paused(0.0, 60.0), limits=limits) as server:  # type: ignore[arg-type]
        stuck = open_request(server, "/v1/completions", STREAM)
        while b"Hello" not in stuck.recv(1 << 16):
            pass
        (stream,) = server.server.stream_guard._streams
        stream._connection.flow.pause_writing()  # as a full socket does
        wait_for(lambda: not server.engine.running, within_s=20)
        assert server.idle()
        stuck.close()


def test_a_slow_reader_gets_everything_in_fewer_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """What could not be sent at once is joined, and nothing of it is lost."""
    made = Connection.connection_made

    def with_a_small_buffer(self: Connection, transport: asyncio.Transport) -> None:
        """The kernel's own takes megabytes."""
        client = transport.get_extra_info("socket")
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 << 10)
        made(self, transport)

    monkeypatch.setattr(Connection, "connection_made", with_a_small_buffer)
    with running(says(*["zz"] * 10_000), max_model_len=50_000) as server:
        client = open_request(server, "/v1/completions", STREAM | {"max_tokens": 10_000})
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        wait_for(server.idle)
        data = b""
        while not data.endswith(b"0\r\n\r\n"):
            part = client.recv(1 << 16)
            assert part, "the stream was cut"
            data += part
        client.close()
    frames = [line for line in data.split(b"\n") if line.startswith(b"data: {")]
    text = "".join(json.loads(frame[6:])["choices"][0]["text"] for frame in frames)
    assert text == "zz" * 10_000
    assert len(frames) < 5_000
