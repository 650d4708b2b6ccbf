"""Operations that each stand for several of ``operations.py``; only passes make them."""

from __future__ import annotations

from dataclasses import dataclass

from invar.graph.graph import Graph
from invar.graph.operations import Activation, CacheGroup, Op, Rope, Value


@dataclass(frozen=True)
class Segment:
    """One weight of a merged linear, in its own number format."""

    weight: str
    bias: str | None = None


@dataclass(frozen=True)
class MergedLinear:
    """Several linears over the same input; ``outs[i]`` belongs to ``segments[i]``."""

    outs: tuple[Value, ...]
    x: Value
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class LinearAdd:
    """``x @ weight.T (+ bias) + residual``."""

    out: Value
    x: Value
    segment: Segment
    residual: Value


@dataclass(frozen=True)
class GatedLinear:
    """``activation(x @ gate.T) * (x @ up.T)``."""

    out: Value
    x: Value
    gate: Segment
    up: Segment
    activation: Activation


@dataclass(frozen=True)
class Head:
    """What makes heads out of x: linear, then a norm over each head, then rope."""

    segment: Segment
    norm: str | None = None
    eps: float = 0.0
    rope: Rope | None = None


@dataclass(frozen=True)
class HeadsLinear:
    """q to a value, k and v to the pages of their layer, head by head."""

    q: Value
    x: Value
    query: Head
    key: Head
    value: Head
    heads: int
    group: str
    layer: int


@dataclass(frozen=True)
class StoreKV:
    """k and v, computed by other operations, to the pages of their layer."""

    k: Value
    v: Value
    group: str
    layer: int


@dataclass(frozen=True)
class PagedAttention:
    """Attention whose k and v of this step are in the pages already."""

    out: Value
    q: Value
    group: str
    layer: int
    heads: int
    scale: float
    soft_cap: float | None
    sinks: str | None = None


@dataclass(frozen=True)
class ScaledEmbed:
    """Rows of a weight by token id, times a factor."""

    out: Value
    weight: str
    factor: float


FusedOp = (
    Op
    | MergedLinear
    | LinearAdd
    | GatedLinear
    | HeadsLinear
    | StoreKV
    | PagedAttention
    | ScaledEmbed
)


@dataclass(frozen=True)
class FusedGraph:
    ops: tuple[FusedOp, ...]
    groups: tuple[CacheGroup, ...]
    logits: Value
    vocab_size: int
    max_positions: int

    @classmethod
    def of(cls, graph: Graph | FusedGraph) -> FusedGraph:
        return cls(graph.ops, graph.groups, graph.logits, graph.vocab_size, graph.max_positions)


def inputs(op: FusedOp) -> tuple[Value, ...]:
    """The values that an operation reads."""
    found = [
        getattr(op, name)
        for name in (
            *("x", "a", "b", "k", "v", "gate", "up", "residual"),
            *("factor", "logits", "routes"),
        )
        if hasattr(op, name)
    ]
    if not isinstance(op, HeadsLinear) and hasattr(op, "q"):
        found.append(op.q)
    return tuple(value for value in found if isinstance(value, Value))


def outputs(op: FusedOp) -> tuple[Value, ...]:
    """The values that an operation defines."""
    if isinstance(op, MergedLinear):
        return op.outs
    if isinstance(op, HeadsLinear):
        return (op.q,)
    if isinstance(op, StoreKV):
        return ()
    return (op.out,)
