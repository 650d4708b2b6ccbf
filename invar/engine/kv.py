"""KV memory: who has which pages, and the block tables that say so.

A request that holds memory has a slot: its row in the block table of every group. Tokens of one
request in one group, with C computed tokens, rows of the coming step ``[C, E)``, the window W, and
S tokens in pages that are the tree's (see `invar.engine.radix`):

| tokens           | page                                    | owner   | freed by                 |
|------------------|-----------------------------------------|---------|--------------------------|
| ``[0, F)``       | none; F = page start of ``C - W + 1``   | nobody  | (the tree's eviction)    |
| ``[F, S)``       | written, whole                          | tree    | the tree, when unused    |
| ``[S, C)``       | written                                 | request | `give_back`, to the tree |
| ``[C, E)``       | written by the coming step              | request | `give_back`              |
| ``[E, H)``       | held for the rest of the known tokens   | request | `give_back`              |

S is C rounded down to a page, or 0 without prefix caching; then `extend` frees what lies behind the
window. F is 0 in a group without a window. H is a multiple of the page. Table entries of ``[0, F)``
repeat the first kept page: whatever a kernel loads for masked positions is an address it may read.

Where a page store is behind the tree (see `invar.engine.stored_prefix`), a request may begin with
pages that are still to be read: they are its own, and it does not run before all of them are there.
Then they go to the tree at once. F is that of their end from the beginning.

A page that the tree has in part only is copied whole: what lies behind the matching tokens is
written by the request before it is read, as in any page that somebody else had before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from invar._native import RadixMatch, SlabArbiter, behind_window, common_ids
from invar.backends.runner import PAGE_TOKENS, GroupMemory, RunnerInfo, pages_of, peak_pages
from invar.engine.holding import Held, Holding, TokenIds
from invar.engine.pages import PageIds, PagePool
from invar.engine.radix import RadixTree

if TYPE_CHECKING:
    from invar.engine.stored_prefix import StoredPrefix, StoredPrefixes

CopyPages = Callable[[int, PageIds, PageIds], None]  # (group, from, to)


class KVMemory:
    """Owner of all pages and block tables. Not thread-safe: it belongs to the engine's thread."""

    def __init__(
        self,
        info: RunnerInfo,
        *,
        max_model_len: int,
        max_chunk: int,
        copy_pages: CopyPages,
        caching: bool = True,
        prefixes: StoredPrefixes | None = None,
        on_free: Callable[[int, PageIds], None] | None = None,
    ) -> None:
        """max_chunk: most rows of one request in a step. caching: whether computed prefixes are
        kept and reused. prefixes: those on disk. on_free(group, page ids): tests' poison"""
        self.arbiter = SlabArbiter(info.slabs)
        self.pools = tuple(PagePool(group, self.arbiter) for group in info.groups)
        self.max_chunk = max_chunk
        self.copy_pages = copy_pages
        self.caching = caching
        self.prefixes = prefixes
        self.tree = RadixTree(self.arbiter, self.pools, on_free)
        shape = (info.max_sequences, pages_of(max_model_len))
        self.tables = tuple(np.zeros(shape, np.int32) for _ in self.pools)
        self.held: dict[int, Holding] = {}  # by slot
        self.free_slots = list(range(info.max_sequences - 1, -1, -1))
        self.capacity_tokens = self._capacity(max_model_len)

    def open(
        self,
        ids: TokenIds,
        tokens: int,
        reusable: int = 0,
        salt: str | None = None,
        *,
        alone: bool = False,
    ) -> tuple[int, int] | None:
        """Mutates: a slot with pages for the first `tokens` ids, and how many of the first
        `reusable` ones are computed already; None when memory is short. More of them may be on
        disk: then `is_fetching`, and the request must not run before `fetch` has read them.

        ids: of the whole request; what is not known yet may be filled in later. alone: nothing is
        reused or kept, and what is cached goes; nobody else may hold pages then.

        Holding what the whole prompt needs at admission keeps two half-read prompts from waiting
        for each other's pages. A window group holds at most its peak.
        """
        if not self.free_slots:
            return None
        if alone:
            self.tree.clear()
        caching = self.caching and not alone
        while True:
            match = self.match(ids, reusable, salt) if caching else RadixMatch()
            stored = None
            if caching and self.prefixes is not None:
                stored = self.prefixes.find(salt, ids, match.pages, reusable // PAGE_TOKENS)
            if stored is not None and stored.fetching:  # more than a tail
                match = RadixMatch(match.node, match.pages)
            slot = self._take_slot(ids, tokens, match, salt, caching, stored)
            if slot is None and not self.held and match.tokens:
                # Nobody is left to wait for: what matches lies scattered over too many slabs.
                self.tree.clear()
            elif slot is None or not match.tail_tokens or self._copy_tail(slot, match):
                if slot is not None and stored is not None and self.prefixes is not None:
                    self.prefixes.prefetch(stored, ids)
                return None if slot is None else (slot, match.tokens)
            else:  # the page to copy from was evicted meanwhile
                self.give_back(slot)

    def match(self, ids: TokenIds, reusable: int, salt: str | None) -> RadixMatch:
        """Mutates nothing. What is there of a request's first `reusable` tokens."""
        if not self.caching or reusable < 1:
            return RadixMatch()
        match = self.tree.match(salt, ids[:reusable])
        if match.node is not None and match.node.holders:
            match = self._match_running(match, ids[:reusable])
        return self.tree.usable(match)

    def _match_running(self, match: RadixMatch, ids: TokenIds) -> RadixMatch:
        """The page that a running request is filling may have more of a prompt than the tree."""
        position = match.pages * PAGE_TOKENS
        for slot, other in self.held.items():
            if other.node is match.node and other.shared == match.pages:
                tail = common_ids(other.ids[position : other.computed], ids, position)
                if tail > match.tail_tokens:
                    lent = [int(table[slot, match.pages]) for table in self.tables]
                    match = RadixMatch(match.node, match.pages, lent, tail)
        return match

    def advance(self, slot: int, computed: int) -> None:
        """Mutates: a request's first `computed` tokens are computed. Its pages that are full now
        become the tree's; where the tree has them already, the request uses the tree's."""
        holding = self.held[slot]
        holding.computed = computed
        begin, end = holding.shared, computed // PAGE_TOKENS
        if not holding.publishes:
            return
        if begin < end:
            own = [table[slot, begin:end] for table in self.tables]
            # A window group that was read from disk lacks what lies behind the window.
            missing = [max(0, held.first - begin) for held in holding.groups]
            ids = holding.ids[begin * PAGE_TOKENS : end * PAGE_TOKENS]
            holding.node = self.tree.insert(holding.node, ids, own, missing)
            holding.shared = end
            for group in range(len(self.pools)):
                self._repeat_first(slot, group)
        self.store(slot)

    def is_fetching(self, slot: int) -> bool:
        """Whether pages of a request are still to be read: it must not run before."""
        stored = self.held[slot].stored
        return stored is not None and bool(stored.fetching)

    def fetch(self, slot: int, until_s: float) -> int:
        """Mutates: reads pages of a request that is fetching, without waiting for the disk, until
        some moment on the monotonic clock; at infinity, all of them. Once they are there they are
        as computed. Returns how many tokens are.

        Raises StoreError where a page is not there any more; then the slot must be given back.
        """
        holding = self.held[slot]
        assert holding.stored is not None
        assert self.prefixes is not None
        end = holding.stored.fetching.stop
        if self.prefixes.fetch(holding.stored, holding.ids, *self._rows(slot), until_s):
            self.advance(slot, end * PAGE_TOKENS)
        return holding.computed

    def store(self, slot: int, *, all_of_it: bool = False) -> None:
        """Mutates the page store: gets whole pages of a request that are worth it, or all of them,
        as far as they can be taken now."""
        holding = self.held[slot]
        if holding.stored is None or holding.generation != self.tree.generation:
            return
        assert self.prefixes is not None
        rows, shared = self._rows(slot), holding.shared
        self.prefixes.keep(holding.stored, holding.ids, *rows, shared, all_of_it=all_of_it)

    def _rows(self, slot: int) -> tuple[list[PageIds], list[int]]:
        """A request's row of each group's table, and its first page there."""
        first = [held.first for held in self.held[slot].groups]
        return [table[slot] for table in self.tables], first

    def extend(self, slot: int, end: int) -> bool:
        """Mutates: holds pages up to `end`; where one is missing, what lies behind the window of
        the first token that is not computed goes first.

        Returns False when memory is short; then nothing was taken, and the request cannot run
        before a later call succeeds.
        """
        holding = self.held[slot]
        if all(end <= held.end * PAGE_TOKENS for held in holding.groups):
            return True
        self._leave_behind_window(slot)
        wanted = [max(0, pages_of(end) - held.end) for held in holding.groups]
        if not self.tree.make_room(wanted):
            return False
        self._take(slot, wanted)
        return True

    def give_back(self, slot: int) -> None:
        """Mutates: the one way back for a request's pages (finished, preempted, cancelled)."""
        holding = self.held[slot]
        kept = holding.publishes and holding.generation == self.tree.generation
        if kept and holding.computed % PAGE_TOKENS:
            self._give_tail(slot, holding)
        for group, held in enumerate(holding.groups):
            self._leave(slot, group, held.first, held.end)
        del self.held[slot]
        self.free_slots.append(slot)
        self.tree.release(holding.node)
        if not kept:
            self.tree.forget(holding.node)

    def clear_cache(self) -> None:
        """Mutates: no prefix computed so far is found any more."""
        self.tree.reset()
        if self.prefixes is not None:
            self.prefixes.store.reset()

    def block_tables(self, slots: np.ndarray, max_kv_len: int) -> tuple[np.ndarray, ...]:
        """Per group int32 ``[len(slots), pages of max_kv_len]``, copies."""
        width = pages_of(max_kv_len)
        return tuple(table[slots, :width] for table in self.tables)

    def fits_alone(self, tokens: int) -> bool:
        """Whether a request that writes `tokens` tokens can run when nothing else does."""
        slabs = sum(
            -(-self._peak_pages(pool.group, tokens) // pool.group.pages_per_slab)
            for pool in self.pools
        )
        return slabs <= self.arbiter.total

    @property
    def num_releases(self) -> int:
        """Counts up whenever pages lose their last user: no room is found before that which was not
        found then."""
        return sum(pool.num_releases for pool in self.pools)

    @property
    def usage(self) -> float:
        """Share of the arena that requests use, 0 … 1. What is only cached can be had at once."""
        if not self.arbiter.total:
            return 0.0
        used = sum(pool.num_used / pool.group.pages_per_slab for pool in self.pools)
        return used / self.arbiter.total

    def _take_slot(
        self,
        ids: TokenIds,
        tokens: int,
        match: RadixMatch,
        salt: str | None,
        caching: bool,
        stored: StoredPrefix | None,
    ) -> int | None:
        node = self.tree.hold(match, salt)
        slot = self.free_slots.pop()
        known = match.tokens
        if stored is not None and stored.fetching:
            known = stored.fetching.stop * PAGE_TOKENS
        groups, wanted, needed = [], [], pages_of(tokens)
        for group, (pool, table) in enumerate(zip(self.pools, self.tables, strict=True)):
            window, first, end = pool.group.window, 0, needed
            if window is not None:
                first = behind_window(known, window)
                end = min(needed, first + self._peak_pages(pool.group, tokens))
            begin = max(first, match.pages)
            groups.append(Held(first, begin))
            wanted.append(end - begin)
            if first < match.pages:
                self.tree.pages_of(node, group, table[slot], first)
                pool.use(table[slot, first : match.pages])
        self.held[slot] = Holding(
            ids,
            tuple(groups),
            node,
            match.pages,
            match.pages * PAGE_TOKENS,
            caching,
            self.tree.generation,
            stored,
        )
        if self.tree.make_room(wanted):
            self._take(slot, wanted)
            return slot
        self.give_back(slot)
        return None

    def _copy_tail(self, slot: int, match: RadixMatch) -> bool:
        """Copies the page that matches partly. False where it has been evicted."""
        sources = self.tree.tail_pages(match)
        if sources is None:
            return False
        for group, source in enumerate(sources):
            target = self.tables[group][slot, match.pages : match.pages + 1]
            self.copy_pages(group, np.array([source], np.int32), target.copy())
        self.held[slot].computed = match.tokens
        return True

    def _give_tail(self, slot: int, holding: Holding) -> None:
        """The last page, partly filled, becomes the tree's unless it has those ids."""
        page = holding.shared
        ids = holding.ids[page * PAGE_TOKENS : holding.computed]
        pages = [int(table[slot, page]) for table in self.tables]
        if self.tree.insert_tail(holding.node, ids, pages):
            holding.shared += 1

    def _take(self, slot: int, wanted: list[int]) -> None:
        groups = zip(self.pools, self.held[slot].groups, wanted, strict=True)
        for group, (pool, held, count) in enumerate(groups):
            if count:
                pool.take(self.tables[group][slot, held.end : held.end + count])
                held.end += count
            self._repeat_first(slot, group)

    def _repeat_first(self, slot: int, group: int) -> None:
        held = self.held[slot].groups[group]
        if 0 < held.first < held.end:
            self.tables[group][slot, : held.first] = self.tables[group][slot, held.first]

    def _leave_behind_window(self, slot: int) -> None:
        holding = self.held[slot]
        for group, (pool, held) in enumerate(zip(self.pools, holding.groups, strict=True)):
            if pool.group.window is None:
                continue
            first = behind_window(holding.computed, pool.group.window)
            if first > held.first:
                self._leave(slot, group, held.first, first)
                held.first = first
                self._repeat_first(slot, group)

    def _leave(self, slot: int, group: int, first: int, end: int) -> None:
        """The request no longer uses these pages; those that are not the tree's are free."""
        pages = self.tables[group][slot, first:end]
        self.pools[group].drop(pages)
        self.tree.free(group, pages[max(0, self.held[slot].shared - first) :])

    def _peak_pages(self, group: GroupMemory, tokens: int) -> int:
        return peak_pages(tokens, group.window, self.max_chunk)

    def _capacity(self, max_model_len: int) -> int:
        """Most tokens that one request can write, found by bisection (fits_alone is monotonic)."""
        low, high = 0, max_model_len
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.fits_alone(middle) else (low, middle - 1)
        return low

    # ------------------------------------------------------------------------------------ tests

    def check_integrity(self) -> None:
        """Raises AssertionError unless free + cached + held = total, no page is in two places, and
        tables and tree say the same."""
        held_slabs = [slab for pool in self.pools for slab in pool.held_slabs()]
        slabs = sorted(self.arbiter.free_slabs() + held_slabs)
        assert slabs == list(range(self.arbiter.total)), f"slabs lost or doubled: {slabs}"
        slots = sorted([*self.free_slots, *self.held])
        assert slots == list(range(len(self.tables[0]))), f"slots lost or doubled: {slots}"
        self.tree.check_integrity([holding.node for holding in self.held.values()])
        for slot, holding in self.held.items():
            holding.check_integrity(self.tree, [table[slot] for table in self.tables])
        for group, pool in enumerate(self.pools):
            cached: list[int] = []
            for node in self.tree.nodes():
                cached += node.pages[group][node.first[group] :]
            named: list[int] = []
            for slot, holding in self.held.items():
                held = holding.groups[group]
                named += self.tables[group][slot, held.first : held.end].tolist()
            pool.check_integrity(cached, named)
