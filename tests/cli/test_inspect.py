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

from invar import _native
from invar.backends.cpu.layout import page_bytes
from invar.backends.cpu.plan_report import PlanReport, report_plan
from invar.cli.inspect import as_text, describe, plan_text
from invar.graph.graph import KVFormat
from invar.graph.passes import with_kv_format
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
        return describe(file, None, "bf16")


def test_heads_of_zero_leave_memory_unknown(tmp_path: Path) -> None:
    report = report_of(tmp_path, **{"attention.head_count": 0})
    assert report["metadata"]["llama.attention.head_count"] == 0
    assert report["memory"]["kv_bytes_per_token"] is None
    assert "KV per token: unknown" in as_text(report, all_tensors=False)


def test_heads_by_layer_count_where_they_are(tmp_path: Path) -> None:
    counts = np.array([2, 0], np.int32)  # the second layer has no attention
    report = report_of(tmp_path, **{"attention.head_count_kv": counts})
    assert report["memory"]["kv_bytes_per_token"] == 2 * 2 * 16 * 2


@pytest.mark.parametrize(("kv_format", "size"), [("bf16", 64), ("fp16", 64), ("int8", 40)])
def test_kv_memory_follows_its_format(kv_format: str, size: int) -> None:
    """K and V of a head of 16: two bytes a value, or one and two scales."""
    with GGUFFile(model_path("llama_gqa")) as file:
        memory = describe(file, [100], kv_format)["memory"]
        groups = with_kv_format(registry.build(file), KVFormat(kv_format)).groups
    heads = sum(group.layers * group.kv_heads for group in groups)
    assert memory["kv_bytes_per_token"] == size * heads
    assert memory["kv_bytes_per_request"] == {"100": 100 * size * heads}
    assert sum(page_bytes(group) for group in groups) == _native.PAGE_TOKENS * size * heads


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
