"""A sequence is the same in one chunk, in many, token by token, alone and beside others."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from golden.tiny_models import TINY_MODELS, Golden, load_golden, model_path
from models.quantized import mixed_formats

from invar.graph.graph import GraphError
from invar.graph.interpreter import Interpreter, Mode, SequenceInput
from invar.models.registry import build
from invar.weights.gguf import GGUFFile

Logits = npt.NDArray[np.floating]

# numpy's matrix product may add in another order for another number of rows: a few times 2^-52 of
# the largest logit in exact mode. In contract mode an fp32 rounding can go the other way, and with
# it a bf16 of attention or a code: each is 2^-9 of one element among dozens.
CHUNK_TOLERANCE: dict[Mode, float] = {"exact": 1e-13, "contract": 1e-3}


def chunked(interpreter: Interpreter, token_ids: list[int], sizes: list[int]) -> Logits:
    state = interpreter.new_sequence()
    parts, start = [], 0
    for size in sizes:
        parts.append(interpreter.step(state, token_ids[start : start + size]))
        start += size
    assert start == len(token_ids) == state.length
    return np.concatenate(parts)


@pytest.fixture(params=TINY_MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["exact", "contract"])
def interpreter(name: str, request: pytest.FixtureRequest) -> Interpreter:
    source = GGUFFile(model_path(name))
    return Interpreter(build(source), source, request.param)


@pytest.fixture
def golden(name: str) -> Golden:
    return load_golden(name)


@pytest.mark.parametrize(
    "sizes", [[48], [1] * 48, [7] * 6 + [6], [16, 16, 16], [47, 1], [1, 40, 7]]
)
def test_any_chunks_give_the_same_logits(
    interpreter: Interpreter, golden: Golden, sizes: list[int]
) -> None:
    whole = interpreter.step(interpreter.new_sequence(), golden.token_ids)
    parts = chunked(interpreter, golden.token_ids, sizes)
    tolerance = CHUNK_TOLERANCE[interpreter.mode] * np.abs(whole).max()
    np.testing.assert_allclose(parts, whole, rtol=0, atol=tolerance)


def test_sequences_in_one_step_do_not_meet(interpreter: Interpreter, golden: Golden) -> None:
    ids = golden.token_ids
    alone = interpreter.step(interpreter.new_sequence(), ids)
    first, second = interpreter.new_sequence(), interpreter.new_sequence()
    interpreter.step(first, ids[:20])
    together = interpreter.run([SequenceInput(second, ids[:33]), SequenceInput(first, ids[20:])])
    tolerance = CHUNK_TOLERANCE[interpreter.mode] * np.abs(alone).max()
    np.testing.assert_allclose(together[:33], alone[:33], rtol=0, atol=tolerance)
    np.testing.assert_allclose(together[33:], alone[20:], rtol=0, atol=tolerance)


def test_another_token_before_changes_the_logits(interpreter: Interpreter, golden: Golden) -> None:
    """The comparisons above can fail: what is cached matters."""
    ids = golden.token_ids
    other = [*ids[:-2], (ids[-2] + 1) % 256, ids[-1]]
    logits = [interpreter.step(interpreter.new_sequence(), ids)[-1] for ids in (ids, other)]
    assert np.abs(logits[0] - logits[1]).max() > 0.01


def test_only_the_rows_asked_for(interpreter: Interpreter, golden: Golden) -> None:
    whole = interpreter.step(interpreter.new_sequence(), golden.token_ids)
    entry = SequenceInput(interpreter.new_sequence(), golden.token_ids)
    some = interpreter.run([entry], logit_rows=[47, 3])
    assert some.shape == (2, interpreter.graph.vocab_size)
    tolerance = CHUNK_TOLERANCE[interpreter.mode] * np.abs(whole).max()
    np.testing.assert_allclose(some, whole[[47, 3]], rtol=0, atol=tolerance)


@pytest.mark.parametrize("token", [-1, 10_000])
def test_a_token_outside_the_vocabulary_is_refused(interpreter: Interpreter, token: int) -> None:
    with pytest.raises(GraphError, match=f"token id {token} is not in"):
        interpreter.step(interpreter.new_sequence(), [1, token])


def test_an_empty_step_is_refused(interpreter: Interpreter) -> None:
    with pytest.raises(GraphError, match="no tokens"):
        interpreter.step(interpreter.new_sequence(), [])


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_large_weights_are_read_in_slices(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = mixed_formats(architecture, layers=2)
    graph = build(source)
    whole = Interpreter(graph, source)
    expected = whole.step(whole.new_sequence(), [1, 2, 3])
    monkeypatch.setattr("invar.graph.interpreter.SLICE_VALUES", 300 * 100)
    sliced = Interpreter(graph, source)
    logits = sliced.step(sliced.new_sequence(), [1, 2, 3])
    np.testing.assert_allclose(logits, expected, rtol=1e-12)
