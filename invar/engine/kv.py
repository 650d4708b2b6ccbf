"""KV memory: slabs, pages and block tables.

The arena is a number of equal slabs that belong to the process. A cache group takes slabs whole and
cuts them into pages of `PAGE_TOKENS` tokens; page p of a group lies in slab ``p // pages_per_slab``
at index ``p % pages_per_slab``. A slab whose pages are all free goes back to the arbiter, so that
groups (later: models) can trade memory.

A request that holds memory has a slot: its row in the block table of every group. Tokens of one
request in one group, with C computed tokens, rows of the coming step ``[C, E)`` and the window W:

| tokens           | page                                    | owner   | freed by                |
|------------------|-----------------------------------------|---------|-------------------------|
| ``[0, F)``       | none; F = page start of ``C - W + 1``   | nobody  | `extend`, behind window |
| ``[F, C)``       | written                                 | request | `extend` or `give_back` |
| ``[C, E)``       | written by the coming step              | request | `give_back`             |
| ``[E, H)``       | held for the rest of the known tokens   | request | `give_back`             |

F is 0 in a group without a window. H is a multiple of the page. Table entries of ``[0, F)`` repeat
the first kept page: whatever a kernel loads for masked positions is an address it may read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from invar.backends.runner import PAGE_TOKENS, GroupMemory, RunnerInfo, pages_of, peak_pages


class SlabArbiter:
    """Who owns which slab: a slab is free here or held by exactly one pool."""

    def __init__(self, slabs: int) -> None:
        self.total = slabs
        self.free = list(range(slabs - 1, -1, -1))

    def take(self) -> int:
        """Mutates. The caller has seen that one is free."""
        return self.free.pop()

    def give_back(self, slab: int) -> None:
        self.free.append(slab)


class PagePool:
    """The pages of one cache group."""

    def __init__(self, group: GroupMemory, arbiter: SlabArbiter) -> None:
        self.group = group
        self.arbiter = arbiter
        self.slabs: set[int] = set()  # held
        self.free_of_slab: dict[int, list[int]] = {}  # of the held slabs that have free pages
        self.num_free = 0

    def slabs_needed(self, pages: int) -> int:
        """New slabs that `take(pages)` would draw from the arbiter."""
        return -(-max(0, pages - self.num_free) // self.group.pages_per_slab)

    def take(self, count: int) -> list[int]:
        """Mutates. The caller has seen that the arbiter has `slabs_needed(count)` slabs.

        Pages of held slabs go first, so that the group holds no more slabs than its peak needs.
        """
        for _ in range(self.slabs_needed(count)):
            self._open_slab()
        self.num_free -= count
        taken: list[int] = []
        while len(taken) < count:
            slab = min(self.free_of_slab)  # so that the high ones empty and go back
            pages = self.free_of_slab[slab]
            use = min(count - len(taken), len(pages))
            taken += pages[-use:]
            del pages[-use:]
            if not pages:
                del self.free_of_slab[slab]
        return taken

    def give_back(self, page_ids: list[int]) -> None:
        """Mutates: the pages are free, and slabs that became whole belong to the arbiter."""
        per_slab = self.group.pages_per_slab
        for page in page_ids:
            slab = page // per_slab
            pages = self.free_of_slab.setdefault(slab, [])
            pages.append(page)
            self.num_free += 1
            if len(pages) == per_slab:
                del self.free_of_slab[slab]
                self.slabs.remove(slab)
                self.num_free -= per_slab
                self.arbiter.give_back(slab)

    def _open_slab(self) -> None:
        slab = self.arbiter.take()
        self.slabs.add(slab)
        per_slab = self.group.pages_per_slab
        first = slab * per_slab
        self.free_of_slab[slab] = list(range(first + per_slab - 1, first - 1, -1))
        self.num_free += per_slab


@dataclass
class Held:
    """The pages ``[first, end)`` of a request's table in one group, counted in pages."""

    first: int = 0
    end: int = 0


