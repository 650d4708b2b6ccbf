"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from invar.api.body import parse_fields, parse_json, read_body
from invar.api.calls import Call, check_stream_options
from invar.api.conversation import Conversation, start_conversation
from invar.api.errors import bad_request
from invar.api.fields import ChatFields
from invar.api.limits import check_n
from invar.api.logprobs import chat_logprobs, prompt_logprobs
from invar.api.sampling import wanted_tokens
from invar.api.server import Server
from invar.api.streams import Frames, TextFrames, answer, events
from invar.serving.choice import ChoiceDelta
from invar.text.reply import (
    CallArguments,
    CallStart,
    Content,
    Event,
    Reasoning,
    ReplyMessage,
)

CHUNK = "chat.completion.chunk"


async def chat_completions(server: Server, request: Request) -> Response:
    body = await read_body(request, server.limits.body_bytes)
    raw = parse_json(body, server.caps)
    fields = parse_fields(raw, ChatFields, server.field_counts)
    server.model.check_name(fields.model)
    check_stream_options(fields)
    check_n(server.limits, 1 if fields.n is None else fields.n, prompts=1)
    if fields.echo:
        raise bad_request("echo is available on /v1/completions only.", "echo")
    max_tokens = wanted_tokens(
        [
            ("max_completion_tokens", fields.max_completion_tokens),
            ("max_tokens", fields.max_tokens),
        ]
    )
    conversation = Conversation(
        fields, raw["messages"], len(body), max_tokens, logprobs_count(server, fields)
    )
    call = await start_conversation(server, request, "chatcmpl", conversation)
    return await answer(request, call, ChatFrames(call, fields), fields.stream)


def logprobs_count(server: Server, fields: ChatFields) -> int | None:
    """How many alternatives a position gets; None: no logprobs at all."""
    top = fields.top_logprobs
    if top is not None and not 0 <= top <= server.limits.logprobs:
        raise bad_request(
            f"top_logprobs must be between 0 and {server.limits.logprobs}.", "top_logprobs"
        )
    if top and not fields.logprobs:
        raise bad_request("top_logprobs needs logprobs to be true.", "top_logprobs")
    return (top or 0) if fields.logprobs else None


class ChatFrames(Frames):
    """Chunks in OpenAI's order: role, content, finish, each choice on its own; then usage."""

    def __init__(self, call: Call, fields: ChatFields) -> None:
        self._call = call
        self._with_logprobs = bool(fields.logprobs)
        self._prompt_top = fields.prompt_logprobs or 0
        self._with_reasoning = fields.include_reasoning is not False
        self._opened = False
        # By choice; logprobs and usage make every chunk another one.
        self._texts: dict[int, TextFrames] = {}
        self._only_text = not (fields.logprobs or call.options.continuous_usage_stats)

    def complete(self, answers: Sequence[ChoiceDelta]) -> dict[str, Any]:
        call, tokenizer = self._call, self._call.server.model.tokenizer
        choices = [
            {
                "index": one.index,
                "message": self._message(call.read_whole(one)),
                "logprobs": self._logprobs(one),
                **call.finish(one),
            }
            for one in answers
        ]
        response = call.envelope("chat.completion", choices) | {"usage": call.usage.as_json()}
        scored = next((a.prompt_logprobs for a in answers if a.prompt_logprobs is not None), None)
        response["prompt_logprobs"] = (
            None if scored is None else prompt_logprobs(tokenizer, scored, self._prompt_top)
        )
        return response

    def _message(self, said: ReplyMessage) -> dict[str, Any]:
        reasoning = said.reasoning if said.reasoning and self._with_reasoning else None
        message: dict[str, Any] = {
            "role": "assistant",
            "content": said.content or (None if said.calls or said.reasoning else ""),
            "refusal": None,
            # vLLM's new name and its old one: clients read either.
            "reasoning": reasoning,
            "reasoning_content": reasoning,
        }
        if said.calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in said.calls
            ]
        return message

    def deltas(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        written = b""
        if not self._opened:
            self._opened = True
            role = {"role": "assistant", "content": ""}
            written = events([self._chunk(index, role) for index in range(self._call.n)])
        for delta in deltas:
            scored: ChoiceDelta | None = delta if delta.logprobs else None
            for event in self._call.read(delta):
                if isinstance(event, Content) and self._only_text:
                    written += self._content(delta.index, event.text)
                elif told := self._told(event):
                    # Logprobs go with the first of what their tokens say.
                    written += events([self._chunk(delta.index, told, scored)])
                    scored = None
            if scored is not None:  # nothing yet: the text is held back
                written += events([self._chunk(delta.index, {"content": ""}, scored)])
            if delta.finish_reason is not None:
                written += events([self._chunk(delta.index, {}, finish=self._call.finish(delta))])
        return written

    def _content(self, index: int, text: str) -> bytes:
        frames = self._texts.get(index)
        if frames is None:
            chunk = self._chunk(index, {"content": TextFrames.MARK})
            frames = self._texts[index] = TextFrames(chunk)
        return frames.event(text)

    def _told(self, event: Event) -> dict[str, Any] | None:
        """The delta of a chunk."""
        match event:
            case Content(text):
                return {"content": text}
            case Reasoning(text) if self._with_reasoning:
                return {"reasoning": text, "reasoning_content": text}
            case CallStart(index, call_id, name):
                function = {"name": name, "arguments": ""}
                call = {"index": index, "id": call_id, "type": "function", "function": function}
                return {"tool_calls": [call]}
            case CallArguments(index, text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        return None

    async def closing(self) -> list[dict[str, Any]]:
        return self._call.closing(CHUNK)

    def _chunk(
        self,
        index: int,
        content: dict[str, Any],
        scored: ChoiceDelta | None = None,
        finish: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        logprobs = None if scored is None else self._logprobs(scored)
        choice = {"index": index, "delta": content, "logprobs": logprobs, "finish_reason": None}
        return self._call.chunk(CHUNK, choice | (finish or {}))

    def _logprobs(self, delta: ChoiceDelta) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        return chat_logprobs(self._call.server.model.tokenizer, delta.logprobs)
