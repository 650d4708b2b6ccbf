"""Every number format × rows of a step × threads × instruction set: the same bits of logits.

A small model whose matrices are all of one format reads a prompt of 515 tokens in pieces of M rows
(small ones from token 448 on). Its last logits must be those of one thread with portable kernels in
one chunk. The AVX-512 column runs where the machine has it, or over emulated intrinsics
in a build with -DINVAR_EMULATE_AVX512=ON.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from backends.batches import (
    MemorySource,
    Piece,
    llama_source,
    make_runner,
    pages_for,
    poison,
    run,
)

from invar import _native
from invar.backends.cpu.formats import WEIGHT_FORMATS
from invar.backends.cpu.runner import CpuRunner
from invar.models import registry
from invar.weights.formats import QuantType

SMALL, LARGE = (1, 2, 3, 6, 7, 16), (64, 512)  # rows of a step
THREADS = (1, 2)
LENGTH = 515  # 512 rows and a few more: across pages, tiles and row blocks
SHARED = 448  # tokens in whole pages that steps of few rows find computed
VOCAB = 64


@cache
def source_of(kind: QuantType) -> MemorySource:
    formats = {"_norm.": QuantType.F32, ".weight": kind}
    return llama_source(formats, layers=1, feed_forward=256, vocab=VOCAB)


@cache
def prompt() -> list[int]:
    return np.random.default_rng(5).integers(0, VOCAB, LENGTH).tolist()


def runner_of(kind: QuantType, threads: int, isa: str) -> CpuRunner:
    source = source_of(kind)
    limits = {"max_tokens_per_step": LENGTH, "max_model_len": LENGTH}
    runner = make_runner(registry.build(source), source, threads=threads, isa=isa, **limits)
    poison(runner)
    return runner


def last_logits(runner: CpuRunner, rows: int, pages: list[int], start: int = 0) -> bytes:
    for at in range(start, LENGTH, rows):
        run(runner, Piece(prompt()[at : at + rows], at, pages))
    logits = runner.logits(1)[0]
    assert np.isfinite(logits).all()
    return logits.tobytes()


@cache
def expected(kind: QuantType) -> bytes:
    return last_logits(runner_of(kind, 1, "portable"), LENGTH, pages_for(LENGTH))


@pytest.mark.parametrize("isa", _native.cpu_info()["available_isas"])
@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("kind", sorted(WEIGHT_FORMATS), ids=lambda kind: kind.name)
def test_equal_bits(kind: QuantType, threads: int, isa: str) -> None:
    runner = runner_of(kind, threads, isa)
    shared = pages_for(SHARED)
    run(runner, Piece(prompt()[:SHARED], 0, shared))
    for number, rows in enumerate(SMALL + LARGE, start=1):
        own = pages_for(LENGTH, number * 20)
        if rows in SMALL:
            found = last_logits(runner, rows, shared + own[len(shared) :], SHARED)
        else:
            found = last_logits(runner, rows, own)
        assert found == expected(kind), f"{rows} rows"


@pytest.mark.parametrize("kind", sorted(WEIGHT_FORMATS), ids=lambda kind: kind.name)
def test_another_prompt_has_other_bits(kind: QuantType) -> None:
    """The comparison above can fail: one token at the start moves the last logits."""
    runner, ids = runner_of(kind, 1, ""), prompt()
    run(runner, Piece([(ids[0] + 1) % VOCAB, *ids[1:]], 0, pages_for(LENGTH)))
    assert runner.logits(1)[0].tobytes() != expected(kind)
