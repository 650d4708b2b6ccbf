"""POST /v1/messages and /v1/messages/count_tokens, in Anthropic's dialect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from invar.api.body import parse_json, read_body
from invar.api.calls import Call, json_response
from invar.api.conversation import Conversation, in_words, start_conversation
from invar.api.messages_input import CountFields, MessagesFields, chat_fields, parse_messages
from invar.api.prompts import chat_prompt
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
        chat_fields(fields, messages), messages, len(body), max_tokens, ends_at_window=True
    )
    with in_words({"stop": "stop_sequences", "response_format": "output_config.format"}):
        call = await start_conversation(server, request, "msg", conversation)
    return await answer(request, call, MessageWriter(call, max_tokens), fields.stream)


async def count_tokens(server: Server, request: Request) -> Response:
    """Tokens of the prompt that /v1/messages would make of the same body; nothing is generated."""
    body = await read_body(request, server.limits.body_bytes)
    raw = parse_json(body, server.caps)
    fields, messages = parse_messages(raw, CountFields, server.field_counts, server.limits)
    server.model.check_name(fields.model)
    prompt = await chat_prompt(server, messages, chat_fields(fields, messages), len(body))
    return json_response({"input_tokens": len(prompt)})


TEXT = {"type": "text_delta", "text": TextFrames.MARK}
TEXT_DELTAS = TextFrames({"type": "content_block_delta", "index": 0, "delta": TEXT})


class MessageWriter(Frames):
    """The message, whole or as events. There is always one block of text, if only an empty one."""

    ends_with_done = False
    keep_alive = events([{"type": "ping"}])

    def __init__(self, call: Call, max_tokens: int) -> None:
        self._call = call
        self._max_tokens = max_tokens
        self._opened = False
        self._end: dict[str, Any] = {}

    def complete(self, answers: Sequence[ChoiceDelta]) -> dict[str, Any]:
        self._call.usage.take(answers)
        (only,) = answers
        content = [{"type": "text", "text": only.text, "citations": None}]
        return self._message(content) | self._stop(only)

    def deltas(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        self._call.usage.take(deltas)
        written = b""
        if not self._opened:
            self._opened = True
            written = events(self._opening())
        for delta in deltas:
            if delta.text:
                written += TEXT_DELTAS.event(delta.text)
            if delta.finish_reason is not None:
                self._end = self._stop(delta)
        return written

    def _opening(self) -> list[dict[str, Any]]:
        block = {"type": "text", "text": "", "citations": None}
        return [
            {"type": "message_start", "message": self._message([])},
            {"type": "content_block_start", "index": 0, "content_block": block},
            {"type": "ping"},
        ]

    async def closing(self) -> list[dict[str, Any]]:
        return [
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": self._end, "usage": self._usage()},
            {"type": "message_stop"},
        ]

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
        return {"stop_reason": reason, "stop_sequence": sequence}
