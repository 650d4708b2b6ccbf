"""Contexts of several attention splits: bits depend neither on who reads a split nor beside what.

One KV head and several threads, so that the splits of a lone row are shared out, and a window that
begins inside a split. The standard is one thread with portable kernels and the prompt in one piece,
which reads all splits of a row in turn.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from backends.batches import MemorySource, Piece, llama_source, make_runner, pages_for, poison, run

from invar import _native
from invar.backends.cpu.runner import CpuRunner
from invar.models import registry
from invar.weights.formats import QuantType

LENGTH = 3_333  # three splits of 1,024 tokens and a part of one
LAST = 5  # tokens that are decoded, across no border
ALONE = 2_046  # decoding from here on, a row enters its third split
WINDOWS = (None, 1_500)
VOCAB = 64


@cache
def source_of(window: int | None) -> MemorySource:
    formats = {"_norm.": QuantType.F32, ".weight": QuantType.Q8_0}
    source = llama_source(
        formats, hidden=64, heads=3, kv_heads=1, head_dim=32, feed_forward=64, vocab=VOCAB
    )
    source.metadata["llama.context_length"] = 4_096
    if window is not None:
        source.metadata["llama.attention.sliding_window"] = window
    return source


@cache
def prompt() -> list[int]:
    return np.random.default_rng(11).integers(0, VOCAB, LENGTH).tolist()


def runner_of(window: int | None, threads: int, isa: str = "") -> CpuRunner:
    source = source_of(window)
    limits = {"max_tokens_per_step": LENGTH, "max_model_len": LENGTH}
    runner = make_runner(registry.build(source), source, threads=threads, isa=isa, **limits)
    poison(runner)
    return runner


def read(runner: CpuRunner, first: int, last: int, rows: int, pages: list[int]) -> list[bytes]:
    """The logits of the last row of every step that reads tokens [first, last)."""
    logits = []
    for start in range(first, last, rows):
        piece = Piece(prompt()[start : min(last, start + rows)], start, pages)
        run(runner, piece)
        logits.append(runner.logits(1)[0].tobytes())
    return logits


@cache
def expected(window: int | None) -> dict[int, bytes]:
    """By position, of all that the tests look at."""
    runner, pages = runner_of(window, 1, "portable"), pages_for(LENGTH)
    wanted = [*range(ALONE, ALONE + LAST), *range(LENGTH - LAST, LENGTH)]
    run(runner, Piece(prompt(), 0, pages, wanted))
    logits = runner.logits(len(wanted))
    assert np.isfinite(logits).all()
    return {at: row.tobytes() for at, row in zip(wanted, logits, strict=True)}


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("isa", _native.cpu_info()["available_isas"])
def test_decode_behind_a_long_prompt(window: int | None, threads: int, isa: str) -> None:
    runner, pages = runner_of(window, threads, isa), pages_for(LENGTH, 3)
    want = expected(window)
    for first in (ALONE, LENGTH - LAST):
        read(runner, 0 if first == ALONE else ALONE + LAST, first, 700, pages)
        got = read(runner, first, first + LAST, 1, pages)
        assert got == [want[at] for at in range(first, first + LAST)]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("rows", [3, 33, 512])
def test_pieces_of_any_size(window: int | None, rows: int) -> None:
    """Units of several rows, split and whole: the last piece ends the prompt."""
    runner, pages = runner_of(window, 3), pages_for(LENGTH)
    first = LENGTH - 1_100 // rows * rows  # from inside the third split on
    read(runner, 0, first, 1_000, pages)
    assert read(runner, first, LENGTH, rows, pages)[-1] == expected(window)[LENGTH - 1]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("strangers", [1, 12])
def test_a_long_row_among_short_ones(window: int | None, strangers: int) -> None:
    """Only the long row is worth a split, and with enough strangers not even that one."""
    runner, pages = runner_of(window, 2), pages_for(LENGTH)
    read(runner, 0, LENGTH - 1, 1_111, pages)
    ids = prompt()[::-1]
    others = [
        Piece(ids[: 1 + other * 40], 0, pages_for(1 + other * 40, 120 + other * 20))
        for other in range(strangers)
    ]
    run(runner, *others, Piece(prompt()[-1:], LENGTH - 1, pages))
    assert runner.logits(strangers + 1)[strangers].tobytes() == expected(window)[LENGTH - 1]
