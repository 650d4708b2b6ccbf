"""The runner: feedback, padding, refusals, memory and fingerprint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from backends.batches import (
    MIXED,
    Piece,
    llama_runner,
    llama_source,
    make_batch,
    make_runner,
    pages_for,
    poison,
    run,
)
from invar import _native
from invar.backends.cpu.layout import Buffer, place_buffers, plan_slabs
from invar.backends.cpu.memory import DoesNotFit, plan_memory
from invar.backends.cpu.runner import CpuRunner
from invar.graph.operations import CacheGroup, KVFormat
from invar.graph.passes import with_kv_format
from invar.models import registry

IDS = np.random.default_rng(7).integers(0, 320, 70).tolist()


@pytest.fixture(scope="module")
def runner() -> CpuRunner:
    return llama_runner()


def test_feedback_rows_equal_explicit_tokens(runner: CpuRunner) -> None:
    def generate(feedback: bool) -> list[tuple[int, float]]:
        poison(runner)
        first = [Piece(IDS[:30], 0, [1, 0]), Piece(IDS[40:53], 0, [3, 2])]
        results = [run(runner, *first)]
        for step in range(5):
            last = results[-1].token_ids.tolist()
            pieces = [
                Piece(
                    [0 if feedback else last[index]],
                    length + step,
                    pages,
                    feedback={0: index} if feedback else {},
                )
                for index, (length, pages) in enumerate([(30, [1, 0]), (13, [3, 2])])
            ]
            results.append(run(runner, *pieces))
        return [pair for r in results for pair in zip(r.token_ids, r.logprobs, strict=True)]

    assert generate(True) == generate(False)


def test_padding_rows_change_nothing(runner: CpuRunner) -> None:
    batch = make_batch(runner, [Piece(IDS[:20], 0, [0])])
    plain = runner.submit(batch).result()
    padded = replace(
        batch,
        token_ids=np.concatenate([batch.token_ids, np.full(9, 99_999, np.int32)]),
        positions=np.pad(batch.positions, ((0, 0), (0, 9))),
    )
    assert runner.submit(padded).result().logprobs.tobytes() == plain.logprobs.tobytes()


def test_steps_without_logits_and_without_rows(runner: CpuRunner) -> None:
    batch = make_batch(runner, [Piece(IDS[:20], 0, [0])])
    silent = replace(
        batch,
        logit_rows=np.zeros(0, np.int32),
        sampling=make_batch(runner, []).sampling,
    )
    assert len(runner.submit(silent).result().token_ids) == 0
    empty = make_batch(runner, [])
    assert len(runner.submit(empty).result().token_ids) == 0


def test_more_logit_rows_than_a_tile(runner: CpuRunner) -> None:
    """Prompt log-probabilities: row r scores token r + 1, whatever tile it falls into."""
    ids = np.random.default_rng(8).integers(0, 320, 150).tolist()
    pages = pages_for(150)
    settings = {"score": True, "score_token": 17, "top_logprobs": 3}
    together = run(runner, Piece(ids, 0, pages, logit_rows=range(150), settings=settings))
    for row in (0, 63, 64, 127, 128, 149):
        alone = run(runner, Piece(ids[: row + 1], 0, pages, settings=settings))
        assert alone.logprobs[0] == together.logprobs[row]
        assert alone.top_ids[0].tolist() == together.top_ids[row].tolist()
        assert alone.ranks[0] == together.ranks[row]


def test_logprobs_and_ranks_are_those_of_the_logits(runner: CpuRunner) -> None:
    result = run(runner, Piece(IDS, 0, pages_for(70), settings={"top_logprobs": 4}))
    logits = runner.logits(1)[0].astype(np.float64)
    logprobs = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
    order = np.argsort(-logits, kind="stable")
    assert result.token_ids[0] == order[0]
    assert result.ranks[0] == 1
    assert result.top_ids[0].tolist() == order[:4].tolist()
    np.testing.assert_allclose(result.top_logprobs[0], logprobs[order[:4]], atol=1e-5)


def test_a_smaller_vocabulary_is_never_left() -> None:
    runner = llama_runner(vocab_size=50)
    hot = {"temperature": 5.0}
    rows = [hot | {"seed": seed} for seed in range(20)]
    for row in rows:
        assert run(runner, Piece(IDS[:9], 0, [0], settings=row)).token_ids[0] < 50


def test_nan_is_reported_for_its_row_alone(runner: CpuRunner) -> None:
    poison(runner)
    # The second piece says that 32 tokens lie in page 5; nobody wrote them.
    result = run(runner, Piece(IDS[:20], 0, [0]), Piece(IDS[:3], 32, [5, 6]))
    assert result.finite.tolist() == [True, False]


def test_a_mask_that_allows_one_token(runner: CpuRunner) -> None:
    result = run(runner, Piece(IDS[:9], 0, [0], settings={"allowed": [123], "temperature": 1.0}))
    assert result.token_ids.tolist() == [123]


def test_a_mask_that_is_not_ready_draws_nothing_and_disturbs_nobody(runner: CpuRunner) -> None:
    allowed = {"allowed": [123], "temperature": 1.0}
    pieces = (Piece(IDS[:9], 0, [0], settings=allowed), Piece(IDS[:7], 0, [1]))
    expected = run(runner, *pieces)
    made = make_batch(runner, pieces)
    (mask,) = made.sampling.masks
    mask[-1] = 0
    waiting = runner.submit(made).result()
    assert waiting.skipped.tolist() == [True, False]
    assert waiting.token_ids.tolist() == [0, expected.token_ids[1]]
    _native.publish_mask(mask)
    ready = runner.submit(made).result()
    assert not ready.skipped.any()
    assert ready.token_ids.tolist() == expected.token_ids.tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": np.full(20, 320, np.int32)}, r"token_ids\[0\] is 320"),
        ({"token_ids": np.full(20, -1, np.int32)}, r"token_ids\[0\] is -1"),
        ({"token_ids": np.zeros(20, np.int64)}, r"token_ids: expected a contiguous int32"),
        ({"kv_len": np.array([19], np.int32)}, r"kv_len\[0\]"),
        ({"query_start": np.array([0, 21], np.int32)}, r"query_start\[1\]"),
        ({"logit_rows": np.array([20], np.int32)}, r"logit_rows\[0\]"),
        ({"feedback": np.array([[0, 7]], np.int32)}, r"feedback\[0\] names sample 7"),
        ({"block_tables": (np.array([[10**6]], np.int32),)}, r"names page 1000000"),
        ({"block_tables": (np.zeros((1, 0), np.int32),)}, r"too few columns"),
        ({"block_tables": ()}, r"0 block tables"),
        ({"positions": np.full((1, 20), -3, np.int32)}, r"positions\[0\]"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(
    runner: CpuRunner, change: dict[str, Any], message: str
) -> None:
    good = make_batch(runner, [Piece(IDS[:20], 0, [0])])
    run(runner, Piece(IDS[:4], 0, [0]))
    with pytest.raises(ValueError, match=message):
        runner.submit(replace(good, **change))
    assert runner.submit(good).result().finite.all()


def test_too_many_tokens_are_refused(runner: CpuRunner) -> None:
    with pytest.raises(ValueError, match="193 tokens"):
        run(runner, Piece([1] * 193, 0, pages_for(193)))


def test_memory_is_what_was_planned() -> None:
    source = llama_source(MIXED)
    graph = registry.build(source)
    options: dict[str, Any] = {
        "max_tokens_per_step": 64,
        "max_sequences": 4,
        "max_model_len": 128,
        "kv_budget_bytes": 5 << 20,
        "threads": 1,
        "vocab_size": 320,
    }
    planned = plan_memory(graph, source, **options)
    runner = make_runner(graph, source, **options)
    assert runner.info.memory == planned.rows
    table = dict(planned.rows)
    assert table["KV cache"] == runner.info.slabs * runner.info.slab_bytes <= 5 << 20
    with pytest.raises(DoesNotFit, match="1,000 bytes"):
        plan_memory(graph, source, **(options | {"kv_budget_bytes": 1000}))


def test_fingerprint_is_of_the_build_not_of_the_machine() -> None:
    source = llama_source(MIXED)
    graph = registry.build(source)

    def of(**options: Any) -> str:
        return make_runner(graph, source, **options).info.fingerprint

    base = of()
    assert of(threads=1, isa="portable", max_tokens_per_step=7, kv_budget_bytes=9 << 20) == base
    assert of(max_model_len=64) != base
    formats = [with_kv_format(graph, kv_format) for kv_format in KVFormat]
    assert len({make_runner(one, source).info.fingerprint for one in formats}) == len(KVFormat)
    source.bytes["blk.1.ffn_norm.weight"][0, 3] ^= 1
    assert of() != base


def test_buffers_share_memory_only_when_their_lives_are_apart() -> None:
    rng = np.random.default_rng(0)
    buffers = []
    for _ in range(60):
        first = int(rng.integers(0, 40))
        width = int(rng.integers(1, 300))
        buffers.append(Buffer(width, 8, None, first, first + int(rng.integers(0, 6))))
    total = place_buffers(buffers)
    assert total < sum(buffer.size for buffer in buffers) / 3
    for a in buffers:
        assert a.offset % 64 == 0
        for b in buffers:
            apart_in_time = a.last < b.first or b.last < a.first
            apart_in_space = a.offset + a.size <= b.offset or b.offset + b.size <= a.offset
            assert a is b or apart_in_time or apart_in_space


def test_slabs_hold_whole_pages_of_every_group() -> None:
    groups = [CacheGroup("full", 3, 1, 256), CacheGroup("window", 15, 1, 256, 512)]
    slabs = plan_slabs(groups)
    for size, count in zip(slabs.page_bytes, slabs.pages_per_slab, strict=True):
        assert count >= 1
        assert size * count <= slabs.slab_bytes
        assert slabs.slab_bytes - size * count < slabs.slab_bytes / 10


def test_progress_advances(runner: CpuRunner) -> None:
    before = runner.progress
    run(runner, Piece(IDS[:20], 0, [0]))
    assert runner.progress > before


def test_progress_is_counted_where_others_see_it(runner: CpuRunner) -> None:
    counter = np.zeros(1, np.uint64)
    runner.count_progress_in(counter)
    run(runner, Piece(IDS[:20], 0, [0]))
    assert counter[0] == runner.progress > 0
    for wrong in (np.zeros(2, np.uint64), np.zeros(9, np.uint8)[1:].view(np.uint64)):
        with pytest.raises(ValueError, match="counter"):
            runner.count_progress_in(wrong)


def test_memory_is_zero_and_aligned() -> None:
    memory = _native.Memory(5_000_000)
    array = memory.array()
    assert not array.any()
    assert array.ctypes.data % (2 << 20) == 0
    with pytest.raises(ValueError, match="memory"):
        _native.Memory(-1)


def test_a_closed_runner_says_so() -> None:
    runner = llama_runner()
    runner.close()
    runner.close()
    with pytest.raises(RuntimeError, match="has been closed"):
        run(runner, Piece(IDS[:20], 0, [0]))


def test_pages_go_out_and_come_back(runner: CpuRunner) -> None:
    """Into other pages of another runner of the same model, which goes on as the first would."""
    other = llama_runner()
    poison(runner)
    poison(other)
    first = [Piece(IDS[:40], 0, [1, 3])]
    run(runner, *first)
    run(other, Piece(IDS[30:60], 0, [5]))
    for group, memory in enumerate(runner.info.groups):
        data = np.zeros((2, memory.page_bytes), np.uint8)
        runner.read_pages(group, np.array([1, 3]), data)
        other.write_pages(group, np.array([4, 2]), data)
        again = np.zeros_like(data)
        other.read_pages(group, np.array([4, 2]), again)
        assert (data == again).all()
        with pytest.raises(ValueError, match=r"expected \[1, \d+\]"):
            other.write_pages(group, np.array([4]), data)
        with pytest.raises(ValueError, match="is not one of"):
            other.read_pages(group, np.array([4, 1 << 20]), data)
    going_on = [
        run(one, Piece(IDS[40:50], 40, pages)) for one, pages in ((runner, [1, 3]), (other, [4, 2]))
    ]
    assert going_on[0].logprobs.tobytes() == going_on[1].logprobs.tobytes()


def test_a_checksum_is_what_it_says_and_sees_every_flip() -> None:
    odd, mask = 0x9E3779B97F4A7C15, (1 << 64) - 1

    def mix(lane: int, word: int) -> int:
        product = (lane ^ word) * odd & mask
        return (product << 32 | product >> 32) * odd & mask

    def reference(data: bytes) -> int:
        padded = data + bytes(-len(data) % 64)
        words = np.frombuffer(padded, "<u8").reshape(-1, 8).tolist()
        lanes = [odd * (i + 1) & mask for i in range(8)]
        for row in words:
            lanes = [mix(lane, word) for lane, word in zip(lanes, row, strict=True)]
        total = len(data)
        for lane in lanes:
            total = mix(total, lane)
        return total

    dice = np.random.default_rng(0)
    for size in (0, 1, 7, 8, 63, 64, 65, 128, 1000):
        data = dice.integers(0, 256, size).astype(np.uint8)
        assert _native.checksum(data) == reference(data.tobytes())
    seen = {_native.checksum(data)}
    for bit in range(8 * len(data)):
        flipped = data.copy()
        flipped[bit // 8] ^= 1 << bit % 8
        seen.add(_native.checksum(flipped))
    assert len(seen) == 8 * len(data) + 1


@pytest.mark.parametrize("kv_format", ["bf16", "fp16", "int8"])
def test_pages_are_the_same_bytes_on_every_instruction_set(kv_format: KVFormat) -> None:
    """So what one machine has stored, another one of the same build may read."""
    source = llama_source(MIXED)
    graph = with_kv_format(registry.build(source), kv_format)
    seen = set()
    for isa in _native.cpu_info()["available_isas"]:
        for threads, cuts in ((1, [70]), (2, [5, 33, 70])):
            one = make_runner(graph, source, isa=isa, threads=threads)
            begin = 0
            for end in cuts:
                run(one, Piece(IDS[begin:end], begin, [3, 1, 4]))
                begin = end
            out = np.zeros((2, one.info.groups[0].page_bytes), np.uint8)
            one.read_pages(0, np.array([3, 1]), out)
            seen.add(out.tobytes())
    assert len(seen) == 1


def test_a_row_reads_the_experts_it_uses() -> None:
    dense = llama_runner({}).info.work
    source = llama_source({}, experts=8)
    mixed = make_runner(registry.build(source), source).info.work
    assert dense is not None
    assert mixed is not None
    assert dense.weights_read(1) == dense.weights_read(99) == dense.weight_bytes
    assert mixed.expert_bytes == 2 * 8 * 3 * 512 * 256 * 4
    others = mixed.weight_bytes - mixed.expert_bytes
    assert mixed.weights_read(1) == others + mixed.expert_bytes / 4
    assert mixed.weights_read(2) == others + mixed.expert_bytes * (1 - 0.75**2)
    # 2 of 8 experts, and the router
    assert mixed.row_ops["fp32"] == dense.row_ops["fp32"] + 2 * (2 * 3 * 512 * 256 + 2 * 8 * 256)
