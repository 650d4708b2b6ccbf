"""Every route with its handler, what it takes and what it answers."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from invar.api import answers, messages_input, openapi, responses_input, service, tokens
from invar.api.chat import chat_completions
from invar.api.completions import completions
from invar.api.fields import ChatFields, CompletionFields, DetokenizeFields, TokenizeFields
from invar.api.kept_responses import (
    cancel_response,
    delete_response,
    get_response,
    list_input_items,
)
from invar.api.messages import count_tokens, create_message
from invar.api.refusals import OPENAI, FieldRules
from invar.api.responses import count_input_tokens, create_response
from invar.api.server import Server

Handler = Callable[[Server, Request], Awaitable[Response]]


@dataclass(frozen=True)
class Route:
    path: str
    methods: tuple[str, ...]
    handler: Handler
    answer: type[msgspec.Struct] | str | None = None  # a text's media type; None: no body
    body: type[msgspec.Struct] | None = None
    rules: FieldRules = OPENAI  # of the fields beside those of the body
    streams: bool = False
    query: tuple[str, ...] = ()


def post(
    path: str,
    handler: Handler,
    body: type[msgspec.Struct] | None,
    answer: type[msgspec.Struct],
    rules: FieldRules = OPENAI,
    streams: bool = False,
) -> Route:
    return Route(path, ("POST",), handler, answer, body, rules, streams)


def get(
    path: str, handler: Handler, answer: type[msgspec.Struct] | str, query: tuple[str, ...] = ()
) -> Route:
    return Route(path, ("GET",), handler, answer, query=query)


async def openapi_document(server: Server, request: Request) -> Response:
    """This document."""
    return Response(document(), media_type="application/json")


@functools.cache
def document() -> bytes:
    return msgspec.json.encode(openapi.document(ROUTES))


_CLAUDE, _RESPONSES = messages_input.RULES, responses_input.RULES
_RESPONSE = answers.Response

ROUTES: tuple[Route, ...] = (
    post("/v1/chat/completions", chat_completions, ChatFields, answers.ChatCompletion,
         streams=True),
    post("/v1/completions", completions, CompletionFields, answers.Completion, streams=True),
    post("/v1/messages", create_message, messages_input.MessagesFields, answers.AnthropicMessage,
         _CLAUDE, streams=True),
    post("/v1/messages/count_tokens", count_tokens, messages_input.CountFields,
         answers.MessageTokens, _CLAUDE),
    post("/v1/responses", create_response, responses_input.ResponsesFields, _RESPONSE, _RESPONSES,
         streams=True),
    post("/v1/responses/input_tokens", count_input_tokens, responses_input.InputFields,
         answers.InputTokens, _RESPONSES),
    get("/v1/responses/{id}", get_response, _RESPONSE, ("stream",)),
    Route("/v1/responses/{id}", ("DELETE",), delete_response, answers.DeletedResponse),
    post("/v1/responses/{id}/cancel", cancel_response, None, _RESPONSE),
    get("/v1/responses/{id}/input_items", list_input_items, answers.InputItems,
        ("limit", "order", "after")),
    get("/v1/models", service.list_models, answers.Models),
    get("/v1/models/{model:path}", service.one_model, answers.Model),
    post("/tokenize", tokens.tokenize, TokenizeFields, answers.Tokens),
    post("/v1/tokenize", tokens.tokenize, TokenizeFields, answers.Tokens),
    post("/detokenize", tokens.detokenize, DetokenizeFields, answers.Detokenized),
    post("/v1/detokenize", tokens.detokenize, DetokenizeFields, answers.Detokenized),
    post("/v1/cache/reset", service.reset_cache, None, answers.CacheReset),
    post("/reset_prefix_cache", service.reset_cache, None, answers.CacheReset),
    get("/version", service.version, answers.Version),
    Route("/health", ("GET", "HEAD"), service.health),
    Route("/ready", ("GET", "HEAD"), service.ready, answers.Ready),
    Route("/ping", ("GET", "HEAD", "POST"), service.health),
    get("/metrics", service.metrics, "text/plain"),
    get("/openapi.json", openapi_document, "application/json"),
)  # fmt: skip
