"""An eager plan: the same bits, and the operation that made a NaN."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from engine.helpers import Client, request
from golden.tiny_models import TINY_MODELS, model_path

from backends.batches import (
    MIXED,
    MemorySource,
    Piece,
    llama_source,
    make_batch,
    make_runner,
    pages_for,
    poison,
    run,
)
from invar.backends.cpu.eager import time_lines
from invar.backends.cpu.runner import CpuRunner
from invar.engine.engine import Engine
from invar.models import registry
from invar.weights.gguf import GGUFFile

GUILTY = 77  # the token whose feed-forward overflows
CHANNEL = 5  # of the residual stream, where no other token has anything in layer 0


def overflowing_source() -> MemorySource:
    """Fp32 weights with which `GUILTY` alone exceeds fp32's range, in ffn_up of layer 0."""
    source = llama_source({})

    def weight(name: str) -> Any:
        return source.bytes[name].view(np.float32).reshape(source.tensors[name].shape)

    embedding = weight("token_embd.weight")
    embedding[:, CHANNEL] = 0
    embedding[GUILTY, CHANNEL] = 100
    weight("blk.0.attn_output.weight")[CHANNEL] = 0
    weight("blk.0.ffn_up.weight")[3, CHANNEL] = 3e38
    return source


@pytest.fixture(scope="module")
def eager() -> CpuRunner:
    source = overflowing_source()
    return make_runner(registry.build(source), source, eager=True)


@pytest.mark.parametrize("name", ["mixed", *TINY_MODELS])
def test_eager_and_replayed_are_equal_to_the_bit(name: str) -> None:
    source: Any = llama_source(MIXED) if name == "mixed" else GGUFFile(model_path(name))
    graph = registry.build(source)
    ids = np.random.default_rng(2).integers(0, graph.vocab_size, 75).tolist()

    def logits(eager: bool) -> bytes:
        runner = make_runner(graph, source, eager=eager)
        piece = Piece(ids, 0, pages_for(75))
        first = runner.submit(make_batch(runner, [piece])).result()
        assert not first.faults
        more = run(runner, Piece(ids[:1], 75, pages_for(76)), Piece(ids[:40], 0, [6, 7]))
        return runner.logits(2).tobytes() + first.logprobs.tobytes() + more.logprobs.tobytes()

    assert logits(True) == logits(False)


def test_the_first_bad_value_is_named_with_its_place(eager: CpuRunner) -> None:
    clean, bad = [1, 2, 3, 4], [9, 8, GUILTY, 7]
    result = run(eager, Piece(clean, 0, [0]), Piece(bad, 32, [1, 2]), Piece(bad, 0, [3]))
    assert set(result.faults) == {1, 2}
    assert "linear blk.0.ffn_up.weight (layer 0), at token 34" in result.faults[1]
    assert "linear blk.0.ffn_up.weight (layer 0), at token 2" in result.faults[2]


def test_memory_that_nobody_wrote_shows_in_attention(eager: CpuRunner) -> None:
    poison(eager)
    result = run(eager, Piece([1, 2, 3], 32, [5, 6]))
    assert result.finite.tolist() == [False]
    assert "attention after blk.0." in result.faults[0]


def test_bad_logits_of_one_row_among_many(eager: CpuRunner) -> None:
    """Behind take_rows a row is a logit row: the fault belongs to the token it was taken from."""
    ids = np.random.default_rng(3).integers(100, 320, 150).tolist()
    logits = Piece(ids, 0, pages_for(150), logit_rows=range(150))
    assert not run(eager, logits).faults
    source = overflowing_source()
    weight = source.bytes["output.weight"].view(np.float32).reshape(320, -1)
    weight[11] = np.nan
    runner = make_runner(registry.build(source), source, eager=True)
    batch = make_batch(runner, [Piece(ids[:70], 0, pages_for(70), logit_rows=[66, 69])])
    faults = runner.submit(batch).result().faults
    assert "linear output.weight, at token 66" in faults[0]


def test_a_request_fails_alone_and_says_where(
    eager: CpuRunner, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = {"a": [1, 2, 3], "bad": [9, 8, 7, GUILTY, 6], "b": [4, 5]}
    answers = {}
    for chunk in (64, 4):  # the NaN in the step of the logits, and in one before it
        client = Client(Engine(eager, poison_freed_pages=True, max_num_batched_tokens=chunk))
        client.add(*(request(name, ids, 6) for name, ids in prompts.items()))
        with caplog.at_level(logging.WARNING, "invar"):
            answers[chunk] = client.drain()
        assert set(client.errors) == {"bad"}
        assert "linear blk.0.ffn_up.weight (layer 0), at token 3" in client.errors["bad"]
        assert len(answers[chunk]["a"].token_ids) == len(answers[chunk]["b"].token_ids) == 6
    assert answers[64]["a"] == answers[4]["a"]
    assert sum("request bad: the first value" in line for line in caplog.messages) == 2


def test_every_operation_has_a_time(caplog: pytest.LogCaptureFixture) -> None:
    source = llama_source(MIXED)
    runner = make_runner(registry.build(source), source, eager=True)
    run(runner, Piece([1, 2, 3], 0, [0]))
    times = {time.name: time for time in runner.operation_times()}
    down = times["linear blk.1.ffn_down.weight"]
    assert (down.layer, down.calls) == (1, 1)
    assert down.nanoseconds > 0
    assert "quantize for linear blk.1.ffn_down.weight" in times
    assert "rope after blk.0.attn_k.weight" in times
    lines = time_lines(runner.operation_times())
    assert sum("2 calls  linear ffn_down.weight" in line for line in lines) == 1
    with caplog.at_level(logging.INFO, "invar"):
        runner.close()
    assert caplog.messages == lines


def test_replayed_plans_say_so_and_check_nothing() -> None:
    source = overflowing_source()
    runner = make_runner(registry.build(source), source)
    result = run(runner, Piece([9, 8, GUILTY], 0, [0]))
    assert result.finite.tolist() == [False]
    assert not result.faults
    assert runner.operation_times() == []
    assert "replayed every step" in runner.info.plan
    assert "192 rows" in runner.info.plan
