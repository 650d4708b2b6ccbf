"""What surrounds every request, as raw ASGI: its id, keys, the last resort for errors, one line.

Not Starlette's BaseHTTPMiddleware, behind which a handler never hears that its client has left
(vllm-project/vllm#10087).
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from invar.api.errors import ApiError, bad_request, internal, shutting_down
from invar.api.keys import ApiKey, unauthorized
from invar.api.server import Server
from invar.observe.requests import OTHER, RequestRecord, current_record

logger = logging.getLogger("invar.api")

# What a caller may choose as id: it goes into a header and into logs.
CALLER_ID = re.compile(rb"[!-~]{1,128}")
REQUEST_ID = "invar.request_id"  # in the scope
API_KEY = "invar.api_key"  # in the scope: the caller's ApiKey, or None
TICKET = "invar.ticket"  # in the scope: what a call holds, once it is admitted
RECORD = "invar.record"  # in the scope: what the access line, metrics and trace tell of it
REFUSAL = "invar.refusal"  # in the scope: status, error and id of the answer that it had instead
DEADLINE = "invar.deadline"  # in the scope: monotonic seconds, or None
STREAM_TYPE = (b"content-type", b"text/event-stream; charset=utf-8")
TRACE_HEADERS = (b"traceparent", b"tracestate")
TIMEOUT_HEADER = b"x-request-timeout-ms"
MAX_TIMEOUT_MS = 24 * 3600 * 1000
# Answered without a key, and also by a server that is shutting down.
OPEN_PATHS = frozenset({"/health", "/ready", "/ping"})
METRICS = "/metrics"


class RequestFrame:
    def __init__(self, app: ASGIApp, server: Server, route_of: Callable[[str], str | None]) -> None:
        self._app = app
        self._server = server
        self._route_of = route_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        request_id = caller_id(headers) or uuid.uuid4().hex.encode()
        scope[REQUEST_ID] = request_id.decode()
        path = scope["path"]
        record = scope[RECORD] = record_of(scope, request_id)
        record.route = self._route_of(path) or OTHER
        current_record.set(record)  # of this task
        key: ApiKey | None = None
        complete = False

        async def refuse(error: ApiError) -> None:
            await send_error(error, scope, send_with_id)

        async def receive_watched() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect" and not complete and REFUSAL not in scope:
                record.left = True
            return message

        async def send_with_id(message: Message) -> None:
            nonlocal complete
            if message["type"] != "http.response.start":
                complete = not message.get("more_body", False)
                await send(message)
                return
            # OpenAI's name and Anthropic's: each client reports the one it knows.
            names = (b"x-request-id", b"request-id")
            record.stream = STREAM_TYPE in message.get("headers", ())
            headers = [*message.get("headers", ()), *((name, request_id) for name in names)]
            if key is not None:
                left = key.headers(self._server.keys.clock())
                headers += [(name.encode(), value.encode()) for name, value in left.items()]
            await send({**message, "headers": headers})
            record.status = message["status"]

        try:
            self._check_open(path)
            key = scope[API_KEY] = self._key_of(scope, headers)
            if key is not None:
                record.key, record.key_id = key.name, key.digest.hex()[:8]
            scope[DEADLINE] = deadline(headers, record.began)
            await self._pass_on(key, scope, receive_watched, send_with_id)
        except ApiError as error:
            await refuse(error)
        except asyncio.CancelledError:
            # Only the end of the server cancels a request. A stream has said so itself.
            if not record.status:
                await refuse(shutting_down())
        except Exception:
            # Not raised again: uvicorn would log it a second time. It closes what is incomplete.
            logger.exception("request %s failed", request_id.decode())
            if not record.status:
                await refuse(internal(request_id.decode()))
        finally:
            if TICKET in scope:
                scope[TICKET].close()
            if REFUSAL in scope:
                record.refuse(*scope[REFUSAL])
            record.status = record.status or 499
            record.ended = time.monotonic()
            self._server.observe(record)

    def _check_open(self, path: str) -> None:
        """Raises a 503 once the server is shutting down, for all but who looks after it."""
        if self._server.draining and path not in OPEN_PATHS and path != METRICS:
            raise shutting_down()

    async def _pass_on(
        self, key: ApiKey | None, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """To the routes; what may cost something is counted on its key. Raises a 429."""
        if key is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        key.begin(self._server.keys.clock())
        try:
            await self._app(scope, receive, send)
        finally:
            key.end(time.monotonic() - scope[RECORD].began)

    def _key_of(self, scope: Scope, headers: dict[bytes, bytes]) -> ApiKey | None:
        """The key of the caller; None where none is asked for. Raises a 401."""
        keys, path = self._server.keys, scope["path"]
        is_open = path in OPEN_PATHS or (path == METRICS and self._server.open_metrics)
        if not keys or scope["method"] == "OPTIONS" or is_open:
            return None
        key = keys.find(headers)
        if key is None:
            raise unauthorized()
        return key


def record_of(scope: Scope, request_id: bytes) -> RequestRecord:
    client = scope.get("client") or ("-", 0)
    path = scope.get("raw_path") or scope["path"].encode("ascii", "backslashreplace")
    traced = {
        name.decode(): value.decode("latin-1")
        for name, value in scope["headers"]
        if name in TRACE_HEADERS
    }
    return RequestRecord(
        id=request_id.decode(),
        method=scope["method"],
        path=path.decode("ascii", "backslashreplace"),
        client=f"{client[0]}:{client[1]}",
        trace_headers=traced,
    )


def caller_id(headers: dict[bytes, bytes]) -> bytes | None:
    given = headers.get(b"x-request-id")
    return given if given is not None and CALLER_ID.fullmatch(given) else None


def deadline(headers: dict[bytes, bytes], began: float) -> float | None:
    """When the client stops to wait, in monotonic seconds. Raises a 400."""
    given = headers.get(TIMEOUT_HEADER)
    if given is None:
        return None
    milliseconds = int(given) if re.fullmatch(rb"\d{1,9}", given) else 0
    if not 1 <= milliseconds <= MAX_TIMEOUT_MS:
        name = TIMEOUT_HEADER.decode()
        raise bad_request(f"{name} must be whole milliseconds, 1 to {MAX_TIMEOUT_MS}.", name)
    return began + milliseconds / 1000


async def send_error(error: ApiError, scope: Scope, send: Send) -> None:
    body = error.body(scope["path"], scope[REQUEST_ID])
    scope[RECORD].error = error.label
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    headers += [(name.encode(), value.encode()) for name, value in error.headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
