"""The response object of /v1/responses and its events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from invar.api.calls import Call
from invar.api.errors import ApiError
from invar.api.logprobs import chat_logprobs
from invar.api.reply_parts import Part, Parts, Verb
from invar.api.response_store import KeptResponses
from invar.api.responses_input import ResponsesFields
from invar.api.streams import Frames, events
from invar.engine.request import FinishReason
from invar.serving.choice import ChoiceDelta
from invar.text.reply import Event

# The codes that the dialect knows, of those that an error here can have.
# https://platform.openai.com/docs/api-reference/responses/object
ERROR_CODES = frozenset({"server_error", "rate_limit_exceeded", "invalid_prompt"})


NAMES = {
    "text": "output_text",
    "reasoning": "reasoning_text",
    "call": "function_call_arguments",
}
PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}


def text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


@dataclass(frozen=True)
class Keeper:
    """Where a response goes when it has ended."""

    kept: KeptResponses
    owner: str
    items: list[dict[str, Any]]  # the input of its request


class ResponseWriter(Frames):
    """Thoughts, text and calls as items; events are numbered from 0."""

    ends_with_done = False

    def __init__(
        self, call: Call, fields: ResponsesFields, with_logprobs: bool, keeper: Keeper | None
    ) -> None:
        self.keeper = keeper
        self._call = call
        self._fields = fields
        self._with_logprobs = with_logprobs
        self._parts = Parts()
        self._finish_reason: FinishReason | None = None
        self._logprobs: list[dict[str, Any]] = []
        self._opened = False
        self._sequence = 0

    def complete(self, answers: Sequence[ChoiceDelta]) -> dict[str, Any]:
        (only,) = answers
        self._take_logprobs(only)
        self._parts.take_whole(self._read(only))
        return self._whole()

    async def kept(self, answer: dict[str, Any]) -> dict[str, Any]:
        keeper = self.keeper
        if keeper is None:
            return answer
        # What could not be kept says so.
        return answer | {"store": await keeper.kept.store.put(keeper.owner, answer, keeper.items)}

    def deltas(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        frames: list[dict[str, Any]] = []
        if not self._opened:
            self._opened = True
            response = self.response("in_progress")
            frames = [
                self._event("response.created", response=response),
                self._event("response.in_progress", response=response),
            ]
        for delta in deltas:
            told = False
            logprobs = self._take_logprobs(delta)
            for verb, part, text in self._parts.take(self._read(delta)):
                of_text = verb == "add" and part.kind == "text"
                frames += self._frames(verb, part, text, logprobs if of_text and not told else [])
                told = told or of_text
        return events(frames)

    async def closing(self) -> list[dict[str, Any]]:
        frames = [frame for step in self._parts.end() for frame in self._frames(*step, [])]
        response = await self.kept(self._whole())
        return [*frames, self._event(f"response.{response['status']}", response=response)]

    def _frames(
        self, verb: Verb, part: Part, text: str, logprobs: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        place: dict[str, Any] = {"item_id": self._item_id(part), "output_index": part.index}
        within = place if part.kind == "call" else {**place, "content_index": 0}
        name = NAMES[part.kind]
        if verb == "add":
            more = {"logprobs": logprobs} if part.kind == "text" else {}
            return [self._event(f"response.{name}.delta", **within, delta=text, **more)]
        if verb == "open":
            item = self._item(part, "in_progress")
            frames = [self._event("response.output_item.added", output_index=part.index, item=item)]
            if part.kind == "text":
                empty = text_part("", [])
                frames.append(self._event("response.content_part.added", **within, part=empty))
            return frames
        item = self._item(part, self._status(part))
        frames = []
        if part.kind == "call":
            said = {"arguments": part.text, "name": part.name}
            frames.append(self._event(f"response.{name}.done", **within, **said))
        elif part.kind == "reasoning":
            frames.append(self._event(f"response.{name}.done", **within, text=part.text))
        else:
            (content,) = item["content"]
            said = {"text": part.text, "logprobs": content["logprobs"]}
            frames.append(self._event(f"response.{name}.done", **within, **said))
            frames.append(self._event("response.content_part.done", **within, part=content))
        done = self._event("response.output_item.done", output_index=part.index, item=item)
        return [*frames, done]

    def failed(self, error: ApiError) -> list[dict[str, Any]]:
        return [self._event("response.failed", response=self.response_failed(error))]

    def response_failed(self, error: ApiError) -> dict[str, Any]:
        code = error.code if error.code in ERROR_CODES else "server_error"
        return self.response("failed") | {"error": {"code": code, "message": error.message}}

    def response(self, status: str) -> dict[str, Any]:
        """The object without an answer."""
        fields, server = self._fields, self._call.server
        reasoning, defaults = fields.reasoning, server.model.defaults.values
        temperature, top_p = (
            defaults.get(name, 1.0) if (given := getattr(fields, name)) is None else given
            for name in ("temperature", "top_p")
        )
        return {
            "id": self._call.id,
            "object": "response",
            "created_at": self._call.created,
            "completed_at": None,
            "status": status,
            "background": bool(fields.background),
            "error": None,
            "incomplete_details": None,
            "instructions": fields.instructions,
            "max_output_tokens": fields.max_output_tokens,
            "max_tool_calls": None,
            "metadata": fields.metadata or {},
            "model": server.model.names[0],
            "output": [],
            "parallel_tool_calls": fields.parallel_tool_calls is not False,
            "previous_response_id": fields.previous_response_id,
            "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
            "service_tier": "default",
            "store": self.keeper is not None,
            "system_fingerprint": server.model.fingerprint,
            "temperature": temperature,
            "text": {"format": (fields.text and fields.text.format) or {"type": "text"}},
            "tool_choice": fields.tool_choice or "auto",
            "tools": fields.tools or [],
            "top_logprobs": fields.top_logprobs or 0,
            "top_p": top_p,
            "truncation": "disabled",
            "usage": None,
            "user": fields.user,
            **self._call.warning_fields,
        }

    def _read(self, delta: ChoiceDelta) -> list[Event]:
        self._finish_reason = delta.finish_reason or self._finish_reason
        return self._call.read(delta)

    def _take_logprobs(self, delta: ChoiceDelta) -> list[dict[str, Any]]:
        if not self._with_logprobs:
            return []
        tokenizer = self._call.server.model.tokenizer
        found: list[dict[str, Any]] = chat_logprobs(tokenizer, delta.logprobs)["content"]
        self._logprobs += found
        return found

    def _status(self, part: Part) -> str:
        """Of a part that has ended: what stands last may have been cut."""
        cut = self._finish_reason is FinishReason.LENGTH and part is self._parts.parts[-1]
        return "incomplete" if cut else "completed"

    def _whole(self) -> dict[str, Any]:
        whole = self._finish_reason is not FinishReason.LENGTH
        status = "completed" if whole else "incomplete"
        usage = self._call.usage
        list(self._parts.end())
        return self.response(status) | {
            "completed_at": int(self._call.server.clock()),
            "incomplete_details": None if whole else {"reason": "max_output_tokens"},
            "output": [self._item(part, self._status(part)) for part in self._parts.parts],
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": usage.cached_tokens,
                    "cache_write_tokens": 0,
                },
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }

    def _item_id(self, part: Part) -> str:
        first = part.kind != "call" and all(
            one.kind != part.kind for one in self._parts.parts[: part.index]
        )
        name = f"{PREFIXES[part.kind]}_{self._call.id}"
        return name if first else f"{name}_{part.index}"

    def _item(self, part: Part, status: str) -> dict[str, Any]:
        begins = status == "in_progress"
        item = {"id": self._item_id(part), "status": status}
        if part.kind == "call":
            said = {"call_id": part.id, "name": part.name, "arguments": part.text}
            return {"type": "function_call", **item, **said}
        if part.kind == "reasoning":
            content = [] if begins else [{"type": "reasoning_text", "text": part.text}]
            return {"type": "reasoning", **item, "summary": [], "content": content}
        # The tokens of a whole answer have their logprobs with its first text.
        first = all(one.kind != "text" for one in self._parts.parts[: part.index])
        content = [] if begins else [text_part(part.text, self._logprobs if first else [])]
        return {"type": "message", **item, "role": "assistant", "content": content}

    def _event(self, kind: str, **values: Any) -> dict[str, Any]:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence - 1, **values}
