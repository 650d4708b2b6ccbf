"""A folder for the sockets and pages of one server, readable by its user alone."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "invar-run-"
# A socket's path has at most 107 bytes (unix(7)); ours adds some 30 to the parent's.
LONGEST_PARENT = 70


class RunFolder:
    """Made anew, locked while its owner lives, removed by `close`. What owners left behind that
    were killed is removed by the next one."""

    def __init__(self) -> None:
        parent = tempfile.gettempdir()
        if len(os.fsencode(parent)) > LONGEST_PARENT:
            parent = "/tmp"
        sweep(Path(parent))
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))  # mode 0700
        # Named only when it is locked, or a sweeper could find it between the two.
        fresh = self.path / "lock.new"
        self._lock = fresh.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        fresh.rename(self.path / "lock")

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def sweep(parent: Path) -> None:
    """Removes folders of ours whose owner has ended."""
    for lock in parent.glob(f"{PREFIX}*/lock"):
        try:
            with lock.open() as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
        except OSError:  # somebody else's, or in use
            continue
