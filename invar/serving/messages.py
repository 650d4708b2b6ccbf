"""What crosses between the HTTP side and the engine side: commands in, one message a step out.

The two sides share nothing else. Today the far side is a thread of this process; the same
messages travel over a socket once the engine has a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from invar.engine.request import EngineOutput, EngineRequest


@dataclass(frozen=True)
class Add:
    """Requests that start together: the choices and prompts of one call."""

    requests: tuple[EngineRequest, ...]


@dataclass(frozen=True)
class Abort:
    """Requests whose caller has gone or has seen enough. Unknown ids are ignored."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True)
class ResetCache:
    """Requests that are added later reuse nothing computed before."""


Command = Add | Abort | ResetCache


@dataclass(frozen=True)
class StepReport:
    """What one step brought. ``stats`` are the engine's gauges and running totals by name; none
    where the last ones are fresh enough."""

    outputs: list[EngineOutput]
    refused: Mapping[str, str] = field(default_factory=dict)  # id → why it can never run
    stats: Mapping[str, float] = field(default_factory=dict)
    fatal: str | None = None  # the engine has ended and says why


Deliver = Callable[[StepReport], None]


class EnginePort(Protocol):
    """The near end of the boundary."""

    def start(self, deliver: Deliver) -> None:
        """``deliver`` is called from another thread, once a step."""

    def send(self, command: Command) -> None:
        """Returns at once; a command is obeyed before the next step."""

    def close(self) -> None:
        """Ends the engine side and waits for it."""


class StepEngine(Protocol):
    """The engine as its worker sees it."""

    @property
    def has_unfinished(self) -> bool: ...

    def add_request(self, request: EngineRequest) -> None:
        """Raises ValueError for a request that can never run."""

    def abort(self, request_id: str) -> object: ...

    def reset_prefix_cache(self) -> object: ...

    def step(self) -> list[EngineOutput]: ...

    def stats(self) -> object:
        """Gauges and totals: a mapping or an object with named fields."""

    def rest(self) -> bool:
        """Called after a second without requests, for what may take 20 ms; False: no more."""
