"""The page store: pages of KV on disk, found again by the tokens up to them, also after a restart.

A page's key is a hash over its tokens and the key of the page before it; the first one's parent is
a hash of the request's `cache_salt`. A page that is found must also have the parent and the tokens
that were asked for. Nothing else is trusted: files name the build that wrote them, and every page
has a checksum. What is damaged or of another build is not found, and is the first to go when room
is needed.

DIR/<identity of the build>/lock           held by the process that writes there; others read
DIR/<identity of the build>/<number>.kv    see `invar.engine.page_file`

`size` bounds DIR as a whole, but for what other running servers write. The file that has not been
read or written for the longest time goes first, whole.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from invar.engine.page_file import Bytes, Page, PageFile, PageFileError, PageLayout
from invar.engine.page_writer import Job, PageWriter
from invar.private_folder import make_private

logger = logging.getLogger("invar")

FILES = 16  # that the store's size is cut into: what goes at once when room is needed
# A full disk may have room again after a minute; one that fails for a day costs 50 attempts.
FIRST_RETRY_S, LAST_RETRY_S = 15.0, 1800.0
BUILD = re.compile(r"[0-9a-f]{16}")
OURS = re.compile(rf"{BUILD.pattern}|lock|\d+\.kv")


@dataclass(frozen=True)
class Place:
    file: PageFile
    slot: int
    groups: int  # as in `Page`


@dataclass
class OtherFile:
    """Of another build, or damaged: nothing is read from it."""

    path: Path
    size: int
    used_at: float


class Outage:
    """When a disk that failed is tried again: first soon, then twice as late each time."""

    def __init__(self) -> None:
        self._wait_s = 0.0  # after the last failure; 0: none since the last success
        self._until_s = 0.0  # monotonic

    @property
    def may_write(self) -> bool:
        return not self._wait_s or time.monotonic() >= self._until_s

    def failed(self) -> bool:
        """Whether an outage begins."""
        begins = not self._wait_s
        self._wait_s = FIRST_RETRY_S if begins else min(2 * self._wait_s, LAST_RETRY_S)
        self._until_s = time.monotonic() + self._wait_s
        return begins

    def ended(self) -> bool:
        """To be called where writing has succeeded: whether that ends an outage."""
        ends = self._wait_s > 0
        self._wait_s = 0.0
        return ends


class PageStore:
    """Everything but the thread that writes belongs to the engine's thread."""

    def __init__(self, folder: Path, layout: PageLayout, size: int) -> None:
        """folder: DIR, made if need be. size: bytes. Raises OSError, and ValueError where the
        folder is not private or the size is less than a file of one page."""
        self.layout = layout
        self.size = size
        folder = folder.expanduser().resolve()
        self.folder = folder / layout.identity.hex()[:16]
        self.slots = layout.slots_in(max(size // FILES, layout.file_bytes(1)))
        if layout.file_bytes(self.slots) > size:
            raise ValueError(
                f"{size:,} bytes hold no page of {layout.slot_bytes:,} bytes; give it more"
            )
        for path in (folder, self.folder):
            make_private(path, OURS, "a KV store")
        self.generation = 0
        self.pages_written = 0
        self.pages_read = 0
        self._lock = threading.Lock()  # what follows is the writer's too
        self._index: dict[bytes, Place] = {}
        self._pending: dict[bytes, int] = {}  # key → groups, of pages on their way
        self._files: list[PageFile] = []
        self._others: list[OtherFile] = []
        self._closing: list[PageFile] = []  # removed, but the writer may be at them
        self._in_flight = 0  # pages that the writer has not done with
        self._active: PageFile | None = None  # has free slots
        self._serial = 0
        self._outage = Outage()
        self._lock_fd = lock_file(self.folder / "lock")
        self.writer: PageWriter | None = None
        if self._lock_fd is None:
            logger.warning("KV store: %s is in use or read-only; pages are read only", folder)
        self._open_files()
        if self._lock_fd is not None:
            self._list_other_builds()
            self._make_room(0)
            self.writer = PageWriter(layout.slot_bytes, self._write)

    # ---------------------------------------------------------------------------------- reading

    def groups_of(self, key: bytes) -> int:
        """Bit g: the store has cache group g's page under this key."""
        place = self._index.get(key)
        return 0 if place is None else place.groups

    def read(self, page: Page, out: Bytes, *, wait: bool) -> bool | None:
        """Reads `page.groups` of a page to their spans of `out`, uint8 [slot_bytes].

        False where that would have to wait for the disk and `wait` is not set. None where they are
        not there: not stored, damaged, or under this key stands something else, which is forgotten.
        """
        with self._lock:
            place = self._index.get(page.key)
            if place is None or page.groups & ~place.groups:
                return None
            try:
                kept = place.file.page(place.slot)
                if (kept.parent, kept.ids) != (page.parent, page.ids):
                    raise PageFileError(f"{place.file.path}: slot {place.slot} has other tokens")
                found = place.file.read(place.slot, page.groups, out, wait=wait)
            except (OSError, PageFileError) as error:
                logger.warning("KV store: a page is ignored: %s", error)
                del self._index[page.key]
                place.file.forget(place.slot)
                return None
            self.pages_read += found
            return found

    def prefetch(self, key: bytes) -> None:
        """Mutates nothing: the system begins to bring a page into memory."""
        with self._lock:
            place = self._index.get(key)
            if place is not None:
                place.file.prefetch(place.slot)

    # ---------------------------------------------------------------------------------- writing

    def put(self, page: Page, fill: Callable[[Bytes], None]) -> bool:
        """Has a page written in the background, unless it is there; `fill` puts its bytes into
        uint8 [slot_bytes]. False where it cannot be taken now."""
        if self.writer is None or not self._outage.may_write:
            return False
        there = self.groups_of(page.key) | self._pending.get(page.key, 0)
        if not page.groups & ~there:
            return True
        buffer = self.writer.buffer()
        if buffer is None:
            return False
        fill(buffer)
        with self._lock:
            self._pending[page.key] = page.groups
            self._in_flight += 1
        self.writer.submit(Job(page, buffer, self.generation))
        return True

    def _write(self, job: Job) -> None:
        """On the writer's thread. A disk that is full or fails ends the writing alone, for a
        while."""
        page = job.page
        try:
            if self._outage.may_write and job.generation == self.generation:
                file, slot = self._take_slot()
                row = file.write_pages(slot, page, job.buffer)
                with self._lock:
                    if job.generation == self.generation:
                        file.publish(slot, row)
                        file.touch()
                        self._index[page.key] = Place(file, slot, page.groups)
                        self.pages_written += 1
                if self._outage.ended():
                    logger.warning("KV store: pages are written to %s again", self.folder)
        except OSError as error:
            if self._outage.failed():
                logger.warning(
                    "KV store: nothing is written to %s: %s; it is tried again from time to time",
                    self.folder,
                    error,
                )
        with self._lock:
            self._pending.pop(page.key, None)
            self._in_flight -= 1
            self._close_removed()

    def _take_slot(self) -> tuple[PageFile, int]:
        with self._lock:
            file = self._active
            if file is None or file.next_slot == file.slots:
                file = self._active = self._new_file()
            slot = file.next_slot
            file.next_slot += 1
            return file, slot

    def _new_file(self) -> PageFile:
        self._active = None
        self._make_room(self.layout.file_bytes(self.slots))
        self._serial += 1
        file = PageFile.create(self.folder / f"{self._serial:08d}.kv", self.layout, self.slots)
        self._files.append(file)
        return file

    def _make_room(self, needed: int) -> None:
        """Removes what has not been used for the longest time until `needed` bytes fit."""
        while (self._files or self._others) and self.bytes + needed > self.size:
            files: list[PageFile | OtherFile] = [*self._files, *self._others]
            self._remove(min(files, key=lambda file: file.used_at))

    def _remove(self, file: PageFile | OtherFile) -> None:
        unlink(file.path)
        if isinstance(file, OtherFile):
            self._others.remove(file)
            return
        self._files.remove(file)
        self._closing.append(file)
        if self._active is file:
            self._active = None
        self._index = {key: place for key, place in self._index.items() if place.file is not file}

    def _close_removed(self) -> None:
        """To be called where the writer is at no file."""
        for file in self._closing:
            file.close()
        self._closing.clear()

    @property
    def bytes(self) -> int:
        """On disk, of all builds."""
        return sum(file.size for file in self._files) + sum(file.size for file in self._others)

    @property
    def num_pages(self) -> int:
        """That can be found."""
        return len(self._index)

    # ------------------------------------------------------------------------ opening and ending

    def reset(self) -> None:
        """Mutates: no page stored so far is found any more, now or by a later process. (One that
        may only read forgets them for itself.)"""
        with self._lock:
            self.generation += 1
            self._index = {}
            self._pending.clear()
            self._active = None
            if self.writer is not None:
                for file in self._files:
                    unlink(file.path)
            self._closing += self._files
            self._files.clear()
            if not self._in_flight:
                self._close_removed()

    def flush(self) -> None:
        """Waits until every page that was put is written."""
        if self.writer is not None:
            self.writer.flush()

    def close(self) -> None:
        """Writes what was put; a second call does nothing."""
        if self.writer is not None:
            self.writer.close()
            self.writer = None
        with self._lock:
            self._index = {}
            self._closing += self._files
            self._files.clear()
            self._close_removed()
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def _open_files(self) -> None:
        """Files in the order of their numbers: of a page that is there twice, the later one."""
        writable = self._lock_fd is not None
        faults = []
        for path in sorted(self.folder.glob("*.kv")):
            self._serial = max(self._serial, int(path.stem) if path.stem.isdigit() else 0)
            try:
                file = PageFile.open(path, self.layout, writable=writable)
            except (OSError, PageFileError) as error:
                faults.append(str(error))
                self._add_other(path)
                continue
            self._files.append(file)
            for slot, page in file.pages():
                self._index[page.key] = Place(file, slot, page.groups)
        if faults:
            logger.warning("KV store: %d files are ignored; the first: %s", len(faults), faults[0])
        if self._files and self._files[-1].slots == self.slots:
            self._active = self._files[-1]

    def _list_other_builds(self) -> None:
        """Files that no running server writes; they count, and go when they are the oldest."""
        for folder in self.folder.parent.iterdir():
            if folder == self.folder or not BUILD.fullmatch(folder.name):
                continue
            fd = lock_file(folder / "lock", make=False)
            if fd is not None:
                os.close(fd)
                for path in folder.glob("*.kv"):
                    self._add_other(path)

    def _add_other(self, path: Path) -> None:
        try:
            status = path.lstat()
        except OSError:
            return
        self._others.append(OtherFile(path, 512 * status.st_blocks, status.st_mtime))


def unlink(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("KV store: a file cannot be removed: %s", error)


def lock_file(path: Path, *, make: bool = True) -> int | None:
    """A descriptor that holds the lock until it is closed; None where it cannot be had."""
    try:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if make else 0)
        fd = os.open(path, flags, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def open_store(folder: Path, layout: PageLayout, size: int) -> PageStore | None:
    """The store, or None with one line that says why there is none."""
    try:
        return PageStore(folder, layout, size)
    except (OSError, ValueError) as error:
        logger.warning("KV store: none is used: %s", error)
        return None
