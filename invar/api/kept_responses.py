"""Responses that are kept: what comes before one, GET, DELETE, cancel, and those that run in the
background."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from invar.api.calls import Call, json_response
from invar.api.errors import ApiError, bad_request, internal
from invar.api.frame import TICKET
from invar.api.refusals import cannot
from invar.api.response_store import InBackground, Kept, KeptResponses
from invar.api.response_writer import ResponseWriter
from invar.api.sampling import owner_of
from invar.api.server import Server
from invar.api.streams import first_error
from invar.serving.choice import ChoiceDelta

logger = logging.getLogger("invar.api")

BEAT_S = 1.0  # between signs of life of a background response, and looks whether it was cancelled
DEFAULT_PAGE, MAX_PAGE = 20, 100  # input items (OpenAI's numbers)


def kept_here(server: Server) -> KeptResponses:
    if server.responses is None:
        raise ApiError(
            404, "This server keeps no responses (--response-store).", code="response_not_found"
        )
    return server.responses


async def earlier_items(
    server: Server, owner: str, previous_response_id: str | None
) -> list[dict[str, Any]]:
    """Inputs and outputs of all responses before, the first one first. Raises a 400."""
    if previous_response_id is None:
        return []
    param = "previous_response_id"
    if server.responses is None:
        raise cannot(param, "this server keeps no responses (--response-store)")
    limit = server.limits.body_bytes
    try:
        chain = await server.responses.store.chain(owner, previous_response_id, limit)
    except ValueError as error:
        raise bad_request(f"{param}: {error}.", param) from None
    if chain is None:
        message = "This response, or one before it, is not kept here (any more)."
        raise bad_request(message, param, "previous_response_not_found")
    if chain[-1].running:
        raise bad_request("This response has not ended yet.", param)
    return [item for kept in chain for item in (*kept.items, *kept.response["output"])]


async def find(server: Server, request: Request) -> Kept:
    kept = await kept_here(server).store.get(owner_of(request), request.path_params["id"])
    if kept is None:
        raise not_found()
    return kept


def not_found() -> ApiError:
    return ApiError(
        404, "There is no response of this id.", param="response_id", code="response_not_found"
    )


async def get_response(server: Server, request: Request) -> Response:
    if request.query_params.get("stream") in ("true", "1"):
        raise cannot("stream", "a response that is kept is not streamed again")
    kept = await find(server, request)
    if kept.lost and kept.id not in kept_here(server).running:  # where the clock has jumped
        error = {"code": "server_error", "message": "The process that ran it has ended."}
        return json_response(kept.response | {"status": "failed", "error": error})
    return json_response(kept.response)


async def delete_response(server: Server, request: Request) -> Response:
    """Also of one that still runs: then it is cancelled."""
    name, kept = request.path_params["id"], kept_here(server)
    if not await kept.store.delete(owner_of(request), name):
        raise not_found()
    kept.stop(name)
    return json_response({"id": name, "object": "response", "deleted": True})


async def cancel_response(server: Server, request: Request) -> Response:
    kept = await find(server, request)
    if not kept.response["background"]:
        raise bad_request("Only a response with background: true can be cancelled.", "response_id")
    if kept.running:
        cancelled = kept.response | {"status": "cancelled"}
        if await kept_here(server).store.finish(owner_of(request), cancelled):
            kept_here(server).stop(kept.id)
            return json_response(cancelled)
        kept = await find(server, request)
    return json_response(kept.response)


async def list_input_items(server: Server, request: Request) -> Response:
    """The last one first, unless ``order`` is asc; a page of them, behind ``after``."""
    kept, query = await find(server, request), request.query_params
    given = query.get("limit", str(DEFAULT_PAGE))
    limit = int(given) if given.isdecimal() and len(given) < 4 else 0
    if not 1 <= limit <= MAX_PAGE:
        raise bad_request(f"limit must be between 1 and {MAX_PAGE}.", "limit")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise bad_request("order must be asc or desc.", "order")
    data = [item | {"id": f"item_{kept.id}_{i}"} for i, item in enumerate(kept.items)]
    if order == "desc":
        data.reverse()
    names = [item["id"] for item in data]
    after = query.get("after")
    if after is not None and after not in names:
        raise bad_request("after is none of this response's items.", "after")
    start = 0 if after is None else names.index(after) + 1
    page = data[start : start + limit]
    return json_response(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": start + limit < len(data),
        }
    )


async def run_in_background(request: Request, call: Call, writer: ResponseWriter) -> dict[str, Any]:
    """Starts the task that takes the answer in; returns the response as it is until then."""
    keeper = writer.keeper
    assert keeper is not None
    response = writer.response("in_progress")
    if not await keeper.kept.store.put(keeper.owner, response, keeper.items, running=True):
        call.generation.cancel()
        raise ApiError(503, "The response cannot be kept now.", type="server_error")
    del request.scope[TICKET]  # which is closed when the answer is there, not with this request
    running = keeper.kept.running
    task = asyncio.create_task(take_in(call, writer))
    running[call.id] = InBackground(task, call.generation.cancel)
    task.add_done_callback(lambda _: running.pop(call.id, None))
    return response


async def take_in(call: Call, writer: ResponseWriter) -> None:
    keeper = writer.keeper
    assert keeper is not None
    store = keeper.kept.store
    beats = asyncio.create_task(beat(call, keeper.kept))
    try:
        answer = ChoiceDelta(0)
        error: ApiError | None = None
        async for deltas in call.generation:
            error = error or first_error(deltas)
            call.ticket.take(deltas)
            for delta in deltas:
                answer.extend(delta)
        if answer.finish_reason is None:
            return  # cancelled, and booked by whoever did it
        response = writer.response_failed(error) if error else writer.complete([answer])
        await store.finish(keeper.owner, response)
    except Exception:
        logger.exception("background response %s failed", call.id)
        await store.finish(keeper.owner, writer.response_failed(internal(call.id)))
    finally:
        call.generation.cancel()
        call.ticket.close()
        beats.cancel()


async def beat(call: Call, kept: KeptResponses) -> None:
    while await kept.store.beat(call.id):
        await asyncio.sleep(BEAT_S)
    call.generation.cancel()
