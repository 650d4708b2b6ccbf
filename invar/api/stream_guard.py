"""What looks after open streams from time to time: one timer for all of them.

A timer of each one's own would cost as much as a tenth of its tokens.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from invar.api.limits import Limits

PERIOD_S = 1.0


class Guarded(Protocol):
    def look_after(self, now: float) -> None:
        """Called once a period, with the monotonic time. Must not raise."""


class StreamGuard:
    """Calls its streams while there are any. Its methods are called on the event loop."""

    def __init__(self, limits: Limits) -> None:
        """``limits``: half of the shortest time that matters is the period."""
        times = [limits.keep_alive_s / 2 or PERIOD_S, limits.stall_timeout_s / 2, PERIOD_S]
        self._period_s = min(times)
        self._streams: dict[Guarded, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, stream: Guarded) -> None:
        self._streams[stream] = None
        if self._timer is None:
            self._begin_period()

    def remove(self, stream: Guarded) -> None:
        """Removing it twice does nothing."""
        self._streams.pop(stream, None)

    def _begin_period(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._period_s, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._streams:
            self._begin_period()
        now = time.monotonic()
        for stream in list(self._streams):
            stream.look_after(now)
