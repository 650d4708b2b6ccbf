"""Law 1 at the runner: the bits of a row's logits depend on its own request alone."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from typing import Any

import numpy as np
import pytest
from golden.tiny_models import model_path

from backends.batches import (
    MIXED,
    MIXED_EXPERTS,
    Piece,
    llama_source,
    make_runner,
    pages_for,
    poison,
    run,
)
from invar import _native
from invar.backends.cpu.runner import CpuRunner
from invar.graph.operations import KVFormat
from invar.graph.passes import with_kv_format
from invar.models import registry
from invar.weights.formats import QuantType
from invar.weights.gguf import GGUFFile

MODELS = (
    "mixed",
    "float",
    "experts",
    "gemma3_pattern6",
    "mistral_window",
    "qwen2_moe",
    "gpt_oss",
    "llama4",
    "deepseek_v3",
)
KV_FORMATS = ("float fp16", "mixed int8", "gemma3_pattern6 int8")  # K and V not in bf16
LENGTH = 83  # across pages, tiles and chunks


@cache
def source_of(model: str) -> Any:
    model = model.split()[0]
    if model == "mixed":
        return llama_source(MIXED)
    if model == "experts":
        return llama_source(MIXED_EXPERTS, experts=5)
    if model == "float":
        return llama_source({"attn_q": QuantType.F16, "ffn_up": QuantType.BF16})
    return GGUFFile(model_path(model))


def runner_of(model: str, **options: Any) -> CpuRunner:
    source, graph = source_of(model), registry.build(source_of(model))
    for kv_format in model.split()[1:]:
        graph = with_kv_format(graph, KVFormat(kv_format))
    runner = make_runner(graph, source, **options)
    poison(runner)
    return runner


@cache
def prompt_of(model: str, which: int = 0) -> list[int]:
    vocab = registry.build(source_of(model)).vocab_size
    return np.random.default_rng(which).integers(0, vocab, LENGTH).tolist()


def in_chunks(runner: CpuRunner, ids: list[int], chunk: int, pages: list[int]) -> np.ndarray:
    for start in range(0, len(ids), chunk):
        run(runner, Piece(ids[start : start + chunk], start, pages))
    return runner.logits(1)[0]


@cache
def expected(model: str) -> bytes:
    """Alone, in one piece, on one thread, with portable kernels."""
    runner = runner_of(model, threads=1, isa="portable")
    return in_chunks(runner, prompt_of(model), LENGTH, pages_for(LENGTH)).tobytes()


def assert_same(model: str, logits: np.ndarray) -> None:
    assert np.isfinite(logits).all()
    assert logits.tobytes() == expected(model)


@pytest.mark.parametrize("model", MODELS + KV_FORMATS)
@pytest.mark.parametrize("chunk", [1, 7, 16, 17, 64, LENGTH])
def test_any_chunk_size(model: str, chunk: int) -> None:
    assert_same(model, in_chunks(runner_of(model), prompt_of(model), chunk, pages_for(LENGTH, 3)))


@pytest.mark.parametrize("model", MODELS + KV_FORMATS)
@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@pytest.mark.parametrize("isa", _native.cpu_info()["available_isas"])
def test_any_number_of_threads_and_instruction_set(model: str, threads: int, isa: str) -> None:
    runner = runner_of(model, threads=threads, isa=isa)
    assert_same(model, in_chunks(runner, prompt_of(model), LENGTH, pages_for(LENGTH)))
    assert_same(model, in_chunks(runner, prompt_of(model), 9, pages_for(LENGTH, 8)))


@pytest.mark.parametrize("model", MODELS + KV_FORMATS)
def test_in_a_batch_of_strangers(model: str) -> None:
    runner = runner_of(model)
    ids, stranger = prompt_of(model), prompt_of(model, 1)
    run(runner, Piece(stranger[:40], 0, pages_for(40, 20)))
    run(
        runner,
        Piece(stranger[40:41], 40, [*pages_for(40, 20), 30]),
        Piece(ids, 0, pages_for(LENGTH, 4)),
        Piece(stranger[:33], 0, pages_for(33, 40)),
    )
    assert_same(model, runner.logits(3)[1])


@pytest.mark.parametrize("model", MODELS + KV_FORMATS)
def test_decode_rows_among_strangers(model: str) -> None:
    """One row at a time, beside 0 … 12 other rows: both ways to share out linear work."""
    runner = runner_of(model)
    ids, stranger = prompt_of(model), prompt_of(model, 2)
    pages = pages_for(LENGTH, 4)
    run(runner, Piece(ids[:50], 0, pages))
    for position in range(50, LENGTH):
        others = [
            Piece(stranger[: position % 5 + 1], 0, [20 + other]) for other in range(position % 13)
        ]
        run(runner, *others, Piece(ids[position : position + 1], position, pages))
    assert_same(model, runner.logits(len(others) + 1)[len(others)])


def test_the_environment_chooses_the_instruction_set() -> None:
    code = "from invar import _native; print(_native.cpu_info()['isa'])"
    for isa in _native.cpu_info()["available_isas"]:
        found = subprocess.run(
            [sys.executable, "-c", code],
            env={"INVAR_ISA": isa, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert found.stdout.strip() == isa
    refused = subprocess.run(
        [sys.executable, "-c", code],
        env={"INVAR_ISA": "sse9", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert refused.returncode != 0
    assert "INVAR_ISA" in refused.stderr
    assert "portable" in refused.stderr
