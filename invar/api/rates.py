"""Rates: what may be used in a minute, and how fast a queue goes down. Times are in seconds."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

MINUTE_S = 60.0
DRAIN_WINDOW_S = 30.0
MOST_WAIT_S = 120  # what OpenAI's client obeys of Retry-After


@dataclass
class Bucket:
    """A limit a minute: full at first, refilled evenly."""

    size: float  # a minute's worth
    _level: float = field(init=False)
    _at: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self._level = self.size

    @classmethod
    def of(cls, a_minute: int | None) -> Bucket | None:
        return None if a_minute is None else cls(float(a_minute))

    def take(self, amount: float, now: float) -> float:
        """Takes it and returns 0, or leaves it and returns the seconds until it is there."""
        self._refill(now)
        if amount <= self._level:
            self._level -= amount
            return 0.0
        return max((amount - self._level) * MINUTE_S / self.size, 1e-3)

    def give_back(self, amount: float, now: float) -> None:
        """What was taken and not used; a negative amount is taken, if need be of later minutes."""
        self._refill(now)
        self._level = min(self.size, self._level + amount)

    def left(self, now: float) -> int:
        self._refill(now)
        return max(0, int(self._level))

    def full_in(self, now: float) -> float:
        self._refill(now)
        return (self.size - self._level) * MINUTE_S / self.size

    def _refill(self, now: float) -> None:
        gone = max(0.0, now - self._at)
        self._level = min(self.size, self._level + gone * self.size / MINUTE_S)
        self._at = max(now, self._at)


def duration_text(seconds: float) -> str:
    """As OpenAI writes it: 6m0s, 1.5s, 20ms."""
    if seconds < 1:
        return f"{seconds * 1000:.0f}ms"
    minutes, rest = divmod(round(seconds, 1), MINUTE_S)
    shown = f"{rest:.1f}".removesuffix(".0")
    return f"{minutes:.0f}m{shown}s" if minutes else f"{shown}s"


class DrainRate:
    """How fast a queue has gone down of late."""

    def __init__(self) -> None:
        self._left: deque[tuple[float, int]] = deque()  # when, and the tokens of its prompts

    def add(self, tokens: int, now: float) -> None:
        """A call has left the queue."""
        self._left.append((now, tokens))
        self._forget(now)

    def wait_s(self, calls: int, tokens: int, now: float) -> int:
        """Whole seconds until so many more have left it; 1 to 120."""
        self._forget(now)
        if not self._left:
            return 5  # nothing is known: something long is at work
        span = max(now - self._left[0][0], 0.1)
        most = max(calls / len(self._left), tokens / max(1, sum(t for _, t in self._left)))
        return max(1, min(MOST_WAIT_S, int(most * span) + 1))

    def _forget(self, now: float) -> None:
        while self._left and now - self._left[0][0] > DRAIN_WINDOW_S:
            self._left.popleft()
