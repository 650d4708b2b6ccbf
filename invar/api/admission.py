"""Who may start now: the queue's caps, the limits of keys, and what a call has used of both."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from invar.api.errors import ApiError
from invar.api.keys import ApiKey
from invar.api.rates import DrainRate
from invar.observe.metrics import Metrics
from invar.serving.async_engine import AsyncEngine
from invar.serving.choice import ChoiceDelta


@dataclass(eq=False)
class Ticket:
    """What a call holds of the queue and of its key, until it is closed."""

    admission: Admission
    key: ApiKey | None
    prompt_tokens: int
    reserved: int
    completion_tokens: int = 0
    started: bool = False

    def take(self, deltas: Iterable[ChoiceDelta]) -> None:
        """Some of the answer has come."""
        tokens = 0
        for delta in deltas:
            tokens += len(delta.token_ids)
        if tokens and not self.started:
            self._start()
            self.admission.drain.add(self.prompt_tokens, self.admission.clock())
        self.completion_tokens += tokens

    def close(self) -> None:
        """The call is over. Closing twice does nothing."""
        self._start()
        if self.key is not None:
            used = self.prompt_tokens + self.completion_tokens
            self.key.settle(self.reserved, used, self.admission.clock())
            self.key = None

    def _start(self) -> None:
        if not self.started:
            self.started = True
            self.admission.queued_tokens -= self.prompt_tokens


@dataclass(eq=False)
class Admission:
    """The door of one HTTP process."""

    engine: AsyncEngine
    metrics: Metrics
    max_running: int  # engine requests that run together
    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None
    clock: Callable[[], float] = time.monotonic
    queued_tokens: int = 0  # of prompts of which no answer has begun
    drain: DrainRate = field(default_factory=DrainRate)

    @property
    def queued_requests(self) -> int:
        """Engine requests beyond those that run together, or that wait for memory."""
        return max(self.engine.unfinished - self.max_running, self.engine.waiting, 0)

    @property
    def is_full(self) -> bool:
        return self._excess(1) is not None

    def admit(self, key: ApiKey | None, prompt_tokens: int, max_tokens: int) -> Ticket:
        """Raises a 503 if too much waits, a 429 if the key has used its share."""
        excess = self._excess(prompt_tokens)
        if excess is not None:
            reason, calls, tokens = excess
            self.metrics.count_rejection(reason)
            raise queue_full(self.drain.wait_s(calls, tokens, self.clock()))
        reserved = 0 if key is None else key.reserve(prompt_tokens, max_tokens, self.clock())
        self.queued_tokens += prompt_tokens
        return Ticket(self, key, prompt_tokens, reserved)

    def _excess(self, prompt_tokens: int) -> tuple[str, int, int] | None:
        """Which cap is reached, and the calls and tokens that must go first. A call that need not
        wait is let in whatever its size."""
        most, busy = self.max_queued_requests, self.engine.unfinished >= self.max_running
        queued = self.queued_requests
        if most is not None and (busy or queued) and queued >= most:
            return "max_num_queued_reqs", queued - most + 1, 0
        tokens = self.queued_tokens + prompt_tokens
        cap = self.max_queued_tokens
        if cap is not None and self.queued_tokens and tokens > cap:
            return "max_num_queued_tokens", 0, tokens - cap
        return None


def queue_full(wait_s: int) -> ApiError:
    return ApiError(
        503,
        f"Too many requests wait already. Please try again in {wait_s} s.",
        type="server_error",
        code="queue_full",
        headers={"retry-after": str(wait_s)},
    )
