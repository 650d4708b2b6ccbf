"""What chat and completions share: from checked fields to a running generation."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from invar.api.admission import Ticket
from invar.api.errors import bad_request, deadline_exceeded, engine_dead
from invar.api.fields import GenerationFields, StreamOptions
from invar.api.frame import API_KEY, DEADLINE, TICKET
from invar.api.keys import ApiKey, model_not_allowed
from invar.api.prompts import TokenIds
from invar.api.server import Server
from invar.api.usage import Usage
from invar.engine.request import FinishReason
from invar.serving.async_engine import ChoiceRequest, EngineDeadError, Generation
from invar.serving.choice import ChoiceDelta
from invar.text.reply import Event, Reply, ReplyMessage

CLIENT_CLOSED = 499  # nginx's number for the access log; nobody receives it


@dataclass(frozen=True)
class Call:
    """One HTTP request on its way through the engine."""

    server: Server
    generation: Generation
    id: str
    created: int
    prompts: list[TokenIds]
    n: int
    usage: Usage
    options: StreamOptions
    replies: Sequence[Reply]  # of each choice; none where all is text
    deadline: float | None  # when its client stops to wait, in monotonic seconds
    ticket: Ticket
    warnings: tuple[str, ...] = ()  # what was asked for and is ignored

    def envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """The outer object of a response or chunk."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.server.model.names[0],
            "system_fingerprint": self.server.model.fingerprint,
            "choices": choices,
            **self.warning_fields,
        }

    @property
    def warning_fields(self) -> dict[str, Any]:
        return {"warnings": list(self.warnings)} if self.warnings else {}

    def chunk(self, kind: str, choice: dict[str, Any]) -> dict[str, Any]:
        """A chunk of one choice. OpenAI puts a null usage there when a last one will follow."""
        chunk = self.envelope(kind, [choice])
        if self.options.continuous_usage_stats:
            chunk["usage"] = self.usage.as_json()
        elif self.options.include_usage:
            chunk["usage"] = None
        return chunk

    def read(self, delta: ChoiceDelta) -> list[Event]:
        """What a choice says with this; its tokens are counted."""
        self.usage.take([delta])
        reply = self.replies[delta.index]
        events = reply.push(delta.text)
        if delta.finish_reason is not None:
            events += reply.finish(cut=delta.finish_reason is FinishReason.LENGTH)
        self.usage.reasoning_tokens += reply.count_reasoning(delta.token_offsets)
        return events

    def read_whole(self, answer: ChoiceDelta) -> ReplyMessage:
        message = ReplyMessage()
        message.take(self.read(answer))
        return message

    def finish(self, delta: ChoiceDelta) -> dict[str, Any]:
        """The end of a choice that `read` has seen."""
        fields = finish_fields(delta.finish_reason, delta.stop_reason)
        if delta.finish_reason is FinishReason.STOP and self.replies[delta.index].complete_calls:
            fields["finish_reason"] = "tool_calls"
        return fields

    def closing(self, kind: str) -> list[dict[str, Any]]:
        """The usage chunk: only if asked for, since clients read ``choices[0]`` of any other."""
        if not self.options.include_usage:
            return []
        return [self.envelope(kind, []) | {"usage": self.usage.as_json()}]


def start_call(
    server: Server,
    request: Request,
    prefix: str,
    fields: GenerationFields,
    prompts: list[TokenIds],
    choices: Sequence[ChoiceRequest],
    new_reply: Callable[..., Reply] | None = None,
    *,
    warnings: tuple[str, ...] = (),
) -> Call:
    """Hands the choices to the engine.

    Raises a 503 when there is none any more or too much waits, a 504 if the client does not wait
    any more, a 403 or 429 for what its key does not allow.
    """
    key: ApiKey | None = request.scope[API_KEY]
    if key is not None and not key.allows([fields.model] if fields.model else server.model.names):
        raise model_not_allowed(key)
    deadline = request.scope[DEADLINE]
    if deadline is not None and time.monotonic() >= deadline:
        raise deadline_exceeded()
    prompt_tokens = sum(map(len, prompts))
    max_tokens = sum(choice.request.max_tokens for choice in choices)
    ticket = server.admission.admit(key, prompt_tokens, max_tokens)
    request.scope[TICKET] = ticket  # the frame closes it
    try:
        generation = server.engine.submit(choices)
    except EngineDeadError as error:
        raise engine_dead(str(error)) from None
    n = len(choices) // len(prompts)
    server.metrics.observe_call(n)
    return Call(
        server=server,
        generation=generation,
        id=f"{prefix}-{generation.id}",
        created=int(server.clock()),
        prompts=prompts,
        n=n,
        usage=Usage(prompt_tokens, n),
        replies=[new_reply(seed=f"{generation.id}/{index}") for index in range(n) if new_reply],
        options=fields.stream_options or StreamOptions(),
        deadline=deadline,
        ticket=ticket,
        warnings=warnings,
    )


def check_stream_options(fields: GenerationFields) -> None:
    if fields.stream_options is not None and not fields.stream:
        raise bad_request("stream_options is only allowed when stream is true.", "stream_options")
    if fields.stream and fields.prompt_logprobs is not None:
        raise bad_request("prompt_logprobs is not available in a stream.", "prompt_logprobs")


def finish_fields(reason: FinishReason | None, stop: int | str | None) -> dict[str, Any]:
    """Both keys always exist: clients look at ``finish_reason`` of every chunk."""
    return {"finish_reason": None if reason is None else reason.value, "stop_reason": stop}


def client_left() -> Response:
    return Response(status_code=CLIENT_CLOSED)


def json_response(value: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
