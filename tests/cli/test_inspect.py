"""`invar inspect` on files that are broken: it shows what they say, which is what it is for."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backends.batches import llama_source
from golden.tiny_models import model_path
from models.memory_source import MemorySource

from invar.backends.cpu.layout import SLAB_BYTES
from invar.backends.cpu.plan_report import PlanReport, report_plan
from invar.cli.inspect import as_text, describe, plan_text
from invar.config import EngineConfig
from invar.engine.loader import load_engine_alone
from invar.models import registry
from invar.weights.formats import QuantType
from invar.weights.gguf import GGUFFile

from .commands import invar

NONSENSE = [0, -1, 1, 2**31 - 1, 2**63, math.nan, math.inf, "x", [0, 0], True, None]


def report_of(tmp_path: Path, **values: Any) -> dict[str, Any]:
    """The report on a tiny model in which keys are changed, or taken out where None."""
    source = MemorySource.read(model_path("llama_gqa"))
    for name, value in values.items():
        source.metadata[f"llama.{name}"] = value
        if value is None:
            del source.metadata[f"llama.{name}"]
    with GGUFFile(source.write(tmp_path / "x.gguf")) as file:
        return describe(file, EngineConfig())


@pytest.mark.parametrize("counts", [0, np.array([2, 0], np.int32)])
def test_where_no_model_can_be_made_of_it_memory_is_unknown(tmp_path: Path, counts: Any) -> None:
    report = report_of(tmp_path, **{"attention.head_count_kv": counts})
    shown = report["metadata"]["llama.attention.head_count_kv"]
    assert shown == (counts if isinstance(counts, int) else counts.tolist())
    assert "llama.attention.head_count_kv" in report["memory"]["kv_error"]
    assert "KV: unknown, no model can be made of it" in as_text(report, all_tensors=False)


@pytest.mark.parametrize(("kv_format", "size"), [("bf16", 64), ("fp16", 64), ("int8", 40)])
def test_kv_memory_follows_its_format(kv_format: str, size: int) -> None:
    """K and V of a head of 16: two bytes a value, or one and two scales."""
    with GGUFFile(model_path("llama_gqa")) as file:
        memory = describe(file, EngineConfig(kv_cache_dtype=kv_format))["memory"]
    assert memory["kv_bytes_per_token"] == size * 2 * 2  # layers and KV heads
    assert memory["kv_groups"] == [
        {"name": "full", "layers": 2, "window": None, "bytes_per_token": size * 4}
    ]


@pytest.mark.parametrize("kv_format", ["bf16", "int8"])
@pytest.mark.parametrize(
    "name", ["llama_gqa", "mistral_window", "gemma3_pattern6", "llama4", "deepseek_v2", "gpt_oss"]
)
def test_memory_is_what_an_engine_takes(name: str, kv_format: str) -> None:
    """All pages of a window's layers or of latent attention too; and so many requests fit."""
    for tokens, requests in ((33, 3), (1000, 2)):
        config = EngineConfig(
            model=str(model_path(name)),
            kv_cache_dtype=kv_format,
            max_model_len=tokens,
            max_num_seqs=requests,
            max_num_batched_tokens=64,
        )
        with GGUFFile(model_path(name)) as file:
            memory = describe(file, config)["memory"]
        loaded = load_engine_alone(config)
        info, kv = loaded.engine.runner.info, loaded.engine.memory
        taken = info.slabs * info.slab_bytes
        assert memory["kv_bytes"][str(tokens)][str(requests)] == taken
        assert memory["at_start"]["bytes"] == dict(loaded.memory_table)
        assert memory["at_start"]["max_model_len"] == loaded.engine.max_model_len == tokens
        opened = [kv.open(np.arange(tokens, dtype=np.int32), tokens) for _ in range(requests)]
        assert None not in opened
        loaded.close()


def test_a_table_of_lengths_and_requests() -> None:
    model = str(model_path("gemma3_pattern6"))
    options = ("--lengths", "100,200000", "--batches", "1,4096")
    report = json.loads(invar("inspect", model, "--json", *options).stdout)
    cells = report["memory"]["kv_bytes"]
    assert [list(cells), *map(list, cells.values())] == [["100", "200000"], *[["1", "4096"]] * 2]
    full, window = report["memory"]["kv_groups"]
    assert (full["window"], window["window"]) == (None, 12)
    # All 200,000 tokens in one layer, those of a window and a step's chunk in six.
    least = 200_000 * full["bytes_per_token"] + (12 + 511) * window["bytes_per_token"]
    assert least < cells["200000"]["1"] < least + 2 * SLAB_BYTES  # each group ends in one
    text = invar("inspect", model, *options).stdout
    assert "in 1 layer, " in text
    assert "layers that see 12 tokens" in text
    assert "of 200,000 tokens" in text


