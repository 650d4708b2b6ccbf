"""POST /v1/responses and /v1/responses/input_tokens, OpenAI's newer dialect."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from invar.api.body import parse_json, read_body
from invar.api.calls import json_response
from invar.api.conversation import Conversation, in_words, start_conversation
from invar.api.errors import bad_request
from invar.api.kept_responses import earlier_items, kept_here, run_in_background
from invar.api.limits import check_range
from invar.api.prompts import chat_prompt
from invar.api.refusals import cannot
from invar.api.response_writer import Keeper, ResponseWriter
from invar.api.responses_input import (
    LOGPROBS,
    InputFields,
    ResponsesFields,
    chat_fields,
    conversation_messages,
    input_items,
    parse_input,
)
from invar.api.sampling import owner_of, wanted_tokens
from invar.api.server import Server
from invar.api.streams import answer

IN_WORDS = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
}


async def create_response(server: Server, request: Request) -> Response:
    body = await read_body(request, server.limits.body_bytes)
    raw = parse_json(body, server.caps)
    fields = parse_input(raw, ResponsesFields, server.field_counts, server.limits)
    server.model.check_name(fields.model)
    owner, own_items = owner_of(request), input_items(raw)
    keeper = keeper_of(server, fields, owner, own_items)
    max_tokens = wanted_tokens([("max_output_tokens", fields.max_output_tokens)])
    top = logprobs_count(server, fields)
    before = await earlier_items(server, owner, fields.previous_response_id)
    messages = conversation_messages(fields, before, own_items)
    size = len(body) + (len(msgspec.json.encode(before)) if before else 0)
    conversation = Conversation(chat_fields(fields, messages), messages, size, max_tokens, top)
    with in_words(IN_WORDS):
        call = await start_conversation(server, request, "resp", conversation)
    writer = ResponseWriter(call, fields, top is not None, keeper)
    if fields.background:
        return json_response(await run_in_background(request, call, writer))
    return await answer(request, call, writer, fields.stream)


async def count_input_tokens(server: Server, request: Request) -> Response:
    """Tokens of the prompt that /v1/responses would make of the same input."""
    body = await read_body(request, server.limits.body_bytes)
    raw = parse_json(body, server.caps)
    fields = parse_input(raw, InputFields, server.field_counts, server.limits)
    server.model.check_name(fields.model)
    before = await earlier_items(server, owner_of(request), fields.previous_response_id)
    messages = conversation_messages(fields, before, input_items(raw))
    with in_words(IN_WORDS):
        prompt = await chat_prompt(server, messages, chat_fields(fields, messages), len(body))
    return json_response({"object": "response.input_tokens", "input_tokens": len(prompt)})


def keeper_of(
    server: Server, fields: ResponsesFields, owner: str, own_items: list[dict[str, Any]]
) -> Keeper | None:
    """Who keeps the response, if anybody: by default the store, where the server has one.

    Raises a 400 where it was asked for and cannot be.
    """
    if fields.stream_options is not None and not fields.stream:
        raise bad_request("stream_options is only allowed when stream is true.", "stream_options")
    if fields.background and fields.stream:
        raise cannot("background", "a response in the background is not streamed; look for it")
    if fields.background and fields.store is False:
        raise bad_request("A response in the background is kept: store must not be false.", "store")
    if fields.store is False:
        return None
    if server.responses is None:
        for name in ("store", "background"):
            if getattr(fields, name):
                raise cannot(name, "this server keeps no responses (--response-store)")
        return None
    return Keeper(kept_here(server), owner, own_items)


def logprobs_count(server: Server, fields: ResponsesFields) -> int | None:
    check_range("top_logprobs", fields.top_logprobs, 0, server.limits.logprobs)
    included = LOGPROBS in (fields.include or ())
    return (fields.top_logprobs or 0) if included or fields.top_logprobs else None
