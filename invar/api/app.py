"""The application: routes, errors in one shape, CORS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import compile_path
from starlette.types import ASGIApp

from invar.api.calls import client_left
from invar.api.errors import ApiError
from invar.api.frame import RECORD, REQUEST_ID, RequestFrame
from invar.api.protocol import OBSERVE
from invar.api.routes import ROUTES, Handler
from invar.api.server import Server

RATE_HEADERS = [
    f"x-ratelimit-{what}-{kind}"
    for what in ("limit", "remaining", "reset")
    for kind in ("requests", "tokens")
]

PLAIN = frozenset(route.path for route in ROUTES if "{" not in route.path)
PATTERNS = [(compile_path(path)[0], path) for path in sorted({r.path for r in ROUTES} - PLAIN)]


def create_app(server: Server, *, allowed_origins: tuple[str, ...] = ("*",)) -> ASGIApp:
    """The ASGI application. Its lifespan starts and closes the engine."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, Any]]:
        await server.engine.start()
        yield {OBSERVE: server.observe}
        await server.engine.close()
        if server.responses is not None:
            await server.responses.close()
        await asyncio.to_thread(server.close)

    app = FastAPI(title="Invar", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    for route in ROUTES:
        handler = bound(route.handler, server)
        app.add_route(route.path, handler, methods=list(route.methods))
    # In place of Starlette's stack, whose outermost layer answers what nobody has caught in plain
    # text; here that is left to the frame.
    app.middleware_stack = ExceptionMiddleware(app.router, HANDLERS)
    framed = RequestFrame(app, server, route_of)
    return CORSMiddleware(
        framed,
        allow_origins=list(allowed_origins),
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after", *RATE_HEADERS],
    )


def route_of(path: str) -> str | None:
    """The route that has the path, whatever the method."""
    if path in PLAIN:
        return path
    return next((route for pattern, route in PATTERNS if pattern.match(path)), None)


def bound(handler: Handler, server: Server) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await handler(server, request)

    return endpoint


async def on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    body = error.body(request.url.path, request.scope[REQUEST_ID])
    request.scope[RECORD].error = error.label
    return Response(body, error.status, media_type="application/json", headers=error.headers)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods, which the router answers, in the same shape."""
    assert isinstance(error, HTTPException)
    paths = sorted(PLAIN | {route for _, route in PATTERNS})
    if error.status_code == 404:
        message = f"There is no such path. Known: {', '.join(paths)}."
    else:
        message = str(error.detail)
    answer = ApiError(error.status_code, message, headers=dict(error.headers or {}))
    return await on_api_error(request, answer)


async def on_disconnect(request: Request, error: Exception) -> Response:
    return client_left()


HANDLERS: dict[Any, Callable[[Request, Exception], Awaitable[Response]]] = {
    ApiError: on_api_error,
    HTTPException: on_http_error,
    ClientDisconnect: on_disconnect,
}