def test_what_does_not_go_is_said_in_the_place_of_what_it_would_take() -> None:
    model = str(model_path("llama_gqa"))
    shown = invar("inspect", model, "--max-model-len", "1M", "--max-num-seqs", "3")
    assert shown.returncode == 0
    assert "Not on this machine with these options: max_model_len: 1048576 is beyond the 2048" in (
        shown.stdout
    )
    assert "of 1,048,576 tokens" in shown.stdout


@pytest.mark.parametrize(("words", "message"), [
    (["--batches", "0"], "--batches 0: write numbers from 1 on"),
    (["--batches", "1,x"], "--batches 1,x: write numbers"),
    (["--lengths", str(2**31)], "--lengths 2147483648: write"),
    (["--max-num-seqs", "0"], "max_num_seqs: 0 is outside"),
    (["--kv-cache-dtype", "fp4"], "kv_cache_dtype: 'fp4' is not one of"),
])  # fmt: skip
def test_options_that_are_wrong(words: list[str], message: str) -> None:
    result = invar("inspect", str(model_path("llama_gqa")), *words)
    assert result.returncode == 1
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "key",
    [
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "block_count",
        "context_length",
        "embedding_length",
        "rope.freq_base",
    ],
)
def test_any_value_is_shown(tmp_path: Path, key: str) -> None:
    for value in NONSENSE:
        report = report_of(tmp_path, **{key: value})
        json.dumps(report, allow_nan=False)
        assert "token_embd.weight" in as_text(report, all_tensors=True)


def plan_of(context: int) -> PlanReport:
    matrices = (*("attn_q.", "attn_k.", "attn_v.", "attn_output"), "ffn_gate", "ffn_up", "ffn_down")
    source = llama_source(dict.fromkeys(matrices, QuantType.Q4_1), layers=3)
    return report_plan(registry.build(source), source, context, threads=2)


def test_a_plan_after_each_pass() -> None:
    report = plan_of(context=40)
    operations, phases, layer = zip(
        *((p.operations, p.phases, p.layer_phases) for p in report.passes), strict=True
    )
    # A layer as the model file has it: 2 norms, 7 linears, 2 ropes, pages, attention, a gate and
    # 2 sums; embedding, take_rows, norm and output around the layers.
    assert operations == (4 + 3 * 16, 4 + 3 * 13, 4 + 3 * 7, 4 + 3 * 7)
    assert list(phases) == sorted(phases, reverse=True)
    assert layer[-1] == 7
    assert layer[0] > layer[1] > layer[2] > layer[3]
    weights, activations, kv = zip(
        *((p.bytes.weights, p.bytes.activations, p.bytes.kv) for p in report.passes), strict=True
    )
    assert len(set(weights)) == len(set(kv)) == 1
    assert activations[0] > activations[1] > activations[2] > activations[3]
    # K and V of 2 heads of 32 in bf16, in 3 layers: 40 tokens are read and one is written.
    assert kv[0] == 3 * (40 + 1) * 2 * 2 * 32 * 2


def test_steps_of_a_layer_with_their_weights() -> None:
    report = plan_of(context=40)
    assert report.layer == 1
    assert [step.operations[0].split()[0] for step in report.steps] == [
        *("rms_norm", "query", "attention", "store", "rms_norm", "gated", "store")
    ]
    assert "blk.1.attn_k.weight (q4_1)" in report.steps[1].operations[1]
    down = report.steps[-1]
    assert down.bytes.weights == 512 // 32 * 10 * 64 * (256 // 32)  # q4_1 records, records.h
    text = plan_text(report.as_json())
    assert "Steps of layer 1" in text
    assert "KV of 40" in text


def test_plans_on_the_command_line() -> None:
    model = str(model_path("gemma3_pattern6"))
    shown = invar("inspect", model, "--plan", "--lengths", "64")
    assert "fuse: heads, gates, residuals" in shown.stdout
    report = json.loads(invar("inspect", model, "--plan", "--json", "--lengths", "64").stdout)
    assert report["plan"]["context"] == 64
    assert [len(report["plan"]["passes"]), report["plan"]["layer"]] == [4, 3]
    assert "plan" not in json.loads(invar("inspect", model, "--json").stdout)
