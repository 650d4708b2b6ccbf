"""One line of JSON a request, written by a thread of its own."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import msgspec

from invar.observe.requests import RequestRecord

MAX_WAITING = 10_000  # lines; a log that nobody reads must not fill memory
PAUSE_S = 0.02  # between two looks at what has come: one wake-up for many lines
# Whole lines up to PIPE_BUF go out at once: those of several processes on one pipe stay whole.
WRITE_BYTES = 4096


class AccessLog:
    """Takes records on the event loop and returns at once."""

    def __init__(self, descriptor: int, on_drop: Callable[[], None]) -> None:
        """``descriptor``: an open file, which stays the caller's. ``on_drop``: a line is lost."""
        self._descriptor = descriptor
        self._on_drop = on_drop
        self._waiting: queue.SimpleQueue[RequestRecord | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="invar-access-log", daemon=True)
        self._thread.start()

    def write(self, record: RequestRecord) -> None:
        if self._waiting.qsize() >= MAX_WAITING:
            self._on_drop()
        else:
            self._waiting.put(record)

    def close(self, timeout_s: float = 2.0) -> None:
        """Writes what has come, unless nobody takes it."""
        self._waiting.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        open_ = True
        while open_:
            records = [self._waiting.get()]
            if records[0] is not None:
                time.sleep(PAUSE_S)
            while not self._waiting.empty():
                records.append(self._waiting.get())
            open_ = None not in records
            lines = [line_of(record) for record in records if record is not None]
            try:
                for piece in pieces(lines):
                    write_all(self._descriptor, piece)
            except OSError:  # the reader has gone; the server has better things to do than to end
                for _ in lines:
                    self._on_drop()


def line_of(record: RequestRecord) -> bytes:
    fields = record.as_json()
    moment = datetime.fromtimestamp(fields["time"], UTC)
    fields["time"] = moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return msgspec.json.encode(fields) + b"\n"


def pieces(lines: list[bytes]) -> Iterator[bytes]:
    piece = b""
    for line in lines:
        if piece and len(piece) + len(line) > WRITE_BYTES:
            yield piece
            piece = b""
        piece += line
    if piece:
        yield piece


def write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
