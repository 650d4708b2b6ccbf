"""Pages and slabs: who uses which, and what is free.

The arena is a number of equal slabs that belong to the process. A cache group takes slabs whole and
cuts them into pages of `PAGE_TOKENS` tokens; page p of a group lies in slab ``p // pages_per_slab``
at index ``p % pages_per_slab``. A slab whose pages are all free goes back to the arbiter, so that
groups (later: models) can trade memory.

| page   | users | in the tree | named by                     | becomes free by                   |
|--------|-------|-------------|------------------------------|-----------------------------------|
| free   | 0     | no          | `PagePool.free_pages`        |                                   |
| held   | 1     | no          | one request's block table    | the request: `drop`, `give_back`  |
| shared | ≥ 1   | yes         | a node, and block tables     | the last `drop`: it is cached     |
| cached | 0     | yes         | a node                       | the tree's eviction: `give_back`  |
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from invar._native import PageCounts, SlabArbiter
from invar.backends.runner import GroupMemory

PageIds = npt.NDArray[np.int32]


class PagePool(PageCounts):
    """The pages of one cache group.

    Page ids in a call are distinct, and int32 arrays. All calls mutate:

    - ``take(pages)`` fills an array with pages that have one user. The caller has seen that the
      arbiter has ``slabs_needed(len(pages))`` slabs. Pages of held slabs go first, so that the
      group holds no more slabs than its peak needs; low ones first, so that the high slabs empty
      and go back.
    - ``use(pages)``: one more request names them.
    - ``drop(pages)``: a request no longer names them. Those without users are the tree's, or must
      be given back.
    - ``give_back(pages)``: pages without users are free, and slabs that became whole belong to the
      arbiter.

    Each raises ValueError for a page whose state forbids it.
    """

    def __init__(self, group: GroupMemory, arbiter: SlabArbiter) -> None:
        super().__init__(arbiter, group.pages_per_slab)
        self.group = group
        self.per_slab = group.pages_per_slab

    # ------------------------------------------------------------------------------------ tests

    def check_integrity(self, cached: list[int], named: list[int]) -> None:
        """cached: pages in the tree; named: entries of block tables, one for each user.

        Raises AssertionError unless every page of the pool's slabs is in one place.
        """
        name, per_slab = self.group.name, self.per_slab
        free, slabs = self.free_pages(), self.held_slabs()
        assert len(free) == self.num_free
        free_of_slab = Counter(page // per_slab for page in free)
        assert free_of_slab.keys() <= set(slabs), f"{name}: a free page of a slab not held"
        assert max(free_of_slab.values(), default=0) < per_slab, f"{name}: a whole slab is held"
        users = Counter(named)
        assert [users[page] for page in range(len(self.users()))] == self.users(), (
            f"{name}: users miscounted"
        )
        assert len(users) == self.num_used
        assert len(named) == self.num_named
        assert len(users.keys() | set(cached)) == self.num_owned
        assert len({page // per_slab for page in users}) == self.num_used_slabs
        assert len(set(cached)) == len(cached), f"{name}: a page in two nodes"
        held = users.keys() - set(cached)
        assert all(users[page] == 1 for page in held), f"{name}: a page of two requests"
        expected = [
            page for slab in slabs for page in range(slab * per_slab, (slab + 1) * per_slab)
        ]
        pages = sorted([*free, *cached, *held])
        assert pages == sorted(expected), f"{name}: pages lost or doubled"
