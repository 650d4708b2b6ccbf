"""Answers that go the same way share their masks, which stay those of the grammar."""

from __future__ import annotations

import numpy as np
import pytest

from grammar.vocabulary import TOKENS, compiler
from invar import StructuredOutputs
from invar.grammar import shared_masks
from invar.grammar.compiler import CompiledGrammar
from invar.grammar.guide import Guide


@pytest.fixture
def grammar() -> CompiledGrammar:
    return compiler().check(StructuredOutputs(regex="[ab]{30,40}c?").normalised())


def guide(grammar: CompiledGrammar, **options: object) -> Guide:
    return Guide(grammar, len(TOKENS), max_tokens=60, jumps=False, **options)  # type: ignore[arg-type]


def walk(one: Guide, rng: np.random.Generator, tokens: int) -> list[tuple[bytes, int]]:
    """(mask, token drawn) of each step."""
    steps = []
    for _ in range(tokens):
        one.write_mask()
        allowed = np.flatnonzero(np.unpackbits(one.mask[:-1].view(np.uint8), bitorder="little"))
        if not len(allowed) or one.finished:
            break
        token = int(rng.choice(allowed))
        steps.append((one.mask[:-1].tobytes(), token))
        one.take(token)
    return steps


def replayed(grammar: CompiledGrammar, steps: list[tuple[bytes, int]]) -> None:
    """Every mask is the one that a guide of its own, which shares nothing, has there."""
    alone = guide(grammar)
    alone._place = None
    for mask, token in steps:
        alone.write_mask()
        assert alone.mask is not None
        assert alone.mask[:-1].tobytes() == mask
        alone.take(token)


def test_shared_masks_are_those_of_the_grammar(
    grammar: CompiledGrammar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many walks over few places and fewer masks: kept, dropped and made again."""
    monkeypatch.setattr(shared_masks, "MASKS", 3)
    grammar.masks.left = 40
    for seed in range(30):
        replayed(grammar, walk(guide(grammar), np.random.default_rng(seed % 7), 45))
        assert len(grammar.masks.kept) <= 3
    assert grammar.masks.left == 0


def test_one_has_it_written_the_others_copy(grammar: CompiledGrammar) -> None:
    first, second = guide(grammar), guide(grammar)
    steps = walk(first, np.random.default_rng(1), 5)
    # One that writes nothing.
    second._matcher = type("Matcher", (), {"is_error": lambda self: False})()
    second.write_mask()
    assert second.mask is not None
    assert second.mask[:-1].tobytes() == steps[0][0]


def test_what_a_request_forbids_is_its_own(grammar: CompiledGrammar) -> None:
    allowed = np.zeros(-(-len(TOKENS) // 32) + 1, np.uint32)
    guide(grammar).write_mask()
    strict = guide(grammar, allowed=allowed)
    strict.write_mask()
    assert strict.mask is not None
    assert not strict.mask[:-1].any()
    free = guide(grammar)
    free.write_mask()
    assert free.mask is not None
    assert free.mask[:-1].any()
