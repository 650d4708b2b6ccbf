"""Server-sent events as raw ASGI, and noticing that a client has left."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from invar.api.errors import (
    ApiError,
    bad_request,
    engine_failed,
    internal,
    shutting_down,
)
from invar.api.frame import REQUEST_ID
from invar.api.threads import beside_loop
from invar.serving.async_engine import Generation
from invar.serving.choice import ChoiceDelta

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
]
CLIENT_CLOSED = 499  # nginx's number for the access log; nobody receives it


class DisconnectWatch:
    """While open, the generation is cancelled as soon as the client leaves."""

    def __init__(self, receive: Receive, generation: Generation) -> None:
        self.disconnected = False
        self._receive = receive
        self._generation = generation
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> DisconnectWatch:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._generation.cancel()  # does nothing when it has ended
        if self._task is not None:
            self._task.cancel()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.disconnected = True
        self._generation.cancel()


class Frames(Protocol):
    """A dialect's way to write a stream; each frame is one JSON object.

    Where a frame has a ``type``, its event is named so.
    """

    ends_with_done: bool  # OpenAI's older routes end a stream that is complete with [DONE]

    def deltas(self, deltas: Sequence[ChoiceDelta]) -> list[dict[str, Any]]: ...

    async def closing(self) -> list[dict[str, Any]]: ...


class EventStream(Response):
    """A streamed answer. Headers wait for the engine's first word, so that an error is a status."""

    def __init__(self, generation: Generation, frames: Frames) -> None:
        self.background = None
        self._generation = generation
        self._frames = frames
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with DisconnectWatch(receive, self._generation) as watch:
            try:
                await self._stream(watch, send)
            except (Exception, asyncio.CancelledError) as error:
                if self._started:
                    last = event(cut_short(error, scope).body())
                    await send(body(last, more=False))
                raise

    async def _stream(self, watch: DisconnectWatch, send: Send) -> None:
        async for deltas in self._generation:
            if watch.disconnected:
                return
            error = first_error(deltas)
            if error is not None and not self._started:
                raise error
            if error is not None:
                # No [DONE] behind it: a simple client would take the answer for complete.
                last = events(self._frames.deltas([without_end(delta) for delta in deltas]))
                await send(body(last + event(error.body()), more=False))
                return
            if not self._started:
                await send(
                    {"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS}
                )
                self._started = True
            await send(body(await beside_loop(items(deltas), partial(self._written, deltas))))
        if not watch.disconnected:
            closing = events(await self._frames.closing())
            if self._frames.ends_with_done:
                closing += event(b"[DONE]")
            await send(body(closing, more=False))

    def _written(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        return events(self._frames.deltas(deltas))


def items(deltas: Sequence[ChoiceDelta]) -> int:
    return sum(delta.items for delta in deltas)


def event(data: bytes, name: str | None = None) -> bytes:
    named = b"" if name is None else b"event: " + name.encode() + b"\n"
    return named + b"data: " + data + b"\n\n"


def events(frames: Sequence[dict[str, Any]]) -> bytes:
    return b"".join(event(msgspec.json.encode(frame), frame.get("type")) for frame in frames)


def body(data: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


def cut_short(error: BaseException, scope: Scope) -> ApiError:
    """Only the end of the server cancels a request."""
    if isinstance(error, asyncio.CancelledError):
        return shutting_down()
    return internal(scope.get(REQUEST_ID, ""))


def first_error(deltas: Sequence[ChoiceDelta]) -> ApiError | None:
    """The error of a call is the error of any of its choices."""
    for delta in deltas:
        if delta.error is not None:
            return bad_request(delta.error) if delta.refused else engine_failed(delta.error)
    return None


def without_end(delta: ChoiceDelta) -> ChoiceDelta:
    """What had come before an error, which is no end of an answer."""
    return dataclasses.replace(delta, finish_reason=None, error=None)


async def collect(
    generation: Generation, choices: int, receive: Receive
) -> list[ChoiceDelta] | None:
    """All choices in full, or None if the client left before the end. Raises ApiError."""
    answers = [ChoiceDelta(index) for index in range(choices)]
    async with DisconnectWatch(receive, generation) as watch:
        async for deltas in generation:
            error = first_error(deltas)
            if error is not None:
                raise error
            for delta in deltas:
                answers[delta.index].extend(delta)
    return None if watch.disconnected else answers
