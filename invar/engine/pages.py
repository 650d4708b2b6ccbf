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
        name, asked = self.group.name, self.users()
        free, tree, users = (_counts(one, asked) for one in (self.free_pages(), cached, named))
        # Page by page of each slab: those that are held are each in one place, the others in none.
        is_held = np.zeros(len(asked), bool).reshape(-1, self.per_slab)
        is_held[self.held_slabs()] = True
        assert np.count_nonzero(free) == self.num_free
        assert not free[~is_held.ravel()].any(), f"{name}: a free page of a slab not held"
        whole = free.reshape(is_held.shape).all(axis=1)
        assert not whole.any(), f"{name}: a whole slab is held"
        assert (users == asked).all(), f"{name}: users miscounted"
        assert np.count_nonzero(users) == self.num_used
        assert len(named) == self.num_named
        assert np.count_nonzero(users | tree) == self.num_owned
        assert np.count_nonzero(users.reshape(is_held.shape).any(axis=1)) == self.num_used_slabs
        assert tree.max(initial=0) <= 1, f"{name}: a page in two nodes"
        alone = np.where(tree == 0, users, 0)
        assert alone.max(initial=0) <= 1, f"{name}: a page of two requests"
        assert (free + tree + alone == is_held.ravel()).all(), f"{name}: pages lost or doubled"


def _counts(pages: npt.ArrayLike, like: PageIds) -> npt.NDArray[np.int64]:
    """How often each page is named, for as many as `like` has."""
    counts = np.bincount(np.asarray(pages, np.int32), minlength=len(like))
    assert len(counts) == len(like), "a page beyond the arena"
    return counts
