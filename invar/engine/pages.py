"""Pages and slabs: who uses which, and what is free.

The arena is a number of equal slabs that belong to the process. A cache group takes slabs whole and
cuts them into pages of `PAGE_TOKENS` tokens; page p of a group lies in slab ``p // pages_per_slab``
at index ``p % pages_per_slab``. A slab whose pages are all free goes back to the arbiter, so that
groups (later: models) can trade memory.

| page   | users | in the tree | named by                     | becomes free by                   |
|--------|-------|-------------|------------------------------|-----------------------------------|
| free   | 0     | no          | `PagePool.free`              |                                   |
| held   | 1     | no          | one request's block table    | the request: `drop`, `give_back`  |
| shared | ≥ 1   | yes         | a node, and block tables     | the last `drop`: it is cached     |
| cached | 0     | yes         | a node                       | the tree's eviction: `give_back`  |
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from invar.backends.runner import GroupMemory

PageIds = npt.NDArray[np.int32]


class SlabArbiter:
    """Who owns which slab: a slab is free here or held by exactly one pool."""

    def __init__(self, slabs: int) -> None:
        self.total = slabs
        self.free = list(range(slabs - 1, -1, -1))

    def take(self, count: int) -> list[int]:
        """Mutates. The caller has seen that so many are free."""
        taken = self.free[-count:]
        del self.free[-count:]
        return taken

    def give_back(self, slabs: list[int]) -> None:
        self.free += slabs


class PagePool:
    """The pages of one cache group. Page ids in a call are distinct."""

    def __init__(self, group: GroupMemory, arbiter: SlabArbiter) -> None:
        self.group = group
        self.arbiter = arbiter
        self.per_slab = group.pages_per_slab
        self.slabs: set[int] = set()  # held
        self.free: set[int] = set()  # pages of held slabs
        self.free_of_slab = np.zeros(arbiter.total, np.int32)  # how many
        # Requests whose block table names the page, and what follows from that.
        self.users = np.zeros(arbiter.total * self.per_slab, np.int32)
        self.used_of_slab = np.zeros(arbiter.total, np.int32)
        self.num_used = 0  # pages with users
        self.num_used_slabs = 0  # slabs with such pages

    def slabs_needed(self, pages: int) -> int:
        """New slabs that `take(pages)` would draw from the arbiter."""
        return -(-max(0, pages - len(self.free)) // self.per_slab)

    def slabs_needed_at_best(self, pages: int) -> int:
        """The same, were everything evicted that no request uses."""
        room = self.num_used_slabs * self.per_slab - self.num_used
        return -(-max(0, pages - room) // self.per_slab)

    def take(self, count: int) -> PageIds:
        """Mutates: pages with one user. The caller has seen that the arbiter has
        `slabs_needed(count)` slabs.

        Pages of held slabs go first, so that the group holds no more slabs than its peak needs;
        low ones first, so that the high slabs empty and go back.
        """
        opened = self.slabs_needed(count)
        if opened:
            self._open(self.arbiter.take(opened))
        pages = np.fromiter(self.free, np.int32, len(self.free))
        pages.sort()
        pages = pages[:count]
        self.free.difference_update(pages.tolist())
        np.subtract.at(self.free_of_slab, pages // self.per_slab, 1)
        self.use(pages)
        return pages

    def use(self, page_ids: PageIds) -> None:
        """Mutates: one more request names the pages."""
        fresh = page_ids[self.users[page_ids] == 0]
        self.users[page_ids] += 1
        if len(fresh):
            slabs = fresh // self.per_slab
            unused = slabs[self.used_of_slab[slabs] == 0]
            self.num_used_slabs += len(set(unused.tolist()))
            np.add.at(self.used_of_slab, slabs, 1)
            self.num_used += len(fresh)

    def drop(self, page_ids: PageIds) -> None:
        """Mutates: a request no longer names the pages. Those without users are the tree's, or must
        be given back."""
        self.users[page_ids] -= 1
        unused = page_ids[self.users[page_ids] == 0]
        if len(unused):
            slabs = unused // self.per_slab
            np.subtract.at(self.used_of_slab, slabs, 1)
            empty = slabs[self.used_of_slab[slabs] == 0]
            self.num_used_slabs -= len(set(empty.tolist()))
            self.num_used -= len(unused)

    def give_back(self, page_ids: PageIds) -> None:
        """Mutates: pages without users are free, and slabs that became whole belong to the
        arbiter."""
        slabs = page_ids // self.per_slab
        np.add.at(self.free_of_slab, slabs, 1)
        self.free.update(page_ids.tolist())
        whole = np.unique(slabs[self.free_of_slab[slabs] == self.per_slab])
        if len(whole):
            self.free_of_slab[whole] = 0
            self.free.difference_update(self._pages(whole).tolist())
            self.slabs.difference_update(whole.tolist())
            self.arbiter.give_back(whole.tolist())

    def _open(self, slabs: list[int]) -> None:
        self.slabs.update(slabs)
        self.free_of_slab[slabs] = self.per_slab
        self.free.update(self._pages(np.array(slabs, np.int32)).tolist())

    def _pages(self, slabs: PageIds) -> PageIds:
        return (slabs[:, np.newaxis] * self.per_slab + np.arange(self.per_slab)).ravel()

    # ------------------------------------------------------------------------------------ tests

    def check_integrity(self, cached: list[int], named: list[int]) -> None:
        """cached: pages in the tree; named: entries of block tables, one for each user.

        Raises AssertionError unless every page of the pool's slabs is in one place.
        """
        name, per_slab = self.group.name, self.per_slab
        free_of_slab = np.zeros_like(self.free_of_slab)
        np.add.at(free_of_slab, [page // per_slab for page in self.free], 1)
        assert np.array_equal(free_of_slab, self.free_of_slab)
        assert (free_of_slab < per_slab).all(), f"{name}: a whole slab that was not given back"
        users = np.zeros_like(self.users)
        np.add.at(users, named, 1)
        assert np.array_equal(users, self.users), f"{name}: users miscounted"
        used = set(named)
        assert len(used) == self.num_used
        used_of_slab = np.zeros_like(self.used_of_slab)
        np.add.at(used_of_slab, [page // per_slab for page in used], 1)
        assert np.array_equal(used_of_slab, self.used_of_slab)
        assert np.count_nonzero(used_of_slab) == self.num_used_slabs
        assert len(set(cached)) == len(cached), f"{name}: a page in two nodes"
        held = used - set(cached)
        assert all(users[page] == 1 for page in held), f"{name}: a page of two requests"
        expected = [
            page for slab in self.slabs for page in range(slab * per_slab, (slab + 1) * per_slab)
        ]
        pages = sorted([*self.free, *cached, *held])
        assert pages == sorted(expected), f"{name}: pages lost or doubled"