class KVMemory:
    """Owner of all pages and block tables. Not thread-safe: it belongs to the engine's thread."""

    def __init__(
        self,
        info: RunnerInfo,
        *,
        max_model_len: int,
        max_chunk: int,
        on_free: Callable[[int, np.ndarray], None] | None = None,
    ) -> None:
        """max_chunk: most rows of one request in a step. on_free(group, page ids): tests' poison"""
        self.arbiter = SlabArbiter(info.slabs)
        self.pools = tuple(PagePool(group, self.arbiter) for group in info.groups)
        self.max_chunk = max_chunk
        self.on_free = on_free
        shape = (info.max_sequences, pages_of(max_model_len))
        self.tables = tuple(np.zeros(shape, np.int32) for _ in self.pools)
        self.held: dict[int, tuple[Held, ...]] = {}  # slot → per group
        self.free_slots = list(range(info.max_sequences - 1, -1, -1))
        self.capacity_tokens = self._capacity(max_model_len)

    def open(self, tokens: int) -> int | None:
        """Mutates: a slot with pages for all `tokens` known tokens, or None when memory is short.

        Holding what the whole prompt needs at admission keeps two half-read prompts from waiting
        for each other's pages. A window group holds at most its peak.
        """
        wanted = [self._peak_pages(pool.group, tokens) for pool in self.pools]
        if not self.free_slots or not self._available(wanted):
            return None
        slot = self.free_slots.pop()
        self.held[slot] = tuple(Held() for _ in self.pools)
        self._take(slot, wanted)
        return slot

    def extend(self, slot: int, computed: int, end: int) -> bool:
        """Mutates: holds pages up to `end`; where one is missing, what lies behind the window of
        token `computed` goes first.

        Returns False when memory is short; then nothing was taken, and the request cannot run
        before a later call succeeds.
        """
        if all(end <= held.end * PAGE_TOKENS for held in self.held[slot]):
            return True
        self._free_behind_window(slot, computed)
        wanted = [max(0, pages_of(end) - held.end) for held in self.held[slot]]
        if not self._available(wanted):
            return False
        self._take(slot, wanted)
        for table, held in zip(self.tables, self.held[slot], strict=True):
            if held.first:
                table[slot, : held.first] = table[slot, held.first]
        return True

    def give_back(self, slot: int) -> None:
        """Mutates: the one way back for a request's pages (finished, preempted, cancelled).

        The index of finished prefixes attaches here: what it keeps does not reach the pools.
        """
        for group, held in enumerate(self.held.pop(slot)):
            self._free(slot, group, held.first, held.end)
        self.free_slots.append(slot)

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
    def usage(self) -> float:
        """Share of the arena that holds pages of requests, 0 … 1."""
        if not self.arbiter.total:
            return 0.0
        free = len(self.arbiter.free) + sum(
            pool.num_free / pool.group.pages_per_slab for pool in self.pools
        )
        return 1.0 - free / self.arbiter.total

    def _available(self, wanted: list[int]) -> bool:
        slabs = sum(pool.slabs_needed(n) for pool, n in zip(self.pools, wanted, strict=True))
        return slabs <= len(self.arbiter.free)

    def _take(self, slot: int, wanted: list[int]) -> None:
        for pool, table, held, count in zip(
            self.pools, self.tables, self.held[slot], wanted, strict=True
        ):
            if count:
                table[slot, held.end : held.end + count] = pool.take(count)
                held.end += count

    def _free_behind_window(self, slot: int, computed: int) -> None:
        for group, (pool, held) in enumerate(zip(self.pools, self.held[slot], strict=True)):
            if pool.group.window is None:
                continue
            first = max(0, computed - pool.group.window + 1) // PAGE_TOKENS
            if first > held.first:
                self._free(slot, group, held.first, first)
                held.first = first

    def _free(self, slot: int, group: int, first: int, end: int) -> None:
        page_ids = self.tables[group][slot, first:end]
        if self.on_free is not None:
            self.on_free(group, page_ids.copy())
        self.pools[group].give_back(page_ids.tolist())

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
        """Raises AssertionError unless free + held = total and no page is in two places."""
        held_slabs = [slab for pool in self.pools for slab in pool.slabs]
        slabs = Counter(self.arbiter.free + held_slabs)
        assert slabs == Counter(range(self.arbiter.total)), f"slabs lost or doubled: {slabs}"
        assert set(self.free_slots).isdisjoint(self.held)
        assert len(self.free_slots) + len(self.held) == len(self.tables[0])
        for group, pool in enumerate(self.pools):
            self._check_pool(group, pool)

    def _check_pool(self, group: int, pool: PagePool) -> None:
        per_slab = pool.group.pages_per_slab
        free = [page for pages in pool.free_of_slab.values() for page in pages]
        assert len(free) == pool.num_free, f"{pool.group.name}: {len(free)} != {pool.num_free}"
        assert all(0 < len(pages) < per_slab for pages in pool.free_of_slab.values())
        owned: list[int] = []
        for slot, groups in self.held.items():
            held, table = groups[group], self.tables[group][slot]
            assert 0 <= held.first <= held.end
            assert (table[: held.first] == table[held.first]).all()
            owned += table[held.first : held.end].tolist()
        pages = Counter(free + owned)
        expected = Counter(
            page for slab in pool.slabs for page in range(slab * per_slab, (slab + 1) * per_slab)
        )
        assert pages == expected, f"{pool.group.name}: pages lost or doubled"
