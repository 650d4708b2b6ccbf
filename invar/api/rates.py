"""Rates: what may be used in a minute, and how fast a queue goes down. Times are in seconds."""

from __future__ import annotations

from collections import deque

from invar.api.key_use import KeyUse

MINUTE_S = 60.0
DRAIN_WINDOW_S = 30.0
MOST_WAIT_S = 120  # what OpenAI's client obeys of Retry-After


class Bucket:
    """A limit a minute: full at first, refilled evenly.

    What is kept is how much is missing and when that was so, both 0 at first.
    """

    def __init__(self, size: float, use: KeyUse, key: int, column: int) -> None:
        """``size``: a minute's worth. ``use``: where it is kept; held by who calls a method."""
        self.size = size
        self._use, self._key, self._column = use, key, column

    def take(self, amount: float, now: float) -> float:
        """Takes it and returns 0, or leaves it and returns the seconds until it is there."""
        left = self.size - self._missing(now)
        if amount <= left:
            self._keep(self.size - left + amount, now)
            return 0.0
        return max((amount - left) * MINUTE_S / self.size, 1e-3)

    def give_back(self, amount: float, now: float) -> None:
        """What was taken and not used; a negative amount is taken, if need be of later minutes."""
        self._keep(max(0.0, self._missing(now) - amount), now)

    def left(self, now: float) -> int:
        return max(0, int(self.size - self._missing(now)))

    def full_in(self, now: float) -> float:
        return self._missing(now) * MINUTE_S / self.size

    def _missing(self, now: float) -> float:
        missing = self._use.read(self._key, self._column)
        gone = max(0.0, now - self._use.read(self._key, self._column + 1))
        return max(0.0, missing - gone * self.size / MINUTE_S)

    def _keep(self, missing: float, now: float) -> None:
        self._use.write(self._key, self._column, missing)
        self._use.write(self._key, self._column + 1, now)


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
