"""A context of 1,048,576 positions, to its last one, against the contract in double precision.

Of a model of one layer, K and V of a token follow from that token and its position alone. So the
pages of a million tokens are written by steps of short pieces that each see themselves only, and
what sees all of them is what is tested: the rows at the end. The reference makes the same K and V
of a table with a row for each token of the vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from backends.batches import MemorySource, Piece, llama_source, make_batch, make_runner, run
from models.memory_source import MemorySource as WritableSource

from invar import _native
from invar.backends.cpu.memory import kv_bytes
from invar.backends.cpu.runner import CpuRunner
from invar.backends.runner import PAGE_TOKENS
from invar.config import EngineConfig
from invar.engine.loader import load_engine_alone
from invar.engine.request import EngineRequest, FinishReason, Sampling, TokenLogprobs
from invar.graph.contract import round_kv
from invar.graph.functions import apply_rope, rms_norm
from invar.graph.graph import Graph
from invar.graph.interpreter import Interpreter, SequenceState
from invar.graph.operations import ApplyRope, KVFormat
from invar.graph.passes import with_kv_format
from invar.models import registry

LENGTH = 1 << 20
LAST = 5  # rows that see the whole context
ROWS, PIECE = 8192, 512  # of a step, and of a piece that sees itself alone
VOCAB, HIDDEN, HEAD_DIM = 64, 32, 16
WINDOW = 700
SHARP = 1.8
"""Of the norm before q and k: logits spread by about 3, so that some hundred of a million keys
count, and a wrong angle or a lost split moves what comes out."""

FP32_NOISE = 2e-5
"""Of the largest logit, as in `tests/backends/test_contract.py`; K that falls on the other side of
a rounding for it is one key in thousands and moves by 2^-9."""


@cache
def source_of(window: int | None = None) -> MemorySource:
    source = llama_source(
        {},
        hidden=HIDDEN,
        heads=2,
        kv_heads=1,
        head_dim=HEAD_DIM,
        feed_forward=64,
        vocab=VOCAB,
        layers=1,
    )
    source.metadata |= {"llama.context_length": LENGTH, "llama.rope.freq_base": 5e6}
    if window is not None:
        source.metadata["llama.attention.sliding_window"] = window
    norm = source.dequantize("blk.0.attn_norm.weight") * np.float32(SHARP)
    source.bytes["blk.0.attn_norm.weight"] = norm.view(np.uint8).reshape(1, -1)
    return source


@cache
def tokens() -> npt.NDArray[np.int32]:
    return np.random.default_rng(20).integers(0, VOCAB, LENGTH).astype(np.int32)


def graph_of(source: MemorySource, kv_format: KVFormat) -> Graph:
    return with_kv_format(registry.build(source), kv_format)


# ---------------------------------------------------------------- the reference


def table_of(source: MemorySource, part: str) -> npt.NDArray[np.float32]:
    """K or V before rope of every token of the vocabulary: `[VOCAB, HEAD_DIM]`."""
    epsilon = source.metadata["llama.attention.layer_norm_rms_epsilon"]
    embedded = source.dequantize("token_embd.weight").astype(np.float64)
    norm = source.dequantize("blk.0.attn_norm.weight").astype(np.float64)
    normed = rms_norm(embedded, norm, epsilon, 1).astype(np.float32).astype(np.float64)
    matrix = source.dequantize(f"blk.0.attn_{part}.weight").astype(np.float64)
    return (normed @ matrix.T).astype(np.float32)


def state_of(
    source: MemorySource, graph: Graph, ids: npt.NDArray[np.int32], first: int = 0, shift: int = 0
) -> SequenceState:
    """K and V of tokens from `first` on, zeros before; shift: of positions behind the middle."""
    ropes = {op.rope for op in graph.ops if isinstance(op, ApplyRope)}
    (rope,) = ropes
    positions = np.arange(first, len(ids))
    positions[positions >= LENGTH // 2] += shift
    k = table_of(source, "k").astype(np.float64)[ids[first:]]
    k = apply_rope(k, positions, 1, rope).astype(np.float32)
    (group,) = graph.groups
    state = SequenceState(len(ids))
    for cache_, rows in ((state.keys, k), (state.values, table_of(source, "v")[ids[first:]])):
        stored = round_kv(rows.reshape(-1, 1, HEAD_DIM), group.kv_format)
        behind = np.zeros((first, 1, HEAD_DIM), stored.dtype)
        cache_[group.name, 0] = np.concatenate([behind, stored])
    return state


def logits_behind(
    source: MemorySource, graph: Graph, state: SequenceState, ids: npt.NDArray[np.int32]
) -> npt.NDArray[np.float32]:
    """Of tokens that follow those of a state, `[tokens, VOCAB]`."""
    return np.asarray(Interpreter(graph, source, "contract").step(state, ids.tolist()))


@cache
def expected_of(kv_format: KVFormat) -> npt.NDArray[np.float32]:
    source = source_of()
    graph = graph_of(source, kv_format)
    state = state_of(source, graph, tokens()[:-LAST])
    return logits_behind(source, graph, state, tokens()[-LAST:])


def worst(found: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


# ---------------------------------------------------------------- the backend


def page_order() -> npt.NDArray[np.int32]:
    """Pages of the request in an order that is not that of the tokens."""
    return np.random.default_rng(4).permutation(LENGTH // PAGE_TOKENS).astype(np.int32)


def runner_of(kv_format: KVFormat, threads: int, isa: str = "") -> CpuRunner:
    source = source_of()
    graph = graph_of(source, kv_format)
    sizes = {"max_tokens_per_step": ROWS, "max_model_len": LENGTH}
    size = kv_bytes(graph, LENGTH, 1, ROWS)
    return make_runner(graph, source, threads=threads, isa=isa, kv_budget_bytes=size, **sizes)


@cache
def pages_before(kv_format: KVFormat) -> npt.NDArray[np.uint8]:
    """K and V of all tokens, page by page in their order, but NaN in the last page."""
    runner, pages = runner_of(kv_format, 2), page_order()
    for first in range(0, LENGTH - PAGE_TOKENS, ROWS):
        pieces = [
            Piece(
                tokens()[start : start + PIECE],
                0,
                pages[start // PAGE_TOKENS : (start + PIECE) // PAGE_TOKENS].tolist(),
            )
            for start in range(first, first + ROWS, PIECE)
        ]
        positions = np.arange(first, first + ROWS, dtype=np.int32)[None]
        runner.submit(replace(make_batch(runner, pieces), positions=positions)).result()
    runner.clear_pages(0, pages[-1:])
    (group,) = runner.info.groups
    found = np.empty((len(pages), group.page_bytes), np.uint8)
    runner.read_pages(0, pages, found)
    runner.close()
    return found


def last_rows(runner: CpuRunner, rows: int) -> npt.NDArray[np.float32]:
    """The logits of the last tokens, in steps of so many rows, after those of their page."""
    pages, found, begin = page_order().tolist(), [], LENGTH - PAGE_TOKENS
    run(runner, Piece(tokens()[begin : LENGTH - LAST], begin, pages))
    for start in range(LENGTH - LAST, LENGTH, rows):
        ids = tokens()[start : start + rows]
        run(runner, Piece(ids, start, pages, list(range(len(ids)))))
        found.append(runner.logits(len(ids)).copy())
    return np.concatenate(found)


@pytest.mark.parametrize("kv_format", [KVFormat.BF16, KVFormat.INT8])
def test_the_last_of_a_million_positions(kv_format: KVFormat) -> None:
    """And every way to compute it gives the same bits: alone, in one piece, threads, kernels."""
    ways = [(threads, "") for threads in (1, 2, 3)]
    ways += [(2, isa) for isa in _native.cpu_info()["available_isas"]]
    seen: set[bytes] = set()
    for threads, isa in ways:
        runner = runner_of(kv_format, threads, isa)
        runner.write_pages(0, page_order(), pages_before(kv_format))
        for rows in (1, LAST):
            found = last_rows(runner, rows)
            assert np.isfinite(found).all()
            assert worst(found, expected_of(kv_format)) < FP32_NOISE
            seen.add(found.tobytes())
        runner.close()
    assert len(seen) == 1


def test_the_tolerance_bites() -> None:
    """An angle that is one position off in the far half; a split at either end in other order."""
    source, expected = source_of(), expected_of(KVFormat.BF16)
    graph = graph_of(source, KVFormat.BF16)
    far = state_of(source, graph, tokens()[:-LAST], shift=1)
    assert worst(logits_behind(source, graph, far, tokens()[-LAST:]), expected) > 50 * FP32_NOISE
    near = state_of(source, graph, tokens()[:-LAST])
    for lost in (slice(0, 1024), slice(LENGTH - 2048, LENGTH - 1024)):
        state = SequenceState(near.length, dict(near.keys), dict(near.values))
        for kept, by in ((state.keys, 1), (state.values, 2)):
            ((place, rows),) = kept.items()
            kept[place] = rows.copy()
            kept[place][lost] = np.roll(rows[lost], by, axis=0)
        found = logits_behind(source, graph, state, tokens()[-LAST:])
        assert worst(found, expected) > 20 * FP32_NOISE


def test_an_engine_answers_up_to_the_last_position(tmp_path: Path) -> None:
    """Of layers with a window, whose pages behind it are given back: a million tokens are read
    whole, and the answer ends where the context does."""
    source = source_of(WINDOW)
    values = {name: source.dequantize(name) for name in source.tensors}
    path = WritableSource(source.metadata, values).write(tmp_path / "m.gguf")
    config = EngineConfig(
        model=str(path), max_num_seqs=1, max_num_batched_tokens=ROWS, num_threads=2
    )
    prompt = tokens()[: LENGTH - LAST]
    engine = load_engine_alone(config).engine
    assert engine.max_model_len == LENGTH
    engine.add_request(EngineRequest("r", prompt, LAST, Sampling(0, temperature=0, logprobs=3)))
    answer: list[TokenLogprobs] = []
    while engine.has_unfinished:
        for output in engine.step():
            answer += output.logprobs or ()
    assert output.finish_reason is FinishReason.LENGTH
    engine.check_integrity()
    engine.close()
    ids = np.array([*prompt, *(one.token_id for one in answer)], np.int32)
    assert len(ids) == LENGTH
    graph = graph_of(source, KVFormat.BF16)
    state = state_of(source, graph, ids[: -LAST - 1], first=LENGTH - 2 * WINDOW)
    logits = logits_behind(source, graph, state, ids[-LAST - 1 : -1]).astype(np.float64)
    for row, token in zip(logits, answer, strict=True):
        chances = row - np.log(np.exp(row - row.max()).sum()) - row.max()
        assert token.token_id == int(row.argmax())
        named = np.array([token.token_id, *token.top_ids])
        reported = np.array([token.logprob, *token.top_logprobs])
        assert np.abs(reported - chances[named]).max() < 2 * FP32_NOISE * np.abs(row).max()
