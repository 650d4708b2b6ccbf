"""What is known of one HTTP request at its end: for the access line, the metrics and the trace.

The frame around the routes opens a record; the near end of the engine, called in the same task,
finds it with `current_record` and notes what became of the call. Nothing in it is text of a user.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

MAX_PATH = 200  # characters of a path that is no route's

# Beginning of a route → dialect, and the operation's name in OpenTelemetry's GenAI conventions.
OPERATIONS = {
    "/v1/chat/completions": ("openai", "chat"),
    "/v1/completions": ("openai", "text_completion"),
    "/v1/responses": ("openai", "chat"),
    "/v1/messages": ("anthropic", "chat"),
}
OTHER = "other"  # a route that does not exist


class Parameters(Protocol):
    """What a trace tells of a request to the engine (`invar.engine.request.EngineRequest`)."""

    @property
    def max_tokens(self) -> int: ...
    @property
    def sampling(self) -> Any: ...


@dataclass
class RequestRecord:
    """Times are seconds of the monotonic clock; None: it never came to that."""

    id: str
    method: str
    path: str
    client: str
    began: float = field(default_factory=time.monotonic)
    began_at: float = field(default_factory=time.time)  # seconds since 1970
    ended: float | None = None
    route: str = OTHER
    status: int = 0
    error: str | None = None  # code of an error answer
    key: str | None = None  # name of the caller's API key
    key_id: str | None = None  # beginning of its digest; never of the key
    trace_headers: dict[str, str] = field(default_factory=dict)  # traceparent and tracestate
    trace_id: str | None = None
    stream: bool = False
    left: bool = False  # the client did not stay for the end of the answer
    choices: int = 0
    parameters: Parameters | None = None  # of the first choice
    prompt_tokens: int = 0  # each prompt once, however many choices it has
    cached_tokens: int = 0
    output_tokens: int = 0
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finish_reasons: set[str] = field(default_factory=set)

    @property
    def dialect(self) -> str | None:
        return self._operation[0]

    @property
    def operation(self) -> str | None:
        return self._operation[1]

    @property
    def _operation(self) -> tuple[str, str] | tuple[None, None]:
        return OPERATIONS.get(self.route, (None, None))

    def refuse(self, status: int, error: str, request_id: str) -> None:
        """It was answered in place of its route, under another id."""
        self.status, self.error, self.id = status, error, request_id

    def submit(self, parameters: Parameters, prompt_tokens: int) -> None:
        """A choice goes to the engine."""
        self.choices += 1
        self.parameters = self.parameters or parameters
        if not parameters.sampling.choice:
            self.prompt_tokens += prompt_tokens

    def end_choice(
        self,
        parameters: Parameters,
        *,
        reason: str,
        cached_tokens: int,
        output_tokens: int,
        first_scheduled: float | None,
        first_token: float | None,
        last_token: float | None,
    ) -> None:
        self.finish_reasons.add(str(reason))
        self.output_tokens += output_tokens
        # Choices reuse what the first one computed: it alone says what the call found.
        if not parameters.sampling.choice:
            self.cached_tokens += cached_tokens
        self.first_scheduled = earliest(self.first_scheduled, first_scheduled)
        self.first_token = earliest(self.first_token, first_token)
        if last_token is not None:
            self.last_token = max(last_token, self.last_token or last_token)

    def as_json(self) -> dict[str, Any]:
        """The access line's fields, without those that have no value."""
        ended = time.monotonic() if self.ended is None else self.ended
        fields: dict[str, Any] = {
            "time": self.began_at + ended - self.began,
            "request_id": self.id,
            "trace_id": self.trace_id,
            "client": self.client,
            "method": self.method,
            "route": self.route,
            "path": self.path[:MAX_PATH] if self.route == OTHER else None,
            "status": self.status,
            "error": self.error,
            "key": self.key,
            "key_id": self.key_id,
            "e2e_ms": milliseconds(self.began, ended),
        }
        if self.choices:
            fields |= {
                "dialect": self.dialect,
                "stream": self.stream,
                "choices": self.choices,
                "prompt_tokens": self.prompt_tokens,
                "cached_tokens": self.cached_tokens,
                "output_tokens": self.output_tokens,
                "queue_ms": milliseconds(self.began, self.first_scheduled),
                "ttft_ms": milliseconds(self.began, self.first_token),
                "finish_reason": ",".join(sorted(self.finish_reasons)) or None,
            }
        if self.left:
            fields["disconnected"] = True
        return {name: value for name, value in fields.items() if value is not None}


current_record: ContextVar[RequestRecord | None] = ContextVar("invar_request_record", default=None)


def earliest(one: float | None, other: float | None) -> float | None:
    times = [time for time in (one, other) if time is not None]
    return min(times) if times else None


def milliseconds(begin: float, end: float | None) -> float | None:
    return None if end is None else round(max(0.0, end - begin) * 1000, 3)
