"""The response object of /v1/responses and its events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from invar.api.calls import Call
from invar.api.errors import ApiError
from invar.api.logprobs import chat_logprobs
from invar.api.response_store import KeptResponses
from invar.api.responses_input import ResponsesFields
from invar.api.streams import Frames, events
from invar.engine.request import FinishReason
from invar.serving.choice import ChoiceDelta

# The codes that the dialect knows, of those that an error here can have.
# https://platform.openai.com/docs/api-reference/responses/object
ERROR_CODES = frozenset({"server_error", "rate_limit_exceeded", "invalid_prompt"})


@dataclass(frozen=True)
class Keeper:
    """Where a response goes when it has ended."""

    kept: KeptResponses
    owner: str
    items: list[dict[str, Any]]  # the input of its request


class ResponseWriter(Frames):
    """One message of text; its events are numbered from 0."""

    ends_with_done = False

    def __init__(
        self, call: Call, fields: ResponsesFields, with_logprobs: bool, keeper: Keeper | None
    ) -> None:
        self.keeper = keeper
        self._call = call
        self._fields = fields
        self._with_logprobs = with_logprobs
        self._answer = ChoiceDelta(0)
        self._logprobs: list[dict[str, Any]] = []
        self._opened = False
        self._sequence = 0
        self._item_id = f"msg_{call.id}"

    def complete(self, answers: Sequence[ChoiceDelta]) -> dict[str, Any]:
        self._take(answers)
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
            item, part = self._item("in_progress", []), self._part("", [])
            frames = [
                self._event("response.created", response=response),
                self._event("response.in_progress", response=response),
                self._event("response.output_item.added", output_index=0, item=item),
                self._of_part("response.content_part.added", part=part),
            ]
        for delta in deltas:
            logprobs = self._take([delta])
            if delta.text or logprobs:
                kind = "response.output_text.delta"
                frames.append(self._of_part(kind, delta=delta.text, logprobs=logprobs))
        return events(frames)

    async def closing(self) -> list[dict[str, Any]]:
        response = await self.kept(self._whole())
        (item,) = response["output"]
        (part,) = item["content"]
        text, logprobs = part["text"], part["logprobs"]
        return [
            self._of_part("response.output_text.done", text=text, logprobs=logprobs),
            self._of_part("response.content_part.done", part=part),
            self._event("response.output_item.done", output_index=0, item=item),
            self._event(f"response.{response['status']}", response=response),
        ]

    def failed(self, error: ApiError) -> list[dict[str, Any]]:
        return [self._event("response.failed", response=self.response_failed(error))]

    def response_failed(self, error: ApiError) -> dict[str, Any]:
        code = error.code if error.code in ERROR_CODES else "server_error"
        return self.response("failed") | {"error": {"code": code, "message": error.message}}

    def response(self, status: str) -> dict[str, Any]:
        """The object without an answer."""
        fields, server = self._fields, self._call.server
        reasoning = fields.reasoning
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
            "temperature": 1.0 if fields.temperature is None else fields.temperature,
            "text": {"format": (fields.text and fields.text.format) or {"type": "text"}},
            "tool_choice": fields.tool_choice or "auto",
            "tools": fields.tools or [],
            "top_logprobs": fields.top_logprobs or 0,
            "top_p": 1.0 if fields.top_p is None else fields.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": fields.user,
            **self._call.warning_fields,
        }

    def _take(self, deltas: Sequence[ChoiceDelta]) -> list[dict[str, Any]]:
        """What is new goes to the answer; returns its logprobs."""
        found: list[dict[str, Any]] = []
        self._call.usage.take(deltas)
        for delta in deltas:
            if self._with_logprobs:
                tokenizer = self._call.server.model.tokenizer
                found += chat_logprobs(tokenizer, delta.logprobs)["content"]
            self._answer.extend(delta)
        self._logprobs += found
        return found

    def _whole(self) -> dict[str, Any]:
        whole = self._answer.finish_reason is not FinishReason.LENGTH
        status = "completed" if whole else "incomplete"
        part = self._part(self._answer.text, self._logprobs)
        usage = self._call.usage
        return self.response(status) | {
            "completed_at": int(self._call.server.clock()),
            "incomplete_details": None if whole else {"reason": "max_output_tokens"},
            "output": [self._item(status, [part])],
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": usage.cached_tokens,
                    "cache_write_tokens": 0,
                },
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "type": "message",
            "id": self._item_id,
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def _part(self, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _of_part(self, kind: str, **values: Any) -> dict[str, Any]:
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        return self._event(kind, **place, **values)

    def _event(self, kind: str, **values: Any) -> dict[str, Any]:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence - 1, **values}
