"""POST /v1/messages and /v1/messages/count_tokens, in Anthropic's dialect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from invar.api.body import parse_json, read_body
from invar.api.calls import Call, json_response
from invar.api.conversation import Conversation, in_words, start_conversation
from invar.api.messages_input import CountFields, MessagesFields, chat_fields, parse_messages
from invar.api.prompts import chat_prompt
from invar.api.reply_parts import Part, Parts, Verb
from invar.api.sampling import wanted_tokens
from invar.api.server import Server
from invar.api.streams import Frames, TextFrames, answer, events
from invar.engine.request import FinishReason
from invar.serving.choice import ChoiceDelta


async def create_message(server: Server, request: Request) -> Response:
    body = await read_body(request, server.limits.body_bytes)
    raw = parse_json(body, server.caps)
    fields, messages = parse_messages(raw, MessagesFields, server.field_counts, server.limits)
    server.model.check_name(fields.model)
    max_tokens = wanted_tokens([("max_tokens", fields.max_tokens)])
    assert max_tokens is not None
    conversation = Conversation(
        chat_fields(fields, messages, server.field_counts),
        messages,
        len(body),
        max_tokens,
        ends_at_window=True,
    )
    with in_words(IN_WORDS):
        call = await start_conversation(server, request, "msg", conversation)
    with_thinking = fields.thinking is None or fields.thinking.type != "disabled"
    writer = MessageWriter(call, max_tokens, with_thinking)
    return await answer(request, call, writer, fields.stream)


IN_WORDS = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "thinking_token_budget": "thinking.budget_tokens",
}


async def count_tokens(server: Server, request: Request) -> Response:
    """Tokens of the prompt that /v1/messages would make of the same body; nothing is generated."""
    body = await read_body(request, server.limits.body_bytes)
    raw = parse_json(body, server.caps)
    fields, messages = parse_messages(raw, CountFields, server.field_counts, server.limits)
    server.model.check_name(fields.model)
    chat = chat_fields(fields, messages, server.field_counts)
    prompt = await chat_prompt(server, messages, chat, len(body))
    return json_response({"input_tokens": len(prompt)})


TEXT = {"type": "text_delta", "text": TextFrames.MARK}
TEXT_DELTAS = TextFrames({"type": "content_block_delta", "index": 0, "delta": TEXT})


DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
SIGNATURE = "invar"  # clients send thoughts back only with one


def block(part: Part) -> dict[str, Any]:
    """A part of an answer that has ended, as a block."""
    if part.kind == "text":
        return {"type": "text", "text": part.text, "citations": None}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": part.text, "signature": SIGNATURE}
    try:
        given = msgspec.json.decode(part.text)
    except (msgspec.DecodeError, RecursionError):
        given = None
    if not isinstance(given, dict):
        given = {"arguments": part.text}  # what the model wrote, which is no object
    return {"type": "tool_use", "id": part.id, "name": part.name, "input": given}


def empty_block(part: Part) -> dict[str, Any]:
    """The same where it begins."""
    if part.kind == "call":
        return {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
    return block(part) | ({"signature": ""} if part.kind == "reasoning" else {})


class MessageWriter(Frames):
    """The message, whole or as events. There is always a block, if only an empty text."""

    ends_with_done = False
    keep_alive = events([{"type": "ping"}])

    def __init__(self, call: Call, max_tokens: int, with_thinking: bool) -> None:
        self._call = call
        self._max_tokens = max_tokens
        self._parts = Parts(with_thinking)
        self._opened = False
        self._end: dict[str, Any] = {}

    def complete(self, answers: Sequence[ChoiceDelta]) -> dict[str, Any]:
        (only,) = answers
        parts = self._parts.take_whole(self._call.read(only))
        return self._message([block(part) for part in parts]) | self._stop(only)

    def deltas(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        written = b""
        read = [(delta, self._call.read(delta)) for delta in deltas]  # which counts tokens
        if not self._opened:
            self._opened = True
            start = {"type": "message_start", "message": self._message([])}
            written = events([start])
        for delta, said in read:
            for step in self._parts.take(said):
                written += self._told(*step)
            if delta.finish_reason is not None:
                self._end = self._stop(delta)
        return written

    async def closing(self) -> list[dict[str, Any]]:
        frames = [frame for step in self._parts.end() for frame in self._frames(*step)]
        return [
            *frames,
            {"type": "message_delta", "delta": self._end, "usage": self._usage()},
            {"type": "message_stop"},
        ]

    def _told(self, verb: Verb, part: Part, text: str) -> bytes:
        if verb == "add" and part.kind == "text" and part.index == 0:
            return TEXT_DELTAS.event(text)
        return events(self._frames(verb, part, text))

    def _frames(self, verb: Verb, part: Part, text: str) -> list[dict[str, Any]]:
        place = {"index": part.index}
        if verb == "open":
            start = {"type": "content_block_start", **place, "content_block": empty_block(part)}
            return [start] if part.index else [start, {"type": "ping"}]
        if verb == "add":
            kind, name = DELTAS[part.kind]
            return [{"type": "content_block_delta", **place, "delta": {"type": kind, name: text}}]
        stop = {"type": "content_block_stop", **place}
        if part.kind == "reasoning":
            signed = {"type": "signature_delta", "signature": SIGNATURE}
            return [{"type": "content_block_delta", **place, "delta": signed}, stop]
        return [stop]

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._call.id,
            "type": "message",
            "role": "assistant",
            "model": self._call.server.model.names[0],
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
            "system_fingerprint": self._call.server.model.fingerprint,
            **self._call.warning_fields,
        }

    def _usage(self) -> dict[str, Any]:
        """The prompt is told in three parts there: read from the cache, written to it, neither."""
        usage = self._call.usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }

    def _stop(self, answer: ChoiceDelta) -> dict[str, Any]:
        sequence = answer.stop_reason if isinstance(answer.stop_reason, str) else None
        if answer.finish_reason is FinishReason.LENGTH:
            whole = self._call.usage.completion_tokens >= self._max_tokens
            reason = "max_tokens" if whole else "model_context_window_exceeded"
        else:
            reason = "end_turn" if sequence is None else "stop_sequence"
            if self._call.replies[0].complete_calls:
                reason, sequence = "tool_use", None
        return {"stop_reason": reason, "stop_sequence": sequence}
