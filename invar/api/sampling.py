"""From checked fields to what the engine takes: one request per choice."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import re
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request

from invar.api.errors import ApiError, bad_request, context_overflow
from invar.api.fields import ChatFields, CompletionFields, GenerationFields
from invar.api.frame import API_KEY
from invar.api.limits import Limits, check_range
from invar.api.prompts import TokenIds
from invar.api.server import Server
from invar.api.structured import compiled, structured_outputs
from invar.engine.door import ResolvedParams
from invar.engine.request import EngineRequest
from invar.engine.sampling_params import SamplingParams
from invar.grammar.thoughts import Thoughts
from invar.outputs import assembler
from invar.serving.async_engine import ChoiceRequest
from invar.text.output import TextAssembler

# Fields that go into SamplingParams under the same name, if they were given.
SAME_NAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "seed",
    "stop",
    "stop_token_ids",
    "bad_words",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_reading_prefix_cache",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "min_tokens",
    "prompt_logprobs",
)

BUDGETS = (
    "thinking_token_budget",
    "reasoning_budget_tokens",
    "max_thinking_tokens",
    "thinking_budget",
)


async def prepare_sampling(
    server: Server,
    fields: GenerationFields,
    logprobs: int | None,
    max_tokens: int | None,
    *,
    scores_only: bool = False,
) -> ResolvedParams:
    """Everything about the answer that does not depend on the prompt. Raises a 400.

    A grammar is compiled beside the event loop.

    ``scores_only``: there will be no answer, so that nothing is asked of its length.
    """
    check_limits(server.limits, fields)
    check_scheduling(server, fields)
    defaults = server.model.defaults
    given: dict[str, Any] = dict(defaults.values) | {
        name: getattr(fields, name) for name in SAME_NAME if getattr(fields, name) is not None
    }
    if scores_only:
        check_range("min_tokens", given.pop("min_tokens", 0), 0, 2**31 - 1)
    field, form = structured_outputs(fields) or ("", None)
    try:
        given |= {
            "logprobs": logprobs,
            "max_tokens": max_tokens if scores_only else defaults.within_limit(max_tokens),
            "structured_outputs": None if scores_only else form,
            "thinking_token_budget": thinking_budget(server, fields),
        }
        params = SamplingParams(**given)
        if params.structured_outputs is not None:
            grammar = await compiled(server.model.door, params.structured_outputs)
            return await asyncio.to_thread(server.model.door.prepare, params, grammar)
        return server.model.door.prepare(params)
    except (ValueError, TypeError) as error:
        raise from_value_error(error, field) from None


def thinking_budget(server: Server, fields: GenerationFields) -> int | None:
    """Tokens of thoughts under whatever name; −1: as many as the model likes."""
    given = [(name, value) for name in BUDGETS if (value := getattr(fields, name)) is not None]
    for name, value in given:
        check_range(name, value, -1, 2**31 - 1)
        if value != given[0][1]:
            raise bad_request(f"{given[0][0]} and {name} say different things.", name)
    replies = server.model.replies
    if given and (replies is None or not replies.has_reasoning):
        server.field_counts.take_idle([given[0][0]])
    return given[0][1] if given else None


def check_limits(limits: Limits, fields: GenerationFields) -> None:
    """Ranges that are this server's own; the lengths of lists have been looked at (`caps`)."""
    stops = [fields.stop] if isinstance(fields.stop, str) else fields.stop
    for index, stop in enumerate(stops or ()):
        if not 1 <= len(stop) <= limits.stop_string_characters:
            raise bad_request(
                f"stop[{index}] must have 1 to {limits.stop_string_characters} characters.",
                "stop" if isinstance(fields.stop, str) else f"stop[{index}]",
            )
    check_range("prompt_logprobs", fields.prompt_logprobs, 0, limits.logprobs)
    check_range("temperature", fields.temperature, 0.0, 2.0)


def check_scheduling(server: Server, fields: GenerationFields) -> None:
    if fields.priority and not server.takes_priorities:
        raise bad_request("priority needs a server with --scheduling-policy priority.", "priority")
    check_range("priority", fields.priority, -(2**63), 2**63 - 1)
    salt = fields.cache_salt
    if salt is not None and not re.fullmatch(r"[^@/\\\0]{1,128}", salt):
        raise bad_request(
            "cache_salt must have 1 to 128 characters, without @, /, \\ and NUL.", "cache_salt"
        )


