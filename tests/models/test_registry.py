"""From metadata to graph: what is read, what has a default, what is refused and in which words."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from golden.tiny_models import model_path
from golden.tiny_tokenizer import VOCAB_SIZE
from models.memory_source import MemorySource

from invar.graph.graph import Graph, GraphError
from invar.graph.operations import Attention, Linear, TakeRows
from invar.models.metadata import ConfigError
from invar.models.registry import ARCHITECTURES, build


@pytest.fixture
def llama() -> MemorySource:
    return MemorySource.read(model_path("llama_gqa"))


@pytest.fixture
def gemma() -> MemorySource:
    return MemorySource.read(model_path("gemma3_pattern6"))


def attentions(graph: Graph) -> list[Attention]:
    return [op for op in graph.ops if isinstance(op, Attention)]


def test_llama_graph(llama: MemorySource) -> None:
    graph = build(llama)
    (group,) = graph.groups
    assert (group.name, group.layers, group.kv_heads, group.head_dim) == ("full", 2, 2, 16)
    assert graph.vocab_size == VOCAB_SIZE
    assert graph.max_positions == 2048
    assert graph.weight_names() == llama.tensors.keys()
    last = graph.ops[-1]
    assert isinstance(last, Linear)
    assert last.weight == "token_embd.weight"  # tied
    assert sum(isinstance(op, TakeRows) for op in graph.ops) == 1


def test_gemma3_layers_fall_into_two_groups(gemma: MemorySource) -> None:
    graph = build(gemma)
    assert [(group.name, group.layers, group.window) for group in graph.groups] == [
        ("full", 1, None),
        ("window", 6, 12),
    ]
    places = [(op.group, op.layer) for op in attentions(graph)]
    assert places == [*(("window", i) for i in range(5)), ("full", 0), ("window", 5)]


def test_gemma3_without_a_window_sees_all(gemma: MemorySource) -> None:
    del gemma.metadata["gemma3.attention.sliding_window"]
    (group,) = build(gemma).groups
    assert (group.name, group.layers, group.window) == ("full", 7, None)


def test_gemma3_attention_scale(gemma: MemorySource) -> None:
    assert {op.scale for op in attentions(build(gemma))} == {1 / math.sqrt(16)}


def test_gemma3_27b_scales_by_the_width_per_head(gemma: MemorySource) -> None:
    """62 layers: 1 / sqrt(hidden / heads), here 32 / 4 and not the head size of 16."""
    gemma.metadata["gemma3.block_count"] = 62
    gemma.metadata["gemma3.attention.head_count"] = 4
    for layer in range(62):
        for name in [name for name in gemma.tensors if name.startswith("blk.0.")]:
            gemma.tensors[name.replace("blk.0.", f"blk.{layer}.")] = gemma.tensors[name]
        gemma.put(f"blk.{layer}.attn_q.weight", np.zeros((64, 32), np.float32))
        gemma.put(f"blk.{layer}.attn_output.weight", np.zeros((32, 64), np.float32))
    assert {op.scale for op in attentions(build(gemma))} == {1 / math.sqrt(8)}


# ---------------------------------------------------------------- metadata (case B64)


@pytest.mark.parametrize(
    "key",
    [
        "llama.block_count",
        "llama.context_length",
        "llama.embedding_length",
        "llama.attention.head_count",
        "llama.attention.layer_norm_rms_epsilon",
        "general.architecture",
    ],
)
def test_a_missing_key_is_named(llama: MemorySource, key: str) -> None:
    del llama.metadata[key]
    with pytest.raises(ConfigError, match=f"has no {key}"):
        build(llama)


def test_a_misspelt_key_is_offered(llama: MemorySource) -> None:
    llama.metadata["llama.block_counts"] = llama.metadata.pop("llama.block_count")
    with pytest.raises(ConfigError, match=r"nearest key present: llama\.block_counts"):
        build(llama)


@pytest.mark.parametrize(
    ("key", "value"),
    [("block_count", "two"), ("block_count", True), ("attention.layer_norm_rms_epsilon", "tiny")],
)
def test_a_value_of_another_type_is_refused(llama: MemorySource, key: str, value: Any) -> None:
    llama.metadata[f"llama.{key}"] = value
    with pytest.raises(ConfigError, match=f"llama.{key} must be"):
        build(llama)


@pytest.mark.parametrize("value", [2, np.uint32(2), [2, 2], np.array([2, 2], np.int32)])
def test_kv_heads_as_a_number_or_one_a_layer(llama: MemorySource, value: Any) -> None:
    llama.metadata["llama.attention.head_count_kv"] = value
    assert build(llama).groups[0].kv_heads == 2


def test_kv_heads_default_to_heads(llama: MemorySource) -> None:
    del llama.metadata["llama.attention.head_count_kv"]
    with pytest.raises(ConfigError, match=r"attn_k\.weight has 32 rows, .* 4 heads .* of 16"):
        build(llama)


@pytest.mark.parametrize(
    ("value", "message"),
    [([2, 1], "differs between layers"), ([2], "2 counts, one a layer"), (3, "do not divide")],
)
def test_kv_heads_that_do_not_fit(llama: MemorySource, value: Any, message: str) -> None:
    llama.metadata["llama.attention.head_count_kv"] = value
    with pytest.raises(ConfigError, match=message):
        build(llama)


@pytest.mark.parametrize(
    ("count", "used", "message"),
    [
        (8, 2, r"ffn_gate_inp\.weight has 4 rows, expected one for each of 8 experts"),
        (4, 5, r"llama\.expert_used_count is 5, more than the 4 experts of llama\.expert_count"),
        (4, 0, r"llama\.expert_used_count must be an integer from 1"),
        (0, 2, r"ffn_gate\.weight: the model file has no such tensor"),
    ],
)
def test_counts_of_experts_that_do_not_fit(count: int, used: int, message: str) -> None:
    mixtral = MemorySource.read(model_path("mixtral"))
    mixtral.metadata |= {"llama.expert_count": count, "llama.expert_used_count": used}
    with pytest.raises((ConfigError, GraphError), match=message):
        build(mixtral)


def test_stacks_of_experts_must_fit_each_other() -> None:
    mixtral = MemorySource.read(model_path("mixtral"))
    mixtral.put("blk.1.ffn_up_exps.weight", np.zeros((4, 64, 32), np.float32))
    with pytest.raises(GraphError, match=r"blk\.1\.ffn_up_exps\.weight: shape .*4, 64, 32"):
        build(mixtral)


def test_gate_and_up_must_be_as_wide(llama: MemorySource) -> None:
    llama.put("blk.0.ffn_up.weight", np.zeros((32, 64), np.float32))
    with pytest.raises(GraphError, match=r"ffn_gate\.weight gives 64 columns, .*ffn_up.* 32"):
        build(llama)


@pytest.mark.parametrize(("name", "near"), [("llama3", "llama"), ("gemma9", "gemma")])
def test_an_unknown_architecture_names_near_ones(llama: MemorySource, name: str, near: str) -> None:
    llama.metadata["general.architecture"] = name
    with pytest.raises(ConfigError, match=f"'{name}' is not supported; near ones: {near}"):
        build(llama)


def test_an_unknown_architecture_names_all(llama: MemorySource) -> None:
    llama.metadata["general.architecture"] = "whisper"
    with pytest.raises(ConfigError, match=rf"supported: {', '.join(ARCHITECTURES)}\)"):
        build(llama)


# ---------------------------------------------------------------- tensors


@pytest.mark.parametrize(
    "name", ["token_embd.weight", "blk.1.attn_k.weight", "blk.0.ffn_norm.weight"]
)
def test_a_missing_tensor_is_named(llama: MemorySource, name: str) -> None:
    del llama.tensors[name]
    with pytest.raises(GraphError, match=f"{name}: the model file has no such tensor"):
        build(llama)


def test_a_wrong_shape_is_named(llama: MemorySource) -> None:
    llama.put("blk.1.ffn_down.weight", np.zeros((64, 32), np.float32))
    expected = r"blk\.1\.ffn_down\.weight: shape \(64, 32\), expected \(64, 64\)"
    with pytest.raises(GraphError, match=expected):
        build(llama)


def test_a_tensor_without_a_place_is_refused(llama: MemorySource) -> None:
    llama.put("blk.0.attn_q_norm.weight", np.ones(16, np.float32))
    with pytest.raises(GraphError, match=r"blk\.0\.attn_q_norm\.weight .*no place for it"):
        build(llama)


def test_untied_output(llama: MemorySource) -> None:
    llama.put("output.weight", np.zeros((VOCAB_SIZE, 64), np.float32))
    last = build(llama).ops[-1]
    assert isinstance(last, Linear)
    assert last.weight == "output.weight"
