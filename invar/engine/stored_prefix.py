"""Prefixes on disk: which pages of a request are there, reading them, and what is worth storing.

A prefix is worth storing once it has been used again, or when it is long. Pages of requests with a
`cache_salt` are stored only where that was asked for. Whole pages alone are stored.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from invar._native import behind_window
from invar.backends.runner import PAGE_TOKENS, GroupMemory
from invar.engine.page_file import KEY_BYTES, Bytes, Page

if TYPE_CHECKING:
    from invar.engine.page_store import PageStore

# Computing as many takes SmolLM2 0.12 s on two cores, and a 1B model 0.8 s.
LONG_PREFIX_TOKENS = 256

# Pages that the system is asked to bring from the disk ahead of the one that is read. Asking takes
# time too, and 24 MB of SmolLM2 or 32 MB of a 1B model keep a disk busy for longer than a step.
READ_AHEAD = 32
# Steps in which a page may be still on its way from the disk; then the disk is waited for.
PATIENCE = 100

TokenIds = npt.NDArray[np.int32]


class PageBytes(Protocol):
    """What a `Runner` does with the bytes of pages."""

    def read_pages(self, group: int, page_ids: np.ndarray, out: np.ndarray) -> None: ...
    def write_pages(self, group: int, page_ids: np.ndarray, data: np.ndarray) -> None: ...


class StoreError(Exception):
    """A page that the index has cannot be read."""


@dataclass
class StoredPrefix:
    """What a request has to do with the store, in pages from its beginning."""

    keys: list[bytes]  # the root's, then one for each page; grows as they are asked for
    reused: int = 0  # found in memory: worth storing
    kept: int = 0  # stored, on their way, or never to be stored
    fetching: range = field(default_factory=lambda: range(0))  # still to be read
    refused: int = 0  # how often the next of them was not in memory yet

    def page(self, ids: TokenIds, index: int, groups: int) -> Page:
        while len(self.keys) <= index + 1:
            begin = (len(self.keys) - 1) * PAGE_TOKENS
            data = ids[begin : begin + PAGE_TOKENS].tobytes()
            self.keys.append(key_of(self.keys[-1], data))
        data = ids[index * PAGE_TOKENS : (index + 1) * PAGE_TOKENS].tobytes()
        return Page(self.keys[index + 1], self.keys[index], data, groups)


def key_of(parent: bytes, data: bytes) -> bytes:
    """The key of a page: of its ids and of all before it."""
    return blake2b(parent + data, digest_size=KEY_BYTES, person=b"invar page").digest()


def root_of(salt: str | None) -> bytes:
    """The parent of first pages: another one for each salt and for none."""
    name = b"" if salt is None else b"salt:" + salt.encode("utf-8", "surrogatepass")
    return blake2b(name, digest_size=KEY_BYTES, person=b"invar root").digest()


class StoredPrefixes:
    """Between KV memory and the page store. Belongs to the engine's thread."""

    def __init__(
        self,
        store: PageStore,
        runner: PageBytes,
        groups: Sequence[GroupMemory],
        *,
        salted: bool = False,
    ) -> None:
        """salted: prefixes of requests with a `cache_salt` are stored too"""
        self.store = store
        self.runner = runner
        self.windows = [group.window for group in groups]
        self.salted = salted
        self.num_read_tokens = 0  # that needed no computing
        self._buffer: Bytes = np.zeros(store.layout.slot_bytes, np.uint8)

    def find(self, salt: str | None, ids: TokenIds, begin: int, limit: int) -> StoredPrefix | None:
        """For a request that comes: what there is to be read of its pages ``[begin, limit)``, where
        memory has those before. None where the store is not for it.

        What is read ends where the last window of every group is stored or lies before `begin`.
        """
        if salt is not None and not self.salted:
            return None
        prefix = StoredPrefix([root_of(salt)], reused=begin)
        end, lacking = begin, [begin - 1] * len(self.windows)  # per group the last page without
        for index in range(begin, limit if self.store.num_pages else begin):
            there = self.store.groups_of(prefix.page(ids, index, 0).key)
            if not there:
                break
            for group in range(len(self.windows)):
                if not there >> group & 1:
                    lacking[group] = index
            if self._has_windows(lacking, begin, index + 1):
                end = index + 1
        prefix.fetching = range(begin, end)
        return prefix

    def _has_windows(self, lacking: Sequence[int], begin: int, end: int) -> bool:
        needed = [
            0 if window is None else behind_window(end * PAGE_TOKENS, window)
            for window in self.windows
        ]
        return all(last < max(begin, first) for last, first in zip(lacking, needed, strict=True))

    def prefetch(self, prefix: StoredPrefix, ids: TokenIds) -> None:
        """Asks the system to bring the first pages that are to be read into memory."""
        for index in prefix.fetching[:READ_AHEAD]:
            self.store.prefetch(prefix.page(ids, index, 0).key)

    def fetch(
        self,
        prefix: StoredPrefix,
        ids: TokenIds,
        table: Sequence[npt.NDArray[np.int32]],
        first: Sequence[int],
        until_s: float,
    ) -> bool:
        """Reads pages into memory without waiting for the disk until some moment on the monotonic
        clock, but at least one; at infinity, all of them. Whether all are there.

        table: per group the page of each index. first: per group, indices before it are not
        wanted. Raises StoreError where a page is not there any more.
        """
        wait = until_s == math.inf
        while prefix.fetching:
            if not self._fetch_page(prefix, ids, table, first, wait=wait):
                return False
            if time.monotonic() >= until_s:
                break
        return not prefix.fetching

    def _fetch_page(
        self,
        prefix: StoredPrefix,
        ids: TokenIds,
        table: Sequence[npt.NDArray[np.int32]],
        first: Sequence[int],
        *,
        wait: bool,
    ) -> bool:
        """False where the page is not in the system's memory yet."""
        index = prefix.fetching.start
        groups = sum(1 << group for group, begin in enumerate(first) if index >= begin)
        wait = wait or prefix.refused == PATIENCE
        found = self.store.read(prefix.page(ids, index, groups), self._buffer, wait=wait)
        if found is None:
            raise StoreError
        prefix.refused = 0 if found else prefix.refused + 1
        if found:
            for group, span in enumerate(self.store.layout.spans):
                if groups >> group & 1:
                    data = self._buffer[np.newaxis, span]
                    self.runner.write_pages(group, table[group][index : index + 1], data)
            if index + READ_AHEAD in prefix.fetching:
                self.store.prefetch(prefix.page(ids, index + READ_AHEAD, 0).key)
            prefix.fetching = range(index + 1, prefix.fetching.stop)
            self.num_read_tokens += PAGE_TOKENS
        return found

    def keep(
        self,
        prefix: StoredPrefix,
        ids: TokenIds,
        table: Sequence[npt.NDArray[np.int32]],
        first: Sequence[int],
        end: int,
        *,
        all_of_it: bool = False,
    ) -> None:
        """Has pages before `end` stored that are worth it, as far as the writer can take them.

        table, first: as in `fetch`. all_of_it: worth it or not.
        """
        worth = end if all_of_it or end * PAGE_TOKENS >= LONG_PREFIX_TOKENS else prefix.reused
        for index in range(prefix.kept, min(worth, end)):
            groups = sum(1 << group for group, begin in enumerate(first) if index >= begin)
            pages = [row[index : index + 1] for row in table]
            if not self.store.put(prefix.page(ids, index, groups), Copy(self, pages, groups)):
                return
            prefix.kept = index + 1


@dataclass
class Copy:
    """Copies pages out of memory, if the store asks for them."""

    prefixes: StoredPrefixes
    pages: Sequence[npt.NDArray[np.int32]]  # per group
    groups: int

    def __call__(self, out: Bytes) -> None:
        for group, span in enumerate(self.prefixes.store.layout.spans):
            if self.groups >> group & 1:
                self.prefixes.runner.read_pages(group, self.pages[group], out[np.newaxis, span])
