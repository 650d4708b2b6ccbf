"""A page file: slots for pages of KV on disk, each with a row that says what lies in it.

| bytes                | what                                                             |
|----------------------|------------------------------------------------------------------|
| ``[0, 4096)``        | heading: magic, identity of the build, number of slots, checksum |
| ``[4096, P)``        | a row per slot: what lies in it, with checksums; zeros: free     |
| ``[P, P + slots·B)`` | the slots: the page of every cache group, one after another      |

A slot is written once: first its pages, then the row that says that they are there. So a process
that is killed at any moment leaves slots that are there or free, and a row that was written in part
does not match its checksum. After a power failure pages may be missing behind their row, which
their own checksums tell when they are read; nothing is flushed for that.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from invar import _native
from invar.backends.runner import PAGE_TOKENS

MAGIC = b"invarKV1"
UNIT = 4096  # bytes; heading, rows and slots begin on blocks of the file system
KEY_BYTES = 32
MAX_ROWS_BYTES = 1 << 26  # of a file's rows: more is damage, and would be allocated
TOUCH_S = 60.0  # how old the time of a file's last use on disk may be

HEADING = np.dtype(
    [("magic", "S8"), ("identity", f"V{KEY_BYTES}"), ("slots", "<u8"), ("check", "<u8")]
)

Bytes = npt.NDArray[np.uint8]


class PageFileError(ValueError):
    """The file is damaged or of another build."""


@dataclass(frozen=True)
class Page:
    """What a slot holds: the page of `ids` behind the pages that `parent` stands for."""

    key: bytes  # of this page and all before it
    parent: bytes
    ids: bytes  # of its PAGE_TOKENS tokens, int32
    groups: int  # bit g: cache group g has its page here (one behind its window may lack)


class PageLayout:
    """Where things lie in all page files of a build."""

    def __init__(self, fingerprint: str, page_bytes: Sequence[int]) -> None:
        """fingerprint: of everything that changes a byte of a page. page_bytes: per group"""
        self.page_bytes = tuple(page_bytes)
        build = repr((MAGIC, fingerprint, PAGE_TOKENS, self.page_bytes)).encode()
        self.identity = blake2b(build, digest_size=KEY_BYTES).digest()
        ends = np.cumsum(self.page_bytes).tolist()
        self.spans = [slice(end - size, end) for end, size in zip(ends, page_bytes, strict=True)]
        self.slot_bytes = rounded(ends[-1])
        self.row = np.dtype(
            [
                ("key", f"V{KEY_BYTES}"),
                ("parent", f"V{KEY_BYTES}"),
                ("ids", f"V{4 * PAGE_TOKENS}"),
                ("groups", "<u8"),
                ("sums", "<u8", (len(self.page_bytes),)),  # of each group's page
                ("check", "<u8"),  # of the row before it
            ]
        )

    def table_bytes(self, slots: int) -> int:
        """Heading and rows."""
        return UNIT + rounded(slots * self.row.itemsize)

    def file_bytes(self, slots: int) -> int:
        return self.table_bytes(slots) + slots * self.slot_bytes

    def slots_in(self, size: int) -> int:
        """Slots of a file of at most `size` bytes; 0 where none fits."""
        slots = max(0, size - 2 * UNIT) // (self.slot_bytes + self.row.itemsize)
        slots += self.file_bytes(slots + 1) <= size
        return min(slots, MAX_ROWS_BYTES // self.row.itemsize)


class PageFile:
    """One file, open. Rows are in memory; pages are read when they are asked for."""

    def __init__(self, path: Path, layout: PageLayout, fd: int, slots: int) -> None:
        self.path = path
        self.layout = layout
        self.slots = slots
        self._fd = fd
        self._rows: npt.NDArray[Any] = np.zeros(slots, layout.row)
        self._start = layout.table_bytes(slots)
        self.next_slot = 0  # slots before it are not free
        self.used_at = time.time()
        self._touched_at = 0.0

    @classmethod
    def create(cls, path: Path, layout: PageLayout, slots: int) -> PageFile:
        """A new file with free slots, for this user alone. Raises OSError."""
        heading = np.zeros(1, HEADING)
        heading["magic"], heading["slots"] = MAGIC, slots
        heading["identity"] = np.void(layout.identity)
        seal(heading)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(fd, heading.tobytes(), 0)
        except OSError:
            os.close(fd)
            path.unlink()
            raise
        return cls(path, layout, fd, slots)

    @classmethod
    def open(cls, path: Path, layout: PageLayout, *, writable: bool) -> PageFile:
        """Raises PageFileError for a file that is damaged or of another build, and OSError."""
        flags = os.O_RDWR if writable else os.O_RDONLY
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            status = os.fstat(fd)
            data = os.pread(fd, HEADING.itemsize, 0)
            heading = np.frombuffer(data, HEADING) if len(data) == HEADING.itemsize else None
            if heading is None or heading["magic"][0] != MAGIC or not sealed(heading)[0]:
                raise PageFileError(f"{path}: not a page file, or damaged")
            if heading["identity"][0].tobytes() != layout.identity:
                raise PageFileError(f"{path}: of another model or version")
            slots = int(heading["slots"][0])
            if not 0 < slots <= MAX_ROWS_BYTES // layout.row.itemsize:
                raise PageFileError(f"{path}: says that it has {slots:,} slots")
            file = cls(path, layout, fd, slots)
            file.used_at = status.st_mtime
            file._read_rows()
            return file
        except BaseException:
            os.close(fd)
            raise

    def _read_rows(self) -> None:
        """What is damaged of the rows counts as a slot in use that holds nothing."""
        data = os.pread(self._fd, self._rows.nbytes, UNIT)
        whole = len(data) // self.layout.row.itemsize
        self._rows[:whole] = np.frombuffer(data, self.layout.row, whole)
        raw = self._rows.view(np.uint8).reshape(self.slots, -1)
        begun = np.flatnonzero(raw.any(axis=1))
        self.next_slot = int(begun[-1]) + 1 if len(begun) else 0
        self._rows[begun[~sealed(self._rows[begun])]] = np.zeros(1, self.layout.row)

    @property
    def size(self) -> int:
        """Bytes on disk, at most."""
        return self._start + self.next_slot * self.layout.slot_bytes

    def pages(self) -> Iterator[tuple[int, Page]]:
        """(slot, what it holds) for every slot that holds something."""
        for slot in np.flatnonzero(self._rows["check"]).tolist():
            yield slot, self.page(slot)

    def page(self, slot: int) -> Page:
        row = self._rows[slot]
        key, parent, ids = (row[name].tobytes() for name in ("key", "parent", "ids"))
        return Page(key, parent, ids, int(row["groups"]))

    def write_pages(self, slot: int, page: Page, data: Bytes) -> npt.NDArray[Any]:
        """Writes a free slot's pages; the row that `publish` makes known is returned.

        data: uint8 [slot_bytes], the pages of `page.groups` at their spans. Raises OSError.
        """
        row = np.zeros(1, self.layout.row)
        for name in ("key", "parent", "ids"):
            row[name] = np.void(getattr(page, name))
        row["groups"] = page.groups
        start = self._start + slot * self.layout.slot_bytes
        for group, span in enumerate(self.layout.spans):
            if page.groups >> group & 1:
                row["sums"][0, group] = _native.checksum(data[span])
                write_all(self._fd, data[span], start + span.start)
        seal(row)
        return row

    def publish(self, slot: int, row: npt.NDArray[Any]) -> None:
        """The slot's pages are there from now on. Raises OSError."""
        write_all(self._fd, row.view(np.uint8), UNIT + slot * self.layout.row.itemsize)
        self._rows[slot] = row[0]

    def read(self, slot: int, groups: int, out: Bytes, *, wait: bool) -> bool:
        """Reads the pages of some groups that the slot holds to their spans of `out`.

        out: uint8 [slot_bytes]. False where that would have to wait for the disk and `wait` is
        not set. Raises PageFileError for damaged pages, and OSError.
        """
        start = self._start + slot * self.layout.slot_bytes
        for group, span in enumerate(self.layout.spans):
            if groups >> group & 1:
                if not read_all(self._fd, out[span], start + span.start, wait=wait):
                    return False
                if _native.checksum(out[span]) != self._rows["sums"][slot, group]:
                    raise PageFileError(f"{self.path}: slot {slot} is damaged")
        self.touch()
        return True

    def prefetch(self, slot: int) -> None:
        """Asks the system to bring a slot into memory, without waiting for it."""
        start = self._start + slot * self.layout.slot_bytes
        os.posix_fadvise(self._fd, start, self.layout.slot_bytes, os.POSIX_FADV_WILLNEED)

    def forget(self, slot: int) -> None:
        """What the slot holds is not to be found again by this process."""
        self._rows[slot] = np.zeros(1, self.layout.row)

    def touch(self) -> None:
        """The file has been used; its time on disk follows within a minute."""
        self.used_at = time.time()
        if self.used_at - self._touched_at > TOUCH_S:
            self._touched_at = self.used_at
            with suppress(OSError):  # a folder that may only be read
                os.utime(self._fd)

    def close(self) -> None:
        os.close(self._fd)


def rounded(size: int) -> int:
    return -(-size // UNIT) * UNIT


def seal(rows: npt.NDArray[Any]) -> None:
    """Sets each row's checksum."""
    rows["check"] = sums_of(rows)


def sealed(rows: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Which rows match their checksum."""
    return np.asarray(rows["check"] == sums_of(rows))


def sums_of(rows: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    raw = np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), rows.dtype.itemsize)
    # Never 0, which is the checksum of a free row.
    return np.array([_native.checksum(row[:-8]) or 1 for row in raw], np.uint64)


def write_all(fd: int, data: Bytes, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:].data, offset + done)


def read_all(fd: int, out: Bytes, offset: int, *, wait: bool) -> bool:
    """False where not all is in memory and `wait` is not set. The end of the file leaves the rest
    of `out` as it is."""
    done = 0
    while done < len(out):
        try:
            flags = 0 if wait else os.RWF_NOWAIT
            count = os.preadv(fd, [out[done:].data], offset + done, flags)
        except BlockingIOError:
            return False
        except OSError:
            if wait:
                raise
            wait = True  # a file system that cannot tell
            continue
        if count == 0:
            break
        done += count
    return True
