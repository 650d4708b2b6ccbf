"""The native count of pages, held against sets."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from invar._native import common_ids
from invar.backends.runner import GroupMemory
from invar.engine.pages import PagePool, SlabArbiter


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def pool_of(slabs: int, per_slab: int) -> PagePool:
    return PagePool(GroupMemory("full", 1, per_slab, None), SlabArbiter(slabs))


@settings(max_examples=50, deadline=None)
@given(slabs=st.integers(1, 70), per_slab=st.integers(1, 5), dice=st.randoms(use_true_random=False))
def test_counts_are_those_of_sets(slabs: int, per_slab: int, dice: random.Random) -> None:
    pool = pool_of(slabs, per_slab)
    named: list[int] = []  # once for each user
    kept: set[int] = set()  # pages that are not free
    for _ in range(60):
        action = dice.choice(("take", "use", "drop", "give back"))
        unused = sorted(kept - set(named))
        if action == "take":
            room = slabs * per_slab - len(kept)
            count = dice.randint(0, min(room, 12))
            needed = pool.slabs_needed(count)
            assert needed == -(-max(0, count - len(pool.free_pages())) // per_slab)
            pages = np.empty(count, np.int32)
            held = len(pool.held_slabs())
            pool.take(pages)
            assert len(pool.held_slabs()) - held == needed
            assert not count or max(pages) < min([*pool.free_pages(), 1000]), "low ones first"
            assert not kept & set(pages.tolist())
            kept.update(pages.tolist())
            named += pages.tolist()
        elif action == "use" and kept:
            pages = dice.sample(sorted(kept), dice.randint(1, len(kept)))
            pool.use(ids(*pages))
            named += pages
        elif action == "drop" and named:
            pages = dice.sample(sorted(set(named)), dice.randint(1, len(set(named))))
            pool.drop(ids(*pages))
            for page in pages:
                named.remove(page)
        elif action == "give back" and unused:
            pages = dice.sample(unused, dice.randint(1, len(unused)))
            pool.give_back(ids(*pages))
            kept.difference_update(pages)
        pool.check_integrity(sorted(kept), named)  # as if all were the tree's
        at_best = pool.slabs_needed_at_best(per_slab)
        used_slabs = {page // per_slab for page in named}
        room = len(used_slabs) * per_slab - len(set(named))
        assert at_best == -(-max(0, per_slab - room) // per_slab)
        order = dice.sample(sorted(kept), len(kept))
        leading = next((i for i, page in enumerate(order) if page in named), len(order))
        assert pool.leading_unused(ids(*order)) == leading


@pytest.mark.parametrize(
    ("call", "page"),
    [
        ("use", 9),  # free
        ("use", 40),  # of a slab that is not held
        ("drop", 9),
        ("give_back", 0),  # in use
        ("give_back", 9),
        ("use", -1),
        ("drop", 100),
        ("leading_unused", 100),
    ],
)
def test_what_a_page_forbids_is_refused(call: str, page: int) -> None:
    pool = pool_of(10, 10)
    pages = np.empty(5, np.int32)
    pool.take(pages)
    with pytest.raises(ValueError, match=f"page {page}: "):
        getattr(pool, call)(ids(page))
    pool.check_integrity([], pages.tolist())


def test_what_is_no_array_of_pages_is_refused() -> None:
    pool = pool_of(10, 10)
    for wrong in ([1, 2], np.zeros(2, np.int64), np.zeros((2, 2), np.int32)):
        with pytest.raises(ValueError, match="pages: expected a contiguous int32 array"):
            pool.use(wrong)  # type: ignore[arg-type]
    for per_slab in (0, 1 << 31):
        with pytest.raises(ValueError, match="pages_per_slab"):
            pool_of(10, per_slab)
    with pytest.raises(ValueError, match="101 pages need 11 slabs, 10 are free"):
        pool.take(np.empty(101, np.int32))


@given(common=st.integers(0, 200), left=st.integers(0, 3), right=st.integers(0, 3))
def test_common_ids_counts_whole_ids(common: int, left: int, right: int) -> None:
    begun = np.arange(common, dtype=np.int32)
    ours = np.concatenate([begun, np.full(left, 1 << 20, np.int32)])
    theirs = np.concatenate([begun, np.full(right, 1 << 21, np.int32)])
    assert common_ids(ours, theirs) == common
    assert common_ids(ours.tobytes(), b"\0" * 8 + theirs.tobytes(), 2) == common
    assert common_ids(ours, theirs, len(theirs)) == 0
    with pytest.raises(ValueError, match="past the ids"):
        common_ids(ours, theirs, len(theirs) + 1)
