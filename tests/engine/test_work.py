"""What steps are said to compute and to move, against sums over single tokens."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from golden.tiny_models import model_path

from invar.backends.runner import GroupMemory, ModelWork
from invar.config import EngineConfig
from invar.engine.loader import load_engine
from invar.engine.sampling_params import SamplingParams
from invar.engine.work import LIMIT_ROUNDS, Work
from invar.observe.catalogue import STEP_ROW_BOUNDS, step_rows_name
from invar.weights.gguf import GGUFFile

MODEL = ModelWork(
    row_ops={"int8": 1000, "fp32": 3},
    logit_ops={"int8": 70},
    attention_ops=(8, 20),
    weight_bytes=5000,
)
GROUPS = (GroupMemory("full", 320, 4, None), GroupMemory("window", 640, 4, 5))


@dataclass
class Machine:
    info: Any
    asked: list[str]

    def machine_limit(self, name: str, seconds: float) -> float:
        self.asked.append(name)
        return 100.0 - len(self.asked)


def work_of(model: ModelWork | None = MODEL) -> tuple[Work, Machine]:
    machine = Machine(SimpleNamespace(work=model, groups=GROUPS), [])
    return Work(machine), machine  # type: ignore[arg-type]


def batch(chunks: list[tuple[int, int]], logit_rows: int) -> Any:
    """chunks: of each request, the tokens ``[start, end)`` that run."""
    rows = [end - start for start, end in chunks]
    return SimpleNamespace(
        token_ids=np.zeros(sum(rows), np.int32),
        query_start=np.cumsum([0, *rows], dtype=np.int32),
        kv_len=np.array([end for _, end in chunks], np.int32),
        logit_rows=np.zeros(logit_rows, np.int32),
    )


CASES = [
    ("prefill", [(0, 7)], 1),
    ("prefill", [(0, 3), (4, 40)], 0),
    ("decode", [(11, 12), (2, 3), (100, 101)], 3),
    ("mixed", [(11, 12), (3, 9)], 1),
]


@pytest.mark.parametrize(("phase", "chunks", "logit_rows"), CASES)
def test_against_sums_over_tokens(
    phase: str, chunks: list[tuple[int, int]], logit_rows: int
) -> None:
    work, _ = work_of()
    work.ran(batch(chunks, logit_rows), 0.5)
    rows = [token for start, end in chunks for token in range(start, end)]
    attention = read = written = 0.0
    for group, each in zip(GROUPS, MODEL.attention_ops, strict=True):
        window = group.window or 10**9
        attention += each * sum(min(token + 1, window) for token in rows)
        written += group.page_bytes / 32 * len(rows)
        for start, end in chunks:
            seen = {
                t for row in range(start, end) for t in range(max(0, row - window + 1), row + 1)
            }
            read += group.page_bytes / 32 * len(seen)
    totals = {name: value for name, value in work.totals().items() if value}
    assert totals == {
        step_rows_name(min(b for b in STEP_ROW_BOUNDS if b >= len(rows))): 1,
        "rows": len(rows),
        f"{phase}_steps": 1,
        f"{phase}_seconds": 0.5,
        f"{phase}_rows": len(rows),
        f"{phase}_sequences": len(chunks),
        f"{phase}_int8_ops": 1000 * len(rows) + 70 * logit_rows,
        f"{phase}_fp32_ops": 3 * len(rows),
        f"{phase}_bf16_ops": attention,
        f"{phase}_read_bytes": 5000 + read,
        f"{phase}_written_bytes": written,
        "ops": 1003 * len(rows) + 70 * logit_rows + attention,
        "read_bytes": 5000 + read,
        "written_bytes": written,
    }


def test_the_highest_of_some_slices_is_the_limit() -> None:
    work, machine = work_of()
    while work.measure_limit():
        pass
    assert sorted(machine.asked) == sorted(["read", "int8", "bf16", "fp32"] * LIMIT_ROUNDS)
    assert work.totals()["peak_read_bytes"] == 99
    assert {"peak_int8_ops", "peak_bf16_ops", "peak_fp32_ops"} < work.totals().keys()
    assert not work.measure_limit()


def test_without_knowledge_of_the_model_steps_are_counted() -> None:
    work, machine = work_of(None)
    work.ran(batch([(0, 7)], 1), 0.5)
    totals = {name: value for name, value in work.totals().items() if value}
    assert totals == {
        "prefill_steps": 1, "prefill_seconds": 0.5, "prefill_rows": 7, "prefill_sequences": 1,
        "steps_of_8_rows": 1, "rows": 7,
    }  # fmt: skip
    assert not work.measure_limit()
    assert not machine.asked


@pytest.mark.parametrize("name", ["llama_gqa", "gemma3_pattern6"])
def test_a_model_by_its_file(name: str) -> None:
    path = str(model_path(name))
    model = load_engine(EngineConfig(model=path, kv_cache_memory_bytes=64 << 20))
    try:
        info = model.info
        assert info.work is not None
        with GGUFFile(path) as source:
            shapes = {n: t.shape for n, t in source.tensors.items() if len(t.shape) == 2}
        # Every matrix but the one that is looked up; it is also the head where there is no other.
        embedding = shapes.pop("token_embd.weight")
        head = shapes.pop("output.weight", embedding)
        products = sum(2 * rows * columns for rows, columns in shapes.values())
        assert sum(info.work.row_ops.values()) == products
        assert sum(info.work.logit_ops.values()) == 2 * head[0] * head[1]
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        (request,) = model.door.resolve("r", np.arange(3, 40, dtype=np.int32), params)
        model.engine.add_request(request)
        while model.engine.has_unfinished:
            model.engine.step()
        assert model.engine.rest()  # a limit has been measured
        stats = model.engine.stats()
        rows = sum(stats.work[f"{phase}_rows"] for phase in ("prefill", "decode", "mixed"))
        assert rows == 37 + 3
        assert stats.work["decode_steps"] == 3
        assert stats.work["peak_read_bytes"] > 0
        assert stats.prompt_computed == 37
    finally:
        model.close()


def test_b85_a_preempted_prompt_counts_once() -> None:
    config = EngineConfig(model=str(model_path("llama_gqa")), kv_cache_memory_bytes=64 << 20)
    model = load_engine(config)
    engine, params = model.engine, SamplingParams(max_tokens=6, ignore_eos=True)
    try:
        (request,) = model.door.resolve("r", np.arange(3, 40, dtype=np.int32), params)
        engine.add_request(request)
        outputs = engine.step() + engine.step()
        engine.scheduler.preempt(engine.states[request.id])
        engine.reset_prefix_cache()  # all of it is computed again
        while engine.has_unfinished:
            outputs += engine.step()
        told = [output.timing.get("preemptions", 0) for output in outputs]
        assert told == [0, 0, 1, 1, 1, 1]
        stats = engine.stats()
        assert (stats.prompt_computed, stats.prompt_from_memory, stats.preemptions) == (37, 0, 1)
        assert stats.prompt_tokens == 2 * 37  # rows, which were run twice
    finally:
        model.close()
