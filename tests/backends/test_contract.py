"""The backend against the contract interpreter: same roundings, so the rest is fp32 noise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from golden.tiny_models import TINY_MODELS, load_golden, model_path

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
from invar.graph.contract import ACTIVATION_FORMATS, ActivationFormat
from invar.graph.graph import Graph, GraphError
from invar.graph.interpreter import Interpreter
from invar.graph.operations import KVFormat
from invar.graph.passes import with_kv_format
from invar.models import registry
from invar.weights.formats import QuantType
from invar.weights.gguf import GGUFFile

FP32_NOISE = 2e-5
"""Of the largest logit: some hundred fp32 additions, each with a relative error of 6e-8."""

ONE_CODE = 4e-3
"""Of the largest logit. fp32 noise now and then moves an activation across a rounding boundary:
one code of 127, in one of some hundred columns. A wrong scale or a lost block moves logits by
more than a hundredth; see test_the_tolerance_bites."""


def worst(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def graph_of(source: Any, kv_format: KVFormat) -> Graph:
    return with_kv_format(registry.build(source), kv_format)


def logits_of(source: Any, ids: list[int], kv_format: KVFormat = KVFormat.BF16) -> np.ndarray:
    runner = make_runner(graph_of(source, kv_format), source)
    poison(runner)
    run(runner, Piece(ids, 0, pages_for(len(ids), 1)))
    return runner.logits(1)[0]


def contract(source: Any, ids: list[int], kv_format: KVFormat = KVFormat.BF16) -> np.ndarray:
    interpreter = Interpreter(graph_of(source, kv_format), source, "contract")
    return np.asarray(interpreter.step(interpreter.new_sequence(), ids)[-1])


@pytest.mark.parametrize("kv_format", KVFormat)
@pytest.mark.parametrize("name", TINY_MODELS)
def test_golden_models(name: str, kv_format: KVFormat) -> None:
    ids = load_golden(name).token_ids
    with GGUFFile(model_path(name)) as source:
        found, expected = logits_of(source, ids, kv_format), contract(source, ids, kv_format)
        assert worst(found, expected) < ONE_CODE


def test_mixed_formats() -> None:
    source = llama_source(MIXED)
    ids = np.random.default_rng(3).integers(0, 320, 75).tolist()
    assert worst(logits_of(source, ids), contract(source, ids)) < ONE_CODE


@pytest.mark.parametrize("tokens", [1, 2, 75])
def test_experts_in_mixed_formats(tokens: int) -> None:
    """Few rows, of which most experts have none, and many. One layer: a code that flips in the
    first may send a token to another expert in the second."""
    source = llama_source(MIXED_EXPERTS, experts=6, layers=1)
    ids = np.random.default_rng(11).integers(0, 320, tokens).tolist()
    assert worst(logits_of(source, ids), contract(source, ids)) < ONE_CODE


def test_ties_go_to_the_lower_expert() -> None:
    source = llama_source(matrices_in(QuantType.F32), experts=6)
    for layer in range(2):
        source.bytes[f"blk.{layer}.ffn_gate_inp.weight"][:] = 0
    ids = list(range(20))
    found = logits_of(source, ids)
    assert worst(found, contract(source, ids)) < 50 * FP32_NOISE
    for layer in range(2):  # what experts 2 … 5 are does not matter
        for part in ("gate", "up", "down"):
            stack = source.bytes[f"blk.{layer}.ffn_{part}_exps.weight"]
            stack[len(stack) // 3 :] = 0
    assert logits_of(source, ids).tobytes() == found.tobytes()


def matrices_in(kind: QuantType) -> dict[str, QuantType]:
    norms = ("attn_norm", "ffn_norm", "output_norm")
    return {**dict.fromkeys(norms, QuantType.F32), "weight": kind}


CODED_ACTIVATIONS = [
    kind
    for kind, form in ACTIVATION_FORMATS.items()
    if form in (ActivationFormat.Q8_32, ActivationFormat.Q8_256)
]


@pytest.mark.parametrize("kind", CODED_ACTIVATIONS, ids=lambda kind: kind.name)
def test_quantised_formats(kind: QuantType) -> None:
    """Every matrix in one format, rows looked up in the embedding among them. One layer: a code
    that flips in the first moves many in the second."""
    source = llama_source(matrices_in(kind), layers=1)
    ids = np.random.default_rng(5).integers(0, 320, 40).tolist()
    assert worst(logits_of(source, ids), contract(source, ids)) < ONE_CODE


@pytest.mark.parametrize("kv_format", [KVFormat.FP16, KVFormat.INT8])
def test_kv_formats(kv_format: KVFormat) -> None:
    """Where nothing but K and V is rounded, no other format would pass for this one."""
    source = llama_source(matrices_in(QuantType.F32))
    ids = np.random.default_rng(7).integers(0, 320, 75).tolist()
    found = logits_of(source, ids, kv_format)
    assert worst(found, contract(source, ids, kv_format)) < 50 * FP32_NOISE
    for other in set(KVFormat) - {kv_format}:
        assert worst(found, contract(source, ids, other)) > 100 * FP32_NOISE
    for wrong in (0 * found, 2 * found, 1.01 * found, np.roll(found, 1)):
        assert worst(wrong, contract(source, ids, kv_format)) > 100 * FP32_NOISE


EXACT_ACTIVATIONS = [QuantType.F32, QuantType.F16]


@pytest.mark.parametrize("kind", EXACT_ACTIVATIONS, ids=lambda kind: kind.name)
def test_float_formats(kind: QuantType) -> None:
    """Without codes there is nothing to flip but bf16 in attention."""
    source = llama_source(matrices_in(kind))
    ids = list(range(40))
    assert worst(logits_of(source, ids), contract(source, ids)) < 50 * FP32_NOISE


@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 6, "kv_heads": 3, "head_dim": 48, "hidden": 96, "feed_forward": 160},
        {"heads": 3, "kv_heads": 1, "head_dim": 16, "hidden": 64, "feed_forward": 96, "vocab": 77},
        {"heads": 5, "kv_heads": 5, "head_dim": 80, "hidden": 32, "feed_forward": 32},
    ],
    ids=["head 48", "head 16", "head 80"],
)
def test_odd_shapes(shape: dict[str, int]) -> None:
    """Heads that are not whole panels, a unit with a part of its heads, a ragged vocabulary."""
    source = llama_source({"attn_q": QuantType.F16}, **shape)
    ids = np.random.default_rng(5).integers(0, shape.get("vocab", 320), 45).tolist()
    assert worst(logits_of(source, ids), contract(source, ids)) < 50 * FP32_NOISE


def test_the_tolerance_bites() -> None:
    """A weight that is 2 % off is seen."""
    source = llama_source(MIXED)
    ids = list(range(30))
    expected = contract(source, ids)
    norm = source.bytes["blk.1.ffn_norm.weight"].view(np.float32)
    norm *= np.float32(1.02)
    assert worst(logits_of(source, ids), expected) > ONE_CODE


def test_a_format_without_a_kernel_is_refused_by_name() -> None:
    source = llama_source({})
    source.tensors["blk.0.ffn_up.weight"].type = QuantType.Q8_K
    with pytest.raises(GraphError, match=r"blk\.0\.ffn_up\.weight.*Q8_K.*Q4_0"):
        make_runner(registry.build(source), source)
