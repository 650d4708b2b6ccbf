"""Passes: what they recognise, what they leave, and that they change no bit."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from golden.families import FAMILIES, family_directory
from golden.tiny_models import TINY_MODELS, model_path

from backends.batches import (
    MIXED,
    MIXED_EXPERTS,
    Piece,
    llama_source,
    make_runner,
    pages_for,
    run,
)
from invar.backends.cpu import memory
from invar.graph.fused import FusedGraph
from invar.graph.operations import Attention
from invar.graph.passes import merge, optimise, separate
from invar.models import registry
from invar.models.registry import open_directory
from invar.weights.gguf import GGUFFile


def kinds(graph: FusedGraph) -> Counter[str]:
    return Counter(type(op).__name__ for op in graph.ops)


def test_a_llama_layer_is_four_linears() -> None:
    graph = registry.build(llama_source(MIXED))
    assert kinds(optimise(graph)) == {
        "Embed": 1,
        "RMSNorm": 2 * 2 + 1,
        "HeadsLinear": 2,
        "PagedAttention": 2,
        "LinearAdd": 2 * 2,
        "GatedLinear": 2,
        "TakeRows": 1,
        "Linear": 1,
    }
    merged = kinds(merge(FusedGraph.of(graph)))
    assert merged["MergedLinear"] == 4
    assert merged["Linear"] == 2 * 2 + 1


def test_norms_behind_a_linear_stay() -> None:
    """Gemma 3 normalises before it adds: nothing to fuse there, and the embedding is scaled."""
    with GGUFFile(model_path("gemma3_pattern6")) as source:
        found = kinds(optimise(registry.build(source)))
    assert found["ScaledEmbed"] == 1
    assert found["HeadsLinear"] == 7
    assert found["Add"] == 14
    assert found["LinearAdd"] == 0
    assert found["ApplyRope"] == found["Scale"] == 0


def test_a_layer_of_gpt2_is_four_linears() -> None:
    with open_directory(family_directory("gpt2")) as source:
        found = kinds(optimise(registry.build(source)))
    assert found["HeadsLinear"] == found["Activate"] == 2
    assert found["LinearAdd"] == 4
    assert found["Linear"] == 2 + 1
    assert found["MergedLinear"] == found["StoreKV"] == 0


def test_a_value_that_two_read_is_not_swallowed() -> None:
    graph = registry.build(llama_source(MIXED))
    first = next(op for op in graph.ops if isinstance(op, Attention))
    second = replace(first, out=replace(first.out, name="again"))
    fused = optimise(replace(graph, ops=(*graph.ops, second)))
    assert kinds(fused)["HeadsLinear"] == 1
    assert kinds(fused)["StoreKV"] == 2


@pytest.mark.parametrize("name", ["mixed", "experts", "gpt2", "gpt_neox", *TINY_MODELS])
def test_fused_and_unfused_are_equal_to_the_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source: Any = llama_source(MIXED, feed_forward=4096) if name == "mixed" else None
    if name == "experts":  # enough of them that gate and up make codes at once
        source = llama_source(MIXED_EXPERTS, feed_forward=2048, experts=4)
    if name in FAMILIES:
        source = open_directory(family_directory(name))
    source = source or GGUFFile(model_path(name))
    graph = registry.build(source)
    ids = np.random.default_rng(1).integers(0, graph.vocab_size, 45).tolist()

    def logits() -> bytes:
        runner = make_runner(graph, source)
        run(runner, Piece(ids, 0, pages_for(45)))
        return runner.logits(1).tobytes()

    fused = logits()
    monkeypatch.setattr(memory, "optimise", separate)
    assert logits() == fused
