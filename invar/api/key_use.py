"""What keys have used, shared by the HTTP processes of a server."""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path

# Of each key: level and time of its requests, the same of its tokens, then what each process runs.
REQUESTS, TOKENS, RUNNING = 0, 2, 4


class KeyUse:
    """A row of numbers for each key. Held while they are read and changed: ``with use: …``.

    Without a file it is this process's own, and holding it costs nothing.
    """

    def __init__(
        self, keys: int, path: Path | None = None, processes: int = 1, index: int = 0
    ) -> None:
        self._file: int | None = None
        width = RUNNING + processes
        self.slot = RUNNING + index
        numbers: list[float] | memoryview[float] = [0.0] * (keys * width)
        if path is not None:
            size = len(numbers) * 8
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            with self:  # a file of zeros, whoever comes first
                if os.fstat(self._file).st_size < size:
                    os.truncate(self._file, size)
            numbers = memoryview(mmap.mmap(self._file, size)).cast("d")
        self._numbers, self._keys, self._width = numbers, keys, width

    def __enter__(self) -> None:
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def read(self, key: int, column: int) -> float:
        return self._numbers[key * self._width + column]

    def write(self, key: int, column: int, value: float) -> None:
        self._numbers[key * self._width + column] = value

    def free(self, index: int) -> None:
        """What a process ran has ended with it."""
        with self:
            for key in range(self._keys):
                self.write(key, RUNNING + index, 0.0)

    def running(self, key: int) -> int:
        """Requests of a key that run now, in all processes."""
        start = key * self._width
        return int(sum(self._numbers[start + RUNNING : start + self._width]))
