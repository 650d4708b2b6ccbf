"""HTTP/1.1 under the application: uvicorn's protocol with limits on what comes beside a body.

httptools and uvicorn keep request lines, headers and trailers of any size, before any key has been
looked at, and wait for them forever; what cannot be parsed is in no access log; and a client of
HTTP/1.0 is sent chunks, of which it knows nothing (uvicorn 0.54
`protocols/http/httptools_impl.py`).
"""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from typing import Any

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from invar.api.errors import ApiError, shutting_down
from invar.api.frame import REFUSAL
from invar.observe.requests import RequestRecord

# Request line and headers, or trailers (h11 and nginx have limits of this order). It is looked at
# once a slice, so that up to two slices more may pass.
MAX_HEAD_BYTES = 64 << 10
SLICE_BYTES = 16 << 10
# A body that comes more slowly, over as long as an idle connection is kept, is not waited for.
BODY_BYTES_PER_S = 256
# Requests that a client may send ahead while one runs. Beyond that nothing more is read of it, and
# that it leaves is noticed only when its turn comes.
MAX_PIPELINE = 16
# Once the server is shutting down: what is on its way arrives within it.
BODY_GRACE_S = 1.0
FRAMING = frozenset(
    {b"content-length", b"transfer-encoding"}
)  # headers that say how long a body is
CONNECTION = "invar.connection"  # in the scope: the Connection that a request came on
OBSERVE = "invar.observe"  # in the lifespan's state: takes the RequestRecord of one that has ended


