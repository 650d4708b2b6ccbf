"""Memory is planned with the numbers that the runner then uses."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from golden.tiny_models import model_path
from models.quantized import WINDOW, float_model

from engine.helpers import request, run
from invar.backends.cpu import memory
from invar.backends.cpu.layout import plan_slabs
from invar.backends.cpu.memory import kv_bytes
from invar.backends.cpu.runner import CpuRunner
from invar.config import EngineConfig
from invar.engine import budget, loader
from invar.engine.engine import Engine
from invar.engine.loader import load_engine
from invar.models import registry
from invar.weights.gguf import GGUFFile

TINY = str(model_path("gemma3_pattern6"))


@pytest.mark.parametrize("threads", [None, 1, 3])
def test_workspaces_are_planned_for_the_threads_that_run(
    threads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[dict[str, Any]] = []
    plan_memory = budget.plan_memory

    def spy(*given: Any, **sizes: Any) -> Any:
        planned.append(sizes)
        return plan_memory(*given, **sizes)

    monkeypatch.setattr(budget, "plan_memory", spy)
    monkeypatch.setattr(budget, "usable_threads", lambda: 4)
    model = load_engine(EngineConfig(model=TINY, num_threads=threads, max_num_seqs=2))
    runner = model.engine.runner
    assert isinstance(runner, CpuRunner)
    assert planned[0]["threads"] == (threads or 4) == runner.plan_sizes.shape.threads
    model.close()


@pytest.mark.parametrize("options", [{}, {"kv_cache_memory_bytes": 64 << 20}])
def test_a_start_lowers_the_graph_once(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes as long as all else that plans."""
    lowered: list[Any] = []
    lower = memory.lower

    def spy(*given: Any) -> Any:
        lowered.append(lower(*given))
        return lowered[-1]

    monkeypatch.setattr(memory, "lower", spy)
    model = load_engine(EngineConfig(model=TINY, max_num_seqs=2, **options))
    (only,) = lowered
    runner = model.engine.runner
    assert isinstance(runner, CpuRunner)
    assert runner.plan_sizes.lowered is only
    model.close()


def test_no_more_threads_run_than_there_are_cores(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(budget, "usable_threads", lambda: 2)
    assert [budget.running_threads(wanted) for wanted in (None, 1, 2)] == [2, 1, 2]
    assert not caplog.records
    assert budget.running_threads(12) == 2
    (record,) = caplog.records
    assert "12 threads are more than the 2 cores" in record.getMessage()


@pytest.mark.parametrize("chunk", [1, 33, 512])
@pytest.mark.parametrize("tokens", [1, 32, 33, 500, 2000])
def test_a_request_runs_in_the_bytes_that_are_planned_for_it(tokens: int, chunk: int) -> None:
    """One definition of the peak: what the plan counts is what the engine's memory asks for."""
    source = float_model("gemma3", layers=4)
    graph = registry.build(source)
    assert [group.window for group in graph.groups] == [None, WINDOW]
    size = kv_bytes(graph, tokens, 1, chunk)

    def capacity(budget_bytes: int) -> int:
        sizes = {"max_tokens_per_step": chunk, "max_sequences": 1, "max_model_len": 4000}
        runner = CpuRunner(graph, source, **sizes, kv_budget_bytes=budget_bytes, threads=1)
        engine = Engine(runner)
        engine.close()
        return engine.kv_capacity_tokens

    slab = plan_slabs(graph.groups).slab_bytes
    assert capacity(size) >= tokens
    if size - slab >= 2 * slab:
        assert capacity(size - slab) < tokens


def test_a_window_model_keeps_the_context_that_its_pages_hold(
    tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path = float_model("gemma3", layers=12).write(tmp_path / "window.gguf")
    with caplog.at_level(logging.WARNING):
        wide = load_engine(EngineConfig(model=str(path), max_num_seqs=1, num_threads=1))
    size = wide.info.slabs * wide.info.slab_bytes
    wide.close()
    # As much as the one request needs: nothing is lowered or refused.
    for length in (None, 4096):
        exact = load_engine(
            EngineConfig(
                model=str(path),
                max_num_seqs=1,
                num_threads=1,
                kv_cache_memory_bytes=size,
                max_model_len=length,
            )
        )
        assert exact.door.max_model_len == exact.engine.kv_capacity_tokens == 4096
        exact.close()
    assert "lowered" not in caplog.text
    graph = registry.build(float_model("gemma3", layers=12))
    in_full = kv_bytes(graph, 4096, 1, max_chunk=4096)
    assert size < 0.75 * in_full


@pytest.mark.parametrize("fits", [True, False])
def test_the_file_stays_in_the_page_cache_where_it_fits(
    fits: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dropped = []
    drop = GGUFFile.drop_from_page_cache
    monkeypatch.setattr(GGUFFile, "drop_from_page_cache", lambda f: (dropped.append(f), drop(f)))
    config = EngineConfig(model=TINY, max_num_seqs=2, kv_cache_memory_bytes=64 << 20)
    planned = sum(size for _, size in load_engine(config).info.memory)
    assert not dropped
    file_bytes = Path(TINY).stat().st_size
    monkeypatch.setattr(loader, "available_memory", lambda: planned + file_bytes - (not fits))
    with caplog.at_level(logging.INFO, "invar"):
        model = load_engine(config)
    assert len(dropped) == (not fits)
    assert any("leaves the page cache" in line for line in caplog.messages) == (not fits)
    # The embedding is still read where it lies in the file.
    assert len(run(model.engine, request("a", [3, 1, 4], 4))["a"].token_ids) == 4
    model.close()
