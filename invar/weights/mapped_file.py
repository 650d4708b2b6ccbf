"""A file of weights on disk, mapped for reading."""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
from pathlib import Path


class MappedFile:
    """error: what is raised where the file is not there, is closed, shrunk or cannot be read."""

    def __init__(self, path: Path, error: type[ValueError]) -> None:
        self.path = path
        self.error = error
        self.buffer = map_file(path, error)
        self.closed = False

    def require_whole(self, what: str) -> None:
        """Asked before each look into the mapping: what is no longer in the file cannot be read
        from memory either, and the system kills whoever tries (SIGBUS)."""
        if self.closed:
            raise self.error(f"{self.path.name}: {what}: the file is closed; open it again")
        if self.buffer.size() < len(self.buffer):
            raise self.error(
                f"{self.path.name}: {what}: the file had {len(self.buffer)} bytes when it was "
                f"opened and has {self.buffer.size()} now; something else writes to it"
            )

    def drop_from_page_cache(self) -> None:
        """Gives the file's pages back to the system; what is read later comes from the disk."""
        self.buffer.madvise(mmap.MADV_DONTNEED)  # pages that are mapped would stay
        file = os.open(self.path, os.O_RDONLY)
        try:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)

    def close(self) -> None:
        self.closed = True
        # With BufferError, arrays still look into the mapping; it goes when the last of them does.
        with contextlib.suppress(BufferError):
            self.buffer.close()


def map_file(path: Path, error: type[ValueError]) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise error(f"{path.name}: {path} is not a regular file")
            if status.st_size == 0:
                raise error(f"{path.name}: the file is empty; download it again")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise error(f"{path.name}: there is no file {path}") from None
    except OSError as problem:
        raise error(f"{path.name}: {path} cannot be read: {problem.strerror or problem}") from None
