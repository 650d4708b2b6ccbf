"""Pages and slabs."""

from __future__ import annotations

import numpy as np
import pytest

from engine.scripted_runner import runner_info
from invar.backends.runner import PAGE_TOKENS
from invar.engine.kv import KVMemory


def memory(max_chunk: int = 16, **sizes: int) -> KVMemory:
    info = runner_info(**sizes)
    return KVMemory(
        info, max_model_len=info.max_model_len, max_chunk=max_chunk, copy_pages=no_copies
    )


def no_copies(group: int, sources: np.ndarray, targets: np.ndarray) -> None:
    raise AssertionError("nothing of the kind was computed before")


def opened(kv: KVMemory, tokens: int) -> int | None:
    """A slot for made-up ids that no other request shares."""
    ids = np.random.default_rng(len(kv.free_slots)).integers(0, 1 << 30, 256).astype(np.int32)
    found = kv.open(ids, tokens)
    return None if found is None else found[0]


def test_pages_lie_in_the_slabs_they_are_numbered_by() -> None:
    kv = memory(slabs=4, pages_per_slab=3)
    slot = opened(kv, 4 * PAGE_TOKENS)
    assert slot is not None
    pages = kv.tables[0][slot, :4].tolist()
    assert sorted(pages) == [0, 1, 2, 3]
    kv.check_integrity()


def test_a_slab_comes_back_when_all_its_pages_have() -> None:
    kv = memory(slabs=2, pages_per_slab=2)
    first, second = opened(kv, PAGE_TOKENS), opened(kv, PAGE_TOKENS)
    assert first is not None
    assert second is not None
    assert kv.arbiter.num_free == 1
    kv.give_back(first)
    assert kv.arbiter.num_free == 1
    kv.give_back(second)
    assert kv.arbiter.num_free == 2
    assert kv.usage == 0
    kv.check_integrity()


def test_memory_that_is_short_takes_nothing() -> None:
    kv = memory(slabs=3)
    slot = opened(kv, 2 * PAGE_TOKENS)
    assert slot is not None
    assert opened(kv, 2 * PAGE_TOKENS) is None
    assert not kv.extend(slot, 4 * PAGE_TOKENS)
    assert kv.usage == pytest.approx(2 / 3)
    assert kv.extend(slot, 3 * PAGE_TOKENS)
    kv.check_integrity()


def test_slots_are_as_many_as_sequences() -> None:
    kv = memory(slabs=9, max_sequences=2)
    assert {opened(kv, 1), opened(kv, 1)} == {0, 1}
    assert opened(kv, 1) is None


def test_entries_behind_the_window_name_a_page_that_may_be_read() -> None:
    kv = memory(slabs=20, window=40)
    slot = opened(kv, 100)
    assert slot is not None
    held = kv.held[slot].groups[1]
    kv.advance(slot, 110)
    assert kv.extend(slot, 126)  # sees tokens 71 and later: pages 0 and 1 are gone
    assert (held.first, held.end) == (2, 4)
    table = kv.tables[1][slot]
    assert table[0] == table[1] == table[2]
    assert kv.held[slot].groups[0].first == 0
    kv.check_integrity()
    [full, window] = kv.block_tables(np.array([slot]), 126)
    assert full.shape == window.shape == (1, 4)


def test_freed_pages_are_reported_before_anyone_can_have_them() -> None:
    freed: list[tuple[int, list[int]]] = []
    info = runner_info(slabs=4)
    kv = KVMemory(
        info,
        max_model_len=128,
        max_chunk=8,
        copy_pages=no_copies,
        on_free=lambda group, pages: freed.append((group, pages.tolist())),
    )
    slot = opened(kv, 70)
    assert slot is not None
    pages = kv.tables[0][slot, :3].tolist()
    kv.give_back(slot)
    assert freed == [(0, pages)]


def test_capacity_counts_whole_slabs_of_every_group() -> None:
    assert memory(slabs=4).capacity_tokens == 128
    assert memory(slabs=4, pages_per_slab=2).capacity_tokens == 256
    # The window group never holds more than pages of 40 + 16 − 1 tokens: 3, in two slabs.
    kv = memory(slabs=6, window=40, window_pages_per_slab=2)
    assert kv.capacity_tokens == 128
    assert memory(slabs=1, window=40).capacity_tokens == 0


def test_check_integrity_sees_what_is_wrong() -> None:
    for harm in ("lost", "doubled", "slab", "slot"):
        kv = memory(slabs=6, pages_per_slab=2)
        slot = opened(kv, 3 * PAGE_TOKENS)
        assert slot is not None
        if harm == "lost":
            kv.held[slot].groups[0].end -= 1
        elif harm == "doubled":
            kv.tables[0][slot, 0] = kv.tables[0][slot, 1]
        elif harm == "slab":
            kv.arbiter.give_back(0)
        else:
            kv.free_slots.append(slot)
        with pytest.raises(AssertionError):
            kv.check_integrity()


@pytest.mark.parametrize("window", [1, 2, 18, 31, 32, 33, 34, 50, 64])
@pytest.mark.parametrize("rows", [1, 5, 16])
def test_what_a_step_sees_is_held_and_little_else(window: int, rows: int) -> None:
    """A row at position p sees ``p - window + 1 … p``; every page of that is held."""
    for start in range(0, PAGE_TOKENS, 3):
        kv = memory(slabs=40, window=window, max_chunk=rows)
        slot = opened(kv, 1)
        assert slot is not None
        for computed in range(start, 250 - rows, rows):
            kv.advance(slot, computed)
            assert kv.extend(slot, computed + rows)
            held = kv.held[slot].groups[1]
            assert held.first * PAGE_TOKENS <= max(0, computed - window + 1)
            assert computed + rows <= held.end * PAGE_TOKENS
            if computed - start > window + PAGE_TOKENS:
                assert held.end - held.first <= (window + rows - 2 + 31) // PAGE_TOKENS + 1
        kv.check_integrity()
