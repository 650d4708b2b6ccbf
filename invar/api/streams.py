"""Server-sent events as raw ASGI: clients that leave, that do not read, or whose time is over.

What begins and ends an answer goes through the task of its request. What comes between, a token or
two a step, is written from the engine's report itself while nothing is in its way: to wake a task
through all the layers around it costs more than all else that is done for a token.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from invar.api.calls import Call, client_left, json_response
from invar.api.errors import (
    ApiError,
    bad_request,
    deadline_exceeded,
    engine_failed,
    internal,
    shutting_down,
)
from invar.api.frame import RECORD, REQUEST_ID, STREAM_TYPE
from invar.api.protocol import CONNECTION, Connection
from invar.api.threads import INLINE_ITEMS, beside_loop
from invar.serving.choice import ChoiceDelta

logger = logging.getLogger("invar.api")

STREAM_HEADERS = [
    STREAM_TYPE,
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
]
COMMENT = b": keep-alive\n\n"  # what every parser of events skips


class Watch:
    """While open, the generation is cancelled once its client leaves or has waited long enough."""

    def __init__(self, receive: Receive, call: Call) -> None:
        self.left = False
        self.expired = False
        self._receive = receive
        self._call = call
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Watch:
        loop, deadline = asyncio.get_running_loop(), self._call.deadline
        self._task = loop.create_task(self._watch())
        if deadline is not None:
            self._timer = loop.call_later(max(0.0, deadline - time.monotonic()), self._expire)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._call.generation.cancel()  # does nothing when it has ended
        if self._task is not None:
            self._task.cancel()
        if self._timer is not None:
            self._timer.cancel()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.left = True
        self._call.generation.cancel()

    def _expire(self) -> None:
        if not self._call.generation.finished:
            self.expired = True
            self._call.generation.cancel()


class Frames(ABC):
    """A dialect's way to write an answer: whole, or as a stream of frames, one JSON object each.

    Where a frame has a ``type``, its event is named so.
    """

    ends_with_done = True  # OpenAI's older routes end a stream that is complete with [DONE]
    keep_alive = COMMENT

    @abstractmethod
    def complete(self, answers: Sequence[ChoiceDelta]) -> dict[str, Any]:
        """The whole answer, of all choices in full."""

    async def kept(self, answer: dict[str, Any]) -> dict[str, Any]:
        """The whole answer, after it has been kept where the dialect asks for that."""
        return answer

    @abstractmethod
    def deltas(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        """Events."""

    @abstractmethod
    async def closing(self) -> list[dict[str, Any]]: ...

    def failed(self, error: ApiError) -> list[dict[str, Any]]:
        """In place of the error's own event, where the dialect has another for it."""
        return []


