"""The thread that writes pages to disk, and the memory in which they wait for it."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from invar.engine.page_file import Bytes, Page

# A step of 512 rows fills 16 pages: 12 MB of SmolLM2, 16 MB of a 1B Llama, 64 MB of an 8B one. A
# disk of 500 MB/s writes twice that while such a step runs.
STAGING_BYTES = 32 << 20
MIN_BUFFERS = 4


@dataclass(frozen=True)
class Job:
    page: Page
    buffer: Bytes  # uint8 [slot_bytes]
    generation: int  # of the store when it came


class PageWriter:
    """Owner of the buffers between a page's owner and the disk. Nothing here waits but `flush`."""

    def __init__(self, slot_bytes: int, write: Callable[[Job], None]) -> None:
        """write: called on the thread for each job; it must not raise."""
        self.size = max(MIN_BUFFERS, STAGING_BYTES // slot_bytes) * slot_bytes
        memory = np.zeros((self.size // slot_bytes, slot_bytes), np.uint8)
        self._free: deque[Bytes] = deque(memory)
        self._jobs: queue.Queue[Job | None] = queue.Queue()
        self._write = write
        self._thread = threading.Thread(target=self._run, name="invar-kv-store", daemon=True)
        self._thread.start()

    def buffer(self) -> Bytes | None:
        """A free buffer, to be handed over by `submit`; None while all are on their way."""
        return self._free.popleft() if self._free else None

    def submit(self, job: Job) -> None:
        self._jobs.put(job)

    def flush(self) -> None:
        """Waits until everything handed over is written."""
        self._jobs.join()

    def close(self) -> None:
        """Writes what has been handed over, and ends the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._write(job)
            self._free.append(job.buffer)
            self._jobs.task_done()
