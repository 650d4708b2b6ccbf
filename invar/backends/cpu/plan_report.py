"""What each pass over a graph makes of a step: operations, phases, and the bytes of one token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from invar import _native
from invar.backends.cpu.layout import Buffer, page_bytes
from invar.backends.cpu.lower import lower
from invar.backends.cpu.lowered import (
    Call,
    ColumnsOf,
    HeadUse,
    Lowered,
    RawWeight,
    SegmentUse,
    Vector,
)
from invar.graph.fused import FusedGraph
from invar.graph.graph import Graph, WeightSource
from invar.graph.naming import OperationNames, layer_of
from invar.graph.operations import CacheGroup
from invar.graph.passes import fuse, merge, separate
from invar.weights.formats import QuantType


@dataclass(frozen=True)
class Bytes:
    """Moved for one token that is decoded alone."""

    weights: int  # packed, or the row of an embedding
    activations: int  # of the values and codes that a phase reads and writes, each once
    kv: int  # read by attention over the context, and written

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(
            self.weights + other.weights,
            self.activations + other.activations,
            self.kv + other.kv,
        )


NOTHING = Bytes(0, 0, 0)


@dataclass(frozen=True)
class PassReport:
    """The plan as it would be after a pass."""

    name: str
    operations: int  # of the graph
    phases: int  # of the plan that is lowered from it
    layer_phases: int  # of the layer in the middle
    bytes: Bytes


@dataclass(frozen=True)
class Step:
    """A phase of the finished plan."""

    operations: list[str]
    bytes: Bytes


@dataclass(frozen=True)
class PlanReport:
    context: int  # tokens that attention sees
    layer: int  # whose steps are listed
    passes: list[PassReport]
    steps: list[Step]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def report_plan(graph: Graph, source: WeightSource, context: int, threads: int) -> PlanReport:
    """Raises ``GraphError`` for a model that the backend cannot run."""
    merged = merge(FusedGraph.of(graph))
    fused = fuse(merged)
    stages = [
        ("model file", separate(graph), True),
        ("merge: linears of one input together", separate(merged), True),
        ("fuse: heads, gates, residuals at the tile", fused, True),
        ("lower: row operations share a phase", fused, False),
    ]
    passes = []
    for name, ops, eager in stages:
        lowered = lower(ops, source, 1, threads, eager)
        counted = _Counted(lowered, ops, source, context)
        passes.append(counted.report(name))
    return PlanReport(context, counted.layer, passes, counted.steps)


class _Counted:
    """A lowered graph, phase by phase."""

    def __init__(
        self, lowered: Lowered, graph: FusedGraph, source: WeightSource, context: int
    ) -> None:
        self.source = source
        self.context = context
        self.groups: Sequence[CacheGroup] = graph.groups
        self.operations = len(graph.ops)
        names = OperationNames(graph.ops)
        phases = [[call for call in calls if call.method != "check"] for calls in lowered.phases]
        self.phases = [calls for calls in phases if calls]
        layers = [
            next((layer_of(names[call.op]) for call in calls if call.op), None)
            for calls in self.phases
        ]
        self.layer = (max((layer for layer in layers if layer is not None), default=0) + 1) // 2
        of_layer = [
            calls for calls, layer in zip(self.phases, layers, strict=True) if layer == self.layer
        ]
        self.steps = [Step([self.text(call) for call in c], self.bytes(c)) for c in of_layer]

    def report(self, name: str) -> PassReport:
        total = sum((self.bytes(calls) for calls in self.phases), NOTHING)
        return PassReport(name, self.operations, len(self.phases), len(self.steps), total)

    def bytes(self, calls: Sequence[Call]) -> Bytes:
        buffers = {buffer for call in calls for buffer in buffers_of(call)}
        return Bytes(
            weights=sum(self.weight_bytes(value) for call in calls for value in values_of(call)),
            activations=sum(buffer.row_bytes for buffer in buffers),
            kv=sum(self.kv_bytes(call) for call in calls),
        )

    def weight_bytes(self, value: object) -> int:
        match value:
            case SegmentUse():
                return value.row_bytes
            case RawWeight():
                tensor = self.source.tensors[value.tensor]
                return QuantType(tensor.type).row_bytes(tensor.shape[1])
            case Vector():
                return 4 * int(self.source.tensors[value.tensor].shape[-1])
        return 0

    def kv_bytes(self, call: Call) -> int:
        if call.method not in ("attention", "part_cache", "store_kv"):
            return 0
        group = self.groups[call.arguments["group"]]
        per_token = page_bytes(replace(group, layers=1)) // _native.PAGE_TOKENS
        seen = min(self.context, group.window or self.context)
        return int(per_token * (seen if call.method == "attention" else 1))

    def text(self, call: Call) -> str:
        """The call with its weights and their formats, as ``part_store blk.0.ffn_down q4_k``."""
        words = [call.method.removeprefix("part_")]
        for value in values_of(call):
            match value:
                case SegmentUse():
                    words.append(f"{value.weight.tensor} ({value.weight.weight_format})")
                case RawWeight() | Vector():
                    words.append(value.tensor)
        act = call.arguments.get("out" if call.method == "quantize" else "act")
        if isinstance(act, Buffer):
            words.append(f"to {act.act_format}")
        return " ".join(words)


def values_of(call: Call) -> Iterator[object]:
    """The arguments that are buffers or weights, those inside others too."""
    for value in call.arguments.values():
        yield value
        if isinstance(value, SegmentUse):
            yield value.x
        elif isinstance(value, ColumnsOf):
            yield value.buffer
        elif isinstance(value, HeadUse):
            yield from (value.bias, value.norm, value.rope_table)


def buffers_of(call: Call) -> Iterator[Buffer]:
    return (value for value in values_of(call) if isinstance(value, Buffer))
