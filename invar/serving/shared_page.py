"""Memory that the engine process and its supervisor share: is it working, and on what?

The engine's side writes plain words without a system call; whoever reads them may do so after the
writer was killed. Words lie in cache lines of their own:

| bytes           | what                                              | written by             |
|-----------------|---------------------------------------------------|------------------------|
| 0 …             | state (`EngineState`)                             | the engine's loop      |
| 64 …            | work items done                                   | the plan executor      |
| 128 …           | rounds of the engine's loop                       | the engine's loop      |
| 192 …           | trials passed (`quarantine.py`)                   | the engine's loop      |
| 256 …           | which of the two lists of ids holds               | the engine's loop      |
| 320 …           | when the engine was last looked at, monotonic ns  | the supervisor         |
| 512 … 1024      | requests in flight, a word per HTTP process       | that HTTP process      |
| 4096 …          | two lists of ids, each with its length before it  | the engine's loop      |
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterable
from enum import IntEnum
from pathlib import Path

import numpy as np
import numpy.typing as npt

MAX_CLIENTS = 64
LINE = 8  # words of a cache line
# A step has at most 4,096 requests (`max_num_seqs`), whose ids have some 20 characters.
LIST_BYTES = 128 << 10
LISTS_START = 4096
SIZE = LISTS_START + 2 * LIST_BYTES

Words = npt.NDArray[np.uint64]


class EngineState(IntEnum):
    LOADING = 0
    IDLE = 1
    WORKING = 2


class SharedPage:
    """One engine process's page; a new process gets a new one."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        words: Words = np.frombuffer(memory, np.uint64, LISTS_START // 8)
        self._words = words
        self.work_items = words[LINE : LINE + 1]
        self._in_flight = words[8 * LINE : 8 * LINE + MAX_CLIENTS]

    @classmethod
    def create(cls, path: Path) -> SharedPage:
        path.touch(mode=0o600, exist_ok=False)
        with path.open("r+b") as file:
            file.truncate(SIZE)
        return cls.open(path)

    @classmethod
    def open(cls, path: Path) -> SharedPage:
        with path.open("r+b") as file:
            return cls(mmap.mmap(file.fileno(), SIZE))

    @classmethod
    def private(cls) -> SharedPage:
        """For an engine that nobody watches."""
        return cls(mmap.mmap(-1, SIZE))

    @property
    def state(self) -> EngineState:
        return EngineState(int(self._words[0]))

    @state.setter
    def state(self, state: EngineState) -> None:
        self._words[0] = state

    @property
    def trials_passed(self) -> int:
        return int(self._words[3 * LINE])

    @trials_passed.setter
    def trials_passed(self, count: int) -> None:
        self._words[3 * LINE] = count

    def begin_round(self) -> None:
        """The engine's loop goes on: with work, from here."""
        self._words[2 * LINE] += np.uint64(1)
        self.state = EngineState.WORKING

    @property
    def advance(self) -> tuple[int, int]:
        """Differs from what it was as soon as anything has been done."""
        return int(self._words[LINE]), int(self._words[2 * LINE])

    def note_look(self) -> None:
        """The supervisor sees to the engine."""
        self._words[5 * LINE] = time.monotonic_ns()

    @property
    def unwatched_s(self) -> float:
        """Seconds since the supervisor last saw to the engine."""
        return (time.monotonic_ns() - int(self._words[5 * LINE])) / 1e9

    def set_in_flight(self, client: int, count: int) -> None:
        self._in_flight[client] = count

    @property
    def in_flight(self) -> int:
        """Requests that clients wait for, whether or not the engine has heard of them."""
        return int(self._in_flight.sum())

    def set_running(self, request_ids: Iterable[str]) -> None:
        """Names the requests of the step that begins. More than fit are left out."""
        text = "\n".join(request_ids).encode()[: LIST_BYTES - 8]
        target = 1 - int(self._words[4 * LINE])
        start = LISTS_START + target * LIST_BYTES
        self._memory[start + 8 : start + 8 + len(text)] = text
        self._memory[start : start + 8] = len(text).to_bytes(8, "little")
        # Last: whoever dies before leaves the list of the step before whole.
        self._words[4 * LINE] = target

    @property
    def running(self) -> list[str]:
        start = LISTS_START + int(self._words[4 * LINE]) * LIST_BYTES
        length = int.from_bytes(self._memory[start : start + 8], "little")
        text = self._memory[start + 8 : start + 8 + length].decode(errors="replace")
        return text.split("\n") if text else []