class Connection(HttpToolsProtocol):
    """One connection of a client."""

    _began = 0.0  # the request that is read, in monotonic seconds
    _head_bytes = 0  # since the last part of a body, or the last end of a request
    _progress = False
    _head_deadline: asyncio.TimerHandle | None = None
    _body_deadline: asyncio.TimerHandle | None = None
    _body_bytes = 0  # since the last look
    _running: RequestResponseCycle | None = None
    _piece = b""  # that the parser reads
    _repeats_head = False  # to a parser that has come into the place of another

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._have_head()
        self._have_body()
        super().connection_lost(exc)
        # Uvicorn tells the last request of a pipeline, which is not the one that runs.
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        if cycle.scope["http_version"] == "1.0":
            app = until_closed(app, cycle)
        super()._start_asgi_task(cycle, app)

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), SLICE_BYTES):
            if self.transport.is_closing():
                return
            piece = data[start : start + SLICE_BYTES]
            self._piece, self._progress = piece, False
            super().data_received(piece)
            self._head_bytes = 0 if self._progress else self._head_bytes + len(piece)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(head_too_large())

    def _unsupported_upgrade_warning(self) -> None:
        """An upgrade that is offered need not be taken (RFC 9110, 7.8): the request is one as any.

        The parser takes what follows the head for another protocol's, and raised where that begins;
        one that has heard of the body's length alone reads on from there.
        """
        raised = sys.exc_info()[1]
        assert isinstance(raised, httptools.HttpParserUpgrade)
        (start,) = raised.args
        framing = [b": ".join(one) + b"\r\n" for one in self.headers if one[0] in FRAMING]
        self.parser = httptools.HttpRequestParser(self)
        self._repeats_head = True
        rest = self._piece[start:]
        self.parser.feed_data(b"POST / HTTP/1.1\r\n" + b"".join(framing) + b"\r\n")
        self._repeats_head = False
        if rest:
            self.data_received(rest)

    def on_url(self, url: bytes) -> None:
        if not self._repeats_head:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._repeats_head:
            super().on_header(name, value)

    def on_message_begin(self) -> None:
        if self._repeats_head:
            return
        super().on_message_begin()
        self._began = time.monotonic()
        self.scope[CONNECTION] = self  # type: ignore[literal-required]
        self._await_head()

    def on_headers_complete(self) -> None:
        if self._repeats_head:
            return
        self._have_head()
        self._await_body()
        super().on_headers_complete()
        if self.pipeline and len(self.pipeline) <= MAX_PIPELINE:
            self.flow.resume_reading()  # or nobody hears that the client leaves

    def on_body(self, body: bytes) -> None:
        self._progress = True
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # of the head alone
        self._progress = True
        self._have_body()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, msg))

    @property
    def takes_part(self) -> bool:
        """Whether the body of the answer that runs can go on at once with `write_part`."""
        cycle = self._running
        return (
            cycle is not None
            and cycle.chunked_encoding is True
            and not (cycle.disconnected or cycle.response_complete or self.flow.write_paused)
        )

    def write_part(self, data: bytes) -> None:
        """What the application's `send` comes to for a part of a streamed body, at a tenth of its
        cost: that is what a token costs."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def abort(self) -> None:
        """For a client that has stopped to read: closes with what waits to be sent."""
        self.transport.abort()

    @property
    def busy(self) -> bool:
        """A request runs, or the last answer is still being sent."""
        return self.cycle is not None and not (
            self.cycle.response_complete and self.cycle.keep_alive
        )

    def shutdown(self) -> None:
        super().shutdown()
        if self._awaits_body():
            self.loop.call_later(BODY_GRACE_S, self._end_without_body)

    def _awaits_body(self) -> bool:
        cycle = self.cycle
        return cycle is not None and cycle.more_body and not cycle.response_started

    def _end_without_body(self) -> None:
        if self._awaits_body() and not self.transport.is_closing():
            self._refuse(shutting_down())

    def _await_head(self) -> None:
        """A connection that is opened, or a head that is begun, has as long as an idle one."""
        if self._head_deadline is None:
            self._head_deadline = self.loop.call_later(self.timeout_keep_alive, self._head_is_late)

    def _have_head(self) -> None:
        if self._head_deadline is not None:
            self._head_deadline.cancel()
            self._head_deadline = None

    def _head_is_late(self) -> None:
        self._head_deadline = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()

    def _await_body(self) -> None:
        self._body_bytes = 0
        self._body_deadline = self.loop.call_later(self.timeout_keep_alive, self._look_at_body)

    def _have_body(self) -> None:
        if self._body_deadline is not None:
            self._body_deadline.cancel()
            self._body_deadline = None

    def _look_at_body(self) -> None:
        if self._body_bytes >= BODY_BYTES_PER_S * self.timeout_keep_alive or self.flow.read_paused:
            self._await_body()
        else:
            self._body_deadline = None
            self._refuse(body_too_slow())

    def timeout_keep_alive_handler(self) -> None:
        """Closing waits for what is still to be sent, which may be for ever."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        super().timeout_keep_alive_handler()

    def _refuse(self, error: ApiError) -> None:
        """Answers in place of the application unless that has begun to, and closes."""
        if self.transport.is_closing():
            return
        cycle, request_id = self.cycle, uuid.uuid4().hex
        idle = cycle is None or cycle.response_complete or not cycle.response_started
        if idle and not self.pipeline:
            body = error.body((self.scope or {}).get("path", ""))
            headers = [
                *self.server_state.default_headers,
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"x-request-id", request_id.encode()),
                (b"connection", b"close"),
                *(
                    (name.encode(), value.encode())
                    for name, value in error.headers.items()
                    if name != "connection"
                ),
            ]
            lines = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
            self.transport.write(STATUS_LINE[error.status] + lines + b"\r\n" + body)
        self._observe(error, request_id)
        self.transport.close()

    def _observe(self, error: ApiError, request_id: str) -> None:
        """The access line: what was no request has one of its own, in which nothing of it stands;
        one whose body goes wrong has one in any case."""
        refusal = (error.status, error.label, request_id)
        cycle = self.cycle
        if cycle is not None and cycle.scope is self.scope and cycle.more_body:
            if not cycle.response_started:
                self.scope[REFUSAL] = refusal  # type: ignore[literal-required]
            return
        client = "{}:{}".format(*self.client or ("-", 0))
        record = RequestRecord(request_id, "-", "-", client, began=self._began or time.monotonic())
        record.refuse(*refusal)
        record.ended = time.monotonic()
        self.app_state[OBSERVE](record)


def until_closed(app: ASGI3Application, cycle: RequestResponseCycle) -> ASGI3Application:
    """What a client of HTTP/1.0 is sent: a body without a length ends with the connection."""

    async def framed(scope: Any, receive: Any, send: Any) -> None:
        has_length = False

        async def send_on(message: Any) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(name == b"content-length" for name, _ in message["headers"])
                cycle.chunked_encoding = None if has_length else False
            elif not has_length:  # each part is as long as it is
                cycle.expected_content_length = len(message["body"])
            await send(message)

        await app(scope, receive, send_on)

    return framed


def body_too_slow() -> ApiError:
    return ApiError(408, "The body of the request comes too slowly.", code="request_timeout")


def head_too_large() -> ApiError:
    return ApiError(
        431,
        f"The request line and headers are larger than {MAX_HEAD_BYTES} bytes.",
        code="headers_too_large",
    )