def tenant_of(server: Server, request: Request, fields: GenerationFields) -> str | None:
    """Whose share of a fair engine a request uses: that of its API key; where all send the same
    key or none, that of the `user` it names."""
    if len(server.keys) > 1:
        return f"key {request.scope[API_KEY].name}"
    return fields.user


def owner_of(request: Request) -> str:
    """Who may read what a request leaves behind: those who send the same key."""
    key = request.scope[API_KEY]
    return "" if key is None else hashlib.sha256(key.digest).hexdigest()


def choice_requests(
    server: Server,
    fields: GenerationFields,
    ready: ResolvedParams,
    prompt: TokenIds,
    tenant: str | None,
    *,
    echo_logprobs: int | None = None,
    shown_ids: frozenset[int] = frozenset(),
    thoughts: Thoughts | None = None,
) -> list[ChoiceRequest]:
    """The choices of one prompt. ``echo_logprobs``: alternatives for each token of an echo.

    ``shown_ids``: control tokens that whoever reads the text needs to see. ``thoughts``: that may
    stand before the answer.
    """
    params = ready.params
    try:
        requests = server.model.door.resolve(
            "call",
            prompt,
            ready,
            priority=fields.priority or 0,
            cache_salt=fields.cache_salt,
            tenant=tenant,
            thoughts=thoughts,
        )
    except ValueError as error:
        raise from_value_error(error) from None
    scored = most(echo_logprobs, params.prompt_logprobs)
    return [
        ChoiceRequest(
            with_prompt_logprobs(request, scored),
            assembler(
                server.model.tokenizer,
                request,
                params,
                # A completion goes on where its prompt ends, a reply begins a text.
                goes_on=not isinstance(fields, ChatFields),
                shown_ids=shown_ids,
            ),
            frozenset(params.stop_token_ids or ()),
        )
        for request in requests
    ]


def scoring_requests(
    server: Server,
    fields: CompletionFields,
    ready: ResolvedParams,
    prompt: TokenIds,
    tenant: str | None,
) -> list[ChoiceRequest]:
    """In place of `choice_requests` where the prompt is scored and nothing is answered."""
    try:
        request = server.model.door.score(
            "call",
            prompt,
            most(fields.logprobs, fields.prompt_logprobs),
            priority=fields.priority or 0,
            cache_salt=fields.cache_salt,
            tenant=tenant,
        )
    except ValueError as error:
        raise from_value_error(error) from None
    tokenizer = server.model.tokenizer
    return [ChoiceRequest(request, TextAssembler(tokenizer)) for _ in range(ready.params.n)]


def most(*counts: int | None) -> int | None:
    """Of the numbers of alternatives that were asked for."""
    return max((count for count in counts if count is not None), default=None)


def with_prompt_logprobs(request: EngineRequest, count: int | None) -> EngineRequest:
    """Every choice reports its prompt: a streamed one must not wait for another."""
    if count is None:
        return request
    sampling = dataclasses.replace(request.sampling, prompt_logprobs=count)
    return dataclasses.replace(request, sampling=sampling)


def from_value_error(error: Exception, form: str = "") -> ApiError:
    """The engine's door begins its messages with the field's name, or says what does not fit.

    form: the field that `structured_outputs` came in.
    """
    message = re.sub("^structured_outputs(?=: )", form or "structured_outputs", str(error))
    if message.startswith(("This model's maximum context length", "KV memory holds")):
        return context_overflow(message, "prompt")
    name = re.match(r"([a-z_]+)(\[[^\]]{0,40}\])?: ", message)
    return bad_request(message, name[1] if name else None)


def wanted_tokens(fields: Sequence[tuple[str, int | None]]) -> int | None:
    """The first of several names for the limit that was given, checked."""
    for name, value in fields:
        if value is not None:
            if not 1 <= value < 2**31:
                raise bad_request(f"{name} must be at least 1 and below 2^31.", name)
            return value
    return None
