"""From checked fields to what the engine takes: one request per choice."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from invar.api.errors import ApiError, bad_request, context_overflow
from invar.api.fields import ChatFields, GenerationFields
from invar.api.limits import Limits, check_count, check_range
from invar.api.prompts import TokenIds
from invar.api.server import Server
from invar.engine.request import EngineRequest
from invar.engine.sampling_params import SamplingParams
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
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "min_tokens",
    "prompt_logprobs",
)


def prepare_sampling(
    server: Server, fields: GenerationFields, logprobs: int | None, max_tokens: int | None
) -> SamplingParams:
    """Everything about the answer that does not depend on the prompt. Raises a 400."""
    check_limits(server.limits, fields)
    check_scheduling(server, fields)
    given: dict[str, Any] = {
        name: getattr(fields, name) for name in SAME_NAME if getattr(fields, name) is not None
    }
    try:
        return SamplingParams(**given, logprobs=logprobs, max_tokens=max_tokens)
    except (ValueError, TypeError) as error:
        raise from_value_error(error) from None


def check_limits(limits: Limits, fields: GenerationFields) -> None:
    """Sizes, before anything is made of them."""
    stops = [fields.stop] if isinstance(fields.stop, str) else fields.stop
    check_count("stop", stops, limits.stop_strings)
    for index, stop in enumerate(stops or ()):
        if not 1 <= len(stop) <= limits.stop_string_characters:
            raise bad_request(
                f"stop[{index}] must have 1 to {limits.stop_string_characters} characters.",
                "stop" if isinstance(fields.stop, str) else f"stop[{index}]",
            )
    check_count("stop_token_ids", fields.stop_token_ids, limits.stop_token_ids)
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


def choice_requests(
    server: Server,
    fields: GenerationFields,
    params: SamplingParams,
    prompt: TokenIds,
    *,
    scores_prompt: int | None = None,
) -> list[ChoiceRequest]:
    """The choices of one prompt. ``scores_prompt``: logprobs of the prompt for an echo."""
    try:
        requests = server.model.door.resolve(
            "call",
            prompt,
            params,
            priority=fields.priority or 0,
            cache_salt=fields.cache_salt,
        )
    except ValueError as error:
        raise from_value_error(error) from None
    scored = params.prompt_logprobs if scores_prompt is None else scores_prompt
    return [
        ChoiceRequest(
            with_prompt_logprobs(request, scored),
            TextAssembler(
                server.model.tokenizer,
                stop=params.stop_strings,
                stop_token_ids=request.stop_token_ids,
                include_stop_str_in_output=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
                min_tokens=params.min_tokens,
                # A completion goes on where its prompt ends, a reply begins a text.
                at_start=isinstance(fields, ChatFields),
            ),
            frozenset(params.stop_token_ids or ()),
        )
        for request in requests
    ]


def with_prompt_logprobs(request: EngineRequest, count: int | None) -> EngineRequest:
    """Every choice reports its prompt: a streamed one must not wait for another."""
    if count is None:
        return request
    sampling = dataclasses.replace(request.sampling, prompt_logprobs=count)
    return dataclasses.replace(request, sampling=sampling)


def from_value_error(error: Exception) -> ApiError:
    """The engine's door begins its messages with the field's name, or says what does not fit."""
    message = str(error)
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
