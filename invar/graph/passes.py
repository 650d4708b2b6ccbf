"""Passes over a graph: how K and V are stored, which rope holds, and fewer and larger operations
of the same meaning.

``merge`` joins linears over the same input; ``fuse`` then recognises q/k/v with their norms, rope
and page writes, gated feed-forwards, residual additions and scaled embeddings. What matches no
pattern stays as it is and still runs. Norm and quantisation need no pattern: the backend runs
neighbouring row operations in one phase.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from invar.graph.fused import (
    FusedGraph,
    FusedOp,
    GatedLinear,
    Head,
    HeadsLinear,
    LinearAdd,
    MergedLinear,
    PagedAttention,
    ScaledEmbed,
    Segment,
    StoreKV,
    inputs,
    outputs,
)
from invar.graph.graph import Graph
from invar.graph.operations import (
    Add,
    ApplyRope,
    Attention,
    Embed,
    Gated,
    KVFormat,
    Linear,
    RMSNorm,
    Rope,
    Scale,
    Value,
)


def with_kv_format(graph: Graph, kv_format: KVFormat) -> Graph:
    """The graph with K and V of all layers stored so; only their roundings change."""
    groups = tuple(replace(group, kv_format=kv_format) for group in graph.groups)
    return replace(graph, groups=groups)


def with_longest(graph: Graph, positions: int) -> Graph:
    """The graph for requests of up to so many positions: rope that depends on it is chosen."""

    def chosen(rope: Rope) -> Rope:
        shorter = rope.shorter
        if shorter is None or positions > shorter.positions:
            return replace(rope, shorter=None)
        return replace(rope, inv_freq=shorter.inv_freq, shorter=None)

    ops = (
        replace(op, rope=chosen(op.rope)) if isinstance(op, ApplyRope) else op for op in graph.ops
    )
    return replace(graph, ops=tuple(ops))


def optimise(graph: Graph) -> FusedGraph:
    """All passes in their order."""
    return fuse(merge(FusedGraph.of(graph)))


def separate(graph: Graph | FusedGraph) -> FusedGraph:
    """What must run at least: attention in two steps, everything else as the model file has it."""
    ops: list[FusedOp] = []
    for op in graph.ops:
        if isinstance(op, Attention):
            ops += [StoreKV(op.k, op.v, op.group, op.layer), paged(op)]
        else:
            ops.append(op)
    return replace(FusedGraph.of(graph), ops=tuple(ops))


def paged(op: Attention) -> PagedAttention:
    return PagedAttention(
        op.out, op.q, op.group, op.layer, op.heads, op.scale, op.soft_cap, op.sinks
    )


def merge(graph: FusedGraph) -> FusedGraph:
    """Linears that read the same value become one operation, where the first of them stood."""
    readers: dict[Value, list[Linear]] = {}
    for op in graph.ops:
        if isinstance(op, Linear):
            readers.setdefault(op.x, []).append(op)
    ops: list[FusedOp] = []
    for op in graph.ops:
        if not isinstance(op, Linear) or len(readers[op.x]) == 1:
            ops.append(op)
        elif op is readers[op.x][0]:
            same = readers[op.x]
            segments = tuple(Segment(linear.weight, linear.bias) for linear in same)
            ops.append(MergedLinear(tuple(linear.out for linear in same), op.x, segments))
    return replace(graph, ops=tuple(ops))


def fuse(graph: FusedGraph) -> FusedGraph:
    """Operations whose intermediate values nobody else reads become one."""
    rewriter = _Rewriter(graph)
    for op in graph.ops:
        match op:
            case Attention():
                rewriter.attention(op)
            case Gated():
                rewriter.gated(op)
            case Add():
                rewriter.add(op)
            case Scale():
                rewriter.scale(op)
    return replace(graph, ops=rewriter.result())


class _Rewriter:
    """Replaces operations in place: a slot holds what stands there now, nothing if removed."""

    def __init__(self, graph: FusedGraph) -> None:
        self.slots: list[list[FusedOp]] = [[op] for op in graph.ops]
        self.defined_at = {
            value: slot for slot, op in enumerate(graph.ops) for value in outputs(op)
        }
        self.uses = Counter(value for op in graph.ops for value in inputs(op))
        self.uses[graph.logits] += 1
        self.kv_heads = {group.name: group.kv_heads for group in graph.groups}

    def result(self) -> tuple[FusedOp, ...]:
        return tuple(op for slot in self.slots for op in slot)

    def producer(self, value: Value) -> FusedOp | None:
        """The operation that defines a value which one reader alone wants."""
        slot = self.defined_at.get(value)
        if slot is None or self.uses[value] != 1 or len(self.slots[slot]) != 1:
            return None
        return self.slots[slot][0]

    def replace(self, value: Value, ops: list[FusedOp]) -> None:
        self.slots[self.defined_at[value]] = ops

    def attention(self, op: Attention) -> None:
        kv_heads = self.kv_heads[op.group]
        query = self.head(op.q, op.heads)
        key, value = (self.head(operand, kv_heads) for operand in (op.k, op.v))
        merged = self.common_producer(query, key, value)
        if query is None or key is None or value is None or merged is None:
            self.replace(op.out, [StoreKV(op.k, op.v, op.group, op.layer), paged(op)])
            return
        for chain in (query, key, value):
            for inner in chain.removed:
                self.replace(inner, [])
        heads = HeadsLinear(
            op.q, merged.x, query.head, key.head, value.head, op.heads, op.group, op.layer
        )
        self.replace(merged.outs[0], [heads])
        self.replace(op.out, [paged(op)])

    def head(self, value: Value, heads: int) -> _HeadChain | None:
        """Follows linear → norm → rope backwards from an operand of attention."""
        removed: list[Value] = []
        rope = norm = None
        op = self.producer(value)
        if isinstance(op, ApplyRope):
            rope = op
            removed.append(op.out)
            op = self.producer(op.x)
        if isinstance(op, RMSNorm):
            norm = op
            removed.append(op.out)
            op = self.producer(op.x)
        if not isinstance(op, MergedLinear):
            return None
        source = norm.x if norm else rope.x if rope else value
        segment = op.segments[op.outs.index(source)]
        if any(part.heads != heads for part in (norm, rope) if part):
            return None
        head = Head(
            segment,
            norm.weight if norm else None,
            norm.eps if norm else 0.0,
            rope.rope if rope else None,
        )
        return _HeadChain(head, op, removed)

    @staticmethod
    def common_producer(*chains: _HeadChain | None) -> MergedLinear | None:
        """The merged linear whose outputs are exactly what these chains start from."""
        merged = {id(chain.merged): chain.merged for chain in chains if chain}
        if len(merged) != 1:
            return None
        (only,) = merged.values()
        return only if len(only.outs) == len(chains) else None

    def gated(self, op: Gated) -> None:
        gate, up = self.producer(op.gate), self.producer(op.up)
        if not isinstance(gate, MergedLinear) or gate is not up or len(gate.outs) != 2:
            return
        segments = dict(zip(gate.outs, gate.segments, strict=True))
        fused = GatedLinear(op.out, gate.x, segments[op.gate], segments[op.up], op.activation)
        self.replace(gate.outs[0], [])
        self.replace(op.out, [fused])

    def add(self, op: Add) -> None:
        for term, residual in ((op.b, op.a), (op.a, op.b)):
            linear = self.producer(term)
            if isinstance(linear, Linear) and term != residual:
                segment = Segment(linear.weight, linear.bias)
                self.replace(linear.out, [])
                self.replace(op.out, [LinearAdd(op.out, linear.x, segment, residual)])
                return

    def scale(self, op: Scale) -> None:
        embed = self.producer(op.x)
        if isinstance(embed, Embed):
            self.replace(embed.out, [])
            self.replace(op.out, [ScaledEmbed(op.out, embed.weight, op.factor)])


class _HeadChain:
    def __init__(self, head: Head, merged: MergedLinear, removed: list[Value]) -> None:
        self.head = head
        self.merged = merged
        self.removed = removed