class EventStream(Response):
    """A streamed answer.

    Headers wait for the engine's first word, so that an error is a status; but no longer than the
    interval of keep-alive comments, since proxies give up on a connection that says nothing.
    """

    def __init__(self, call: Call, frames: Frames) -> None:
        self.background = None
        self._call = call
        self._limits = call.server.limits
        self._frames = frames
        self._keep_alive = frames.keep_alive
        self._started = False
        self._ended = False
        self._writing = asyncio.Lock()
        self._broken: Exception | None = None  # what went wrong outside the task
        self._blocked_since: float | None = None  # in a send that has not returned
        self._comment: asyncio.Task[None] | None = None  # that keeps the connection alive
        self._last_sent = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._send = scope, send
        self._connection: Connection | None = scope.get(CONNECTION)
        self._call.server.stream_guard.add(self)
        try:
            async with Watch(receive, self._call) as watch:
                await self._stream(watch)
        except (Exception, asyncio.CancelledError) as error:
            self._let_go()
            if self._started:
                await self._write(self._error_event(cut_short(error, scope)), more=False)
            raise
        finally:
            self._let_go()

    async def _stream(self, watch: Watch) -> None:
        self._call.generation.direct = self._write_now
        async for deltas in self._call.generation:
            if watch.left:
                return
            if self._broken is not None:
                raise self._broken
            error = first_error(deltas)
            if error is not None:
                await self._fail(error, [without_end(delta) for delta in deltas])
                return
            self._call.ticket.take(deltas)
            data = await beside_loop(items(deltas), partial(self._frames.deltas, deltas))
            if data:
                await self._write(data)
        if watch.expired:
            await self._fail(deadline_exceeded(), [])
        elif not watch.left:
            closing = events(await self._frames.closing())
            if self._frames.ends_with_done:
                closing += event(b"[DONE]")
            await self._write(closing, more=False)

    async def _fail(self, error: ApiError, deltas: Sequence[ChoiceDelta]) -> None:
        """No [DONE] behind it: a simple client would take the answer for complete."""
        if not self._started:
            raise error
        await self._write(self._frames.deltas(deltas) + self._error_event(error), more=False)

    def _error_event(self, error: ApiError) -> bytes:
        self._scope[RECORD].error = error.label
        own = events(self._frames.failed(error))
        return own or error.event(self._scope["path"], self._scope.get(REQUEST_ID, ""))

    def _write_now(self, deltas: Sequence[ChoiceDelta]) -> bool:
        """Writes some more of the answer; False if that is not all there is to do, or cannot be
        done now: then it is up to the task."""
        connection = self._connection
        if connection is None or not self._started or self._writing.locked():
            return False
        if not connection.takes_part:
            return False
        size = 0
        for delta in deltas:
            if delta.finish_reason is not None or delta.error is not None:
                return False
            size += delta.items
        if size > INLINE_ITEMS:
            return False
        self._call.ticket.take(deltas)
        try:
            data = self._frames.deltas(deltas)
        except Exception as error:
            self._broken = error
            return False
        if data:
            connection.write_part(data)
            self._last_sent = time.monotonic()
        return True

    async def _write(self, data: bytes, more: bool = True) -> None:
        async with self._writing:
            if self._ended:
                return
            self._ended = not more
            self._blocked_since = time.monotonic()
            if not self._started:
                self._started = True
                await self._send(START)
            await self._send(body(data, more))
            self._blocked_since, self._last_sent = None, time.monotonic()

    def look_after(self, now: float) -> None:
        """Says that it is alive where nothing is sent, and ends what nobody reads."""
        limits = self._limits
        if self._blocked_since is not None:
            blocked_s, unread = now - self._blocked_since, self._call.generation.unread_bytes
            stalled = blocked_s > limits.stall_timeout_s
            if (stalled or unread > limits.unread_bytes) and self._connection is not None:
                logger.warning(
                    "request %s: its client has not read for %.0f s, %d bytes wait",
                    self._scope.get(REQUEST_ID, ""),
                    blocked_s,
                    unread,
                )
                self._connection.abort()  # which is a disconnect like any other
        elif limits.keep_alive_s and now - self._last_sent >= limits.keep_alive_s:
            self._comment = asyncio.create_task(self._write(self._keep_alive))

    def _let_go(self) -> None:
        self._call.server.stream_guard.remove(self)
        if self._comment is not None:
            self._comment.cancel()


START: Message = {"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS}


def items(deltas: Sequence[ChoiceDelta]) -> int:
    return sum(delta.items for delta in deltas)


def event(data: bytes, name: str | None = None) -> bytes:
    named = b"" if name is None else b"event: " + name.encode() + b"\n"
    return named + b"data: " + data + b"\n\n"


def events(frames: Sequence[dict[str, Any]]) -> bytes:
    return b"".join(event(msgspec.json.encode(frame), frame.get("type")) for frame in frames)


class TextFrames:
    """Frames of an answer that differ in a text alone: what stands around it is encoded once."""

    MARK = "\0text"  # no name or id holds a NUL

    def __init__(self, frame: dict[str, Any]) -> None:
        """``frame`` has `MARK` where the text is to be."""
        self._before, _, self._after = events([frame]).partition(msgspec.json.encode(self.MARK))

    def event(self, text: str) -> bytes:
        return b"%b%b%b" % (self._before, msgspec.json.encode(text), self._after)


def body(data: bytes, more: bool = True) -> Message:
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


async def answer(request: Request, call: Call, frames: Frames, stream: bool | None) -> Response:
    """The response of a call, streamed or whole. Raises ApiError."""
    if stream:
        return EventStream(call, frames)
    answers = await collect(call, request.receive)
    if answers is None:
        return client_left()
    whole = await frames.kept(await beside_loop(items(answers), lambda: frames.complete(answers)))
    return await beside_loop(items(answers), lambda: json_response(whole))


async def collect(call: Call, receive: Receive) -> list[ChoiceDelta] | None:
    """All choices in full, or None if the client left before the end. Raises ApiError."""
    answers = [ChoiceDelta(index) for index in range(call.n * len(call.prompts))]
    async with Watch(receive, call) as watch:
        async for deltas in call.generation:
            error = first_error(deltas)
            if error is not None:
                raise error
            call.ticket.take(deltas)
            for delta in deltas:
                answers[delta.index].extend(delta)
    if watch.expired:
        raise deadline_exceeded()
    return None if watch.left else answers
