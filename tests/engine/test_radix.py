"""The native tree's border: what it refuses, and names of roots. What it does is tested with
`KVMemory` (test_prefix_cache.py), at random in native/tests/radix_test.cpp."""

from __future__ import annotations

import numpy as np
import pytest

from engine.scripted_runner import runner_info
from invar._native import RadixMatch
from invar.engine.kv import KVMemory


def memory() -> KVMemory:
    return KVMemory(
        runner_info(slabs=40, window=40),
        max_model_len=256,
        max_chunk=64,
        copy_pages=lambda group, sources, targets: None,
    )


def compute(kv: KVMemory, ids: np.ndarray, salt: str | None = None) -> int:
    """Runs a prompt; how much of it was there."""
    found = kv.open(ids, len(ids), len(ids), salt)
    assert found is not None
    slot, cached = found
    kv.advance(slot, len(ids))
    kv.give_back(slot)
    kv.check_integrity()
    return cached


def test_roots_have_the_name_of_their_salt() -> None:
    kv, ids = memory(), np.arange(70, dtype=np.int32)
    salts = [None, "", "a", "half a pair \ud83d", "\0", "\0\0"]
    for salt in salts:
        assert compute(kv, ids[:33], salt) == 0
    for salt in salts:
        assert kv.match(ids, 70, salt).tokens == 33


@pytest.mark.parametrize(
    ("own", "missing"),
    [
        ([2], [0]),  # of one group
        ([2, 1], [0, 0]),
        ([2, 3], [0, 0]),
        ([2, 2], [0]),
    ],
)
def test_pages_that_do_not_fit_their_ids_are_refused(own: list[int], missing: list[int]) -> None:
    kv = memory()
    node = kv.tree.hold(RadixMatch(), None)
    pages = [np.zeros(count, np.int32) for count in own]
    with pytest.raises(ValueError, match="a page of each group for each page of ids"):
        kv.tree.insert(node, np.zeros(64, np.int32), pages, missing)
    kv.tree.release(node)
    kv.check_integrity()


def test_what_are_no_ids_is_refused() -> None:
    kv = memory()
    with pytest.raises(ValueError, match="not whole int32"):
        kv.tree.match(None, b"12345")
    node = kv.tree.hold(RadixMatch(), None)
    for ids in (b"", bytes(4 * 33)):
        with pytest.raises(ValueError, match="with ids for one page"):
            kv.tree.insert_tail(node, ids, [0, 0])
    kv.tree.release(node)
    compute(kv, np.arange(100, dtype=np.int32))
    match = kv.tree.match(None, np.arange(96, dtype=np.int32))
    assert match.node is not None
    with pytest.raises(ValueError, match="has 2 pages"):
        kv.tree.pages_of(match.node, 0, np.zeros(2, np.int32), 0)
    with pytest.raises(ValueError, match="not one for each pool"):
        kv.tree.make_room([1])
