"""Routes that say what runs here: models, version, health, metrics."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from invar.api.admission import queue_full
from invar.api.calls import json_response
from invar.api.errors import ApiError, engine_dead, not_ready, shutting_down
from invar.api.frame import API_KEY
from invar.api.keys import ApiKey
from invar.api.server import Server
from invar.observe.build import version_text
from invar.serving.async_engine import EngineDeadError


async def list_models(server: Server, request: Request) -> Response:
    key: ApiKey | None = request.scope[API_KEY]
    names = [name for name in server.model.names if key is None or key.allows([name])]
    data = [model_card(server, name) for name in names]
    page = {"has_more": False, "first_id": names[0] if names else None}
    last = {"last_id": names[-1] if names else None}
    return json_response({"object": "list", "data": data} | page | last)


async def one_model(server: Server, request: Request) -> Response:
    """The id is a path: names of models hold slashes."""
    name = request.path_params["model"]
    if not name:
        raise ApiError(404, "Name a model behind /v1/models/.", code="model_not_found")
    server.model.check_name(name)
    return json_response(model_card(server, name))


def model_card(server: Server, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": server.model.created,
        "owned_by": "invar",
        "root": server.model.root or server.model.names[0],
        "parent": None,
        "max_model_len": server.model.max_model_len,
        "permission": [],
        # Anthropic's names.
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(server.model.created, UTC).isoformat(),
    }


async def version(server: Server, request: Request) -> Response:
    return json_response({"version": version_text(), "fingerprint": server.model.fingerprint})


async def health(server: Server, request: Request) -> Response:
    """Alive: this process answers and its engine has not ended. No token is generated for it."""
    if server.engine.fatal is not None:
        raise engine_dead(server.engine.fatal)
    return Response(status_code=200)


async def ready(server: Server, request: Request) -> Response:
    """Takes new requests, and will answer them: the engine is loaded and watched over, the queue
    has room, nothing is shutting down."""
    if server.draining:
        raise shutting_down()
    if server.engine.status != "ready":
        raise not_ready(server.engine.status)
    if not server.engine.is_watched:
        raise not_ready("not watched, since the main process stands still")
    if server.admission.is_full:
        raise queue_full(1)
    return json_response({"status": "ready"})


async def reset_cache(server: Server, request: Request) -> Response:
    """For operators: requests that come after this reuse nothing computed before."""
    try:
        server.engine.reset_prefix_cache()
    except EngineDeadError as error:
        raise engine_dead(str(error)) from None
    return json_response({"object": "cache.reset", "reset": True})


async def metrics(server: Server, request: Request) -> Response:
    server.metrics.show_ready(server.engine.status == "ready")
    text = await asyncio.to_thread(server.metrics.render)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")
