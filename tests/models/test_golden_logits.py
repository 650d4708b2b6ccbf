"""The exact interpreter against `transformers`, and proof that the comparison can fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from golden.tiny_models import MIXTURES, TINY_MODELS, Golden, load_golden, model_path

from invar.graph.graph import Graph
from invar.graph.interpreter import Interpreter
from invar.graph.operations import (
    Activation,
    ApplyRope,
    Attention,
    CacheGroup,
    Experts,
    Gated,
    Op,
    RMSNorm,
    Rope,
    RopeStyle,
    Route,
    Scale,
)
from invar.graph.routing import Routing, Scoring
from invar.models.registry import build
from invar.weights.gguf import GGUFFile

# Both sides compute in double precision: 2^-52 times the few thousand additions behind a logit.
DOUBLE_TOLERANCE = 1e-12
# GGUF holds the Llama 3 factors in float32: 2^-24 of an angle, which here reaches 47 positions at
# 2 pi / 8 per position (shorter wavelengths have the factor 1): 2e-6, times the size of the logits.
FACTOR_TOLERANCE = 2e-6


@pytest.fixture(params=TINY_MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def source(name: str) -> GGUFFile:
    return GGUFFile(model_path(name))


def tolerance(name: str, golden: Golden) -> float:
    relative = FACTOR_TOLERANCE if name == "llama3_rope" else DOUBLE_TOLERANCE
    return relative * float(np.abs(golden.logits).max())


def interpreted(graph: Graph, source: GGUFFile, golden: Golden) -> npt.NDArray[np.float64]:
    interpreter = Interpreter(graph, source)
    logits = interpreter.step(interpreter.new_sequence(), golden.token_ids)
    return np.asarray(logits[golden.rows], np.float64)


def test_logits_equal_those_of_transformers(name: str, source: GGUFFile) -> None:
    golden = load_golden(name)
    logits = interpreted(build(source), source, golden)
    np.testing.assert_allclose(logits, golden.logits, rtol=0, atol=tolerance(name, golden))


def test_wrong_outputs_are_told_apart(name: str) -> None:
    golden = load_golden(name)
    wrong = {
        "zeroed": np.zeros_like(golden.logits),
        "doubled": 2 * golden.logits,
        "shifted by a column": np.roll(golden.logits, 1, axis=1),
        "shifted by a row": np.roll(golden.logits, 1, axis=0),
        "one logit off by a thousandth": golden.logits
        + 1e-3 * (golden.logits == golden.logits[3, 5]),
    }
    for what, logits in wrong.items():
        assert np.abs(logits - golden.logits).max() > 10 * tolerance(name, golden), what


# ---------------------------------------------------------------- a wrong graph is found out

Change = Callable[[Op], Op]


def other_rope(op: Op, change: Callable[[Rope], Rope]) -> Op:
    return replace(op, rope=change(op.rope)) if isinstance(op, ApplyRope) else op


def other_style(rope: Rope) -> Rope:
    interleaved = rope.style is RopeStyle.INTERLEAVED
    return replace(rope, style=RopeStyle.HALF if interleaved else RopeStyle.INTERLEAVED)


def slightly_faster(rope: Rope) -> Rope:
    return replace(rope, inv_freq=tuple(f * 1.001 for f in rope.inv_freq))


CHANGES: dict[str, Change] = {
    "rope style": lambda op: other_rope(op, other_style),
    "rope frequencies off by a thousandth": lambda op: other_rope(op, slightly_faster),
    "attention scale off by a thousandth": lambda op: (
        replace(op, scale=op.scale * 1.001) if isinstance(op, Attention) else op
    ),
    "epsilon of the norms": lambda op: (
        replace(op, eps=op.eps * 1.5) if isinstance(op, RMSNorm) else op
    ),
    "activation": lambda op: (
        replace(
            op,
            activation=Activation.SILU
            if op.activation is Activation.GELU_TANH
            else Activation.GELU_TANH,
        )
        if isinstance(op, Gated | Experts)
        else op
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_wrong_operation_shows(name: str, source: GGUFFile, what: str) -> None:
    golden = load_golden(name)
    graph = build(source)
    changed = replace(graph, ops=tuple(CHANGES[what](op) for op in graph.ops))
    assert changed.ops != graph.ops
    difference = np.abs(interpreted(changed, source, golden) - golden.logits).max()
    assert difference > 10 * tolerance(name, golden)


ROUTINGS: dict[str, Callable[[Routing], Routing]] = {
    "other scores": lambda routing: replace(
        routing,
        scoring=Scoring.SOFTMAX if routing.scoring is Scoring.SIGMOID else Scoring.SIGMOID,
    ),
    "weights normalised or not": lambda routing: replace(
        routing,
        scoring=Scoring.SOFTMAX,
        # A softmax over the chosen adds up to 1 as it is.
        normalise=not routing.normalise and routing.scoring is not Scoring.SOFTMAX_OF_CHOSEN,
    ),
    "weights off by a thousandth": lambda routing: replace(routing, scale=routing.scale * 1.001),
}


@pytest.mark.parametrize("name", [name for name in TINY_MODELS if name in MIXTURES])
@pytest.mark.parametrize("what", ROUTINGS)
def test_a_wrong_routing_shows(name: str, source: GGUFFile, what: str) -> None:
    golden, graph = load_golden(name), build(source)

    def changed(op: Op) -> Op:
        return replace(op, routing=ROUTINGS[what](op.routing)) if isinstance(op, Route) else op

    wrong = replace(graph, ops=tuple(changed(op) for op in graph.ops))
    difference = np.abs(interpreted(wrong, source, golden) - golden.logits).max()
    assert difference > 10 * tolerance(name, golden)


@pytest.mark.parametrize(
    "name",
    ["mistral_window", "gemma3_pattern6", "gemma3_scaled", "mixtral", "gpt_oss", "llama4"],
)
@pytest.mark.parametrize("by", [-1, 1])
def test_a_window_off_by_one_shows(name: str, source: GGUFFile, by: int) -> None:
    def moved(group: CacheGroup) -> CacheGroup:
        return group if group.window is None else replace(group, window=group.window + by)

    golden = load_golden(name)
    graph = build(source)
    changed = replace(graph, groups=tuple(moved(group) for group in graph.groups))
    difference = np.abs(interpreted(changed, source, golden) - golden.logits).max()
    assert difference > 1e-3


@pytest.mark.parametrize("name", ["gemma3_pattern6", "gemma3_scaled"])
def test_the_embedding_scale_is_not_rounded_to_bf16(name: str, source: GGUFFile) -> None:
    """`transformers` rounds sqrt(hidden) to the model's dtype; float32 at least is asked here."""
    golden = load_golden(name)
    graph = build(source)
    (scale,) = (op for op in graph.ops if isinstance(op, Scale))
    assert np.float32(scale.factor) == np.sqrt(np.float32(32))
    rounded = replace(scale, factor=5.65625)
    changed = replace(graph, ops=tuple(rounded if op is scale else op for op in graph.ops))
    difference = np.abs(interpreted(changed, source, golden) - golden.logits).max()
    assert difference > 10 * tolerance(name, golden)
