"""Builds a graph operation by operation; shapes are checked as it grows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from invar.graph.graph import Graph, GraphError, WeightSource, column_order
from invar.graph.operations import (
    Activate,
    Activation,
    Add,
    ApplyRope,
    Attention,
    CacheGroup,
    Columns,
    Embed,
    Experts,
    ExpertWeight,
    Gated,
    HeadwiseLinear,
    Join,
    LayerNorm,
    Linear,
    Op,
    PositionEmbed,
    Reorder,
    RMSNorm,
    Rope,
    Route,
    Scale,
    ScaleRows,
    Sigmoid,
    SoftCap,
    TakeRows,
    Temperature,
    Value,
)
from invar.graph.routing import Routing


@dataclass
class GraphBuilder:
    """Collects operations in order; every method checks shapes and returns the new value."""

    source: WeightSource
    ops: list[Op] = field(default_factory=list)
    groups: dict[str, CacheGroup] = field(default_factory=dict)
    reordered: dict[tuple[Value, bytes], Value] = field(default_factory=dict)

    def embed(self, weight: str) -> Value:
        _, width = self._shape(weight, 2)
        self._expect_in_order(weight)
        return self._append(lambda out: Embed(out, weight), width)

    def position_embed(self, weight: str) -> Value:
        _, width = self._shape(weight, 2)
        return self._append(lambda out: PositionEmbed(out, weight), width)

    def scale(self, x: Value, factor: float) -> Value:
        return self._append(lambda out: Scale(out, x, factor), x.width)

    def rms_norm(self, x: Value, weight: str | None, eps: float, heads: int = 1) -> Value:
        if weight is not None:
            self._expect(weight, (x.width // heads,))
        return self._append(lambda out: RMSNorm(out, x, weight, eps, heads), x.width)

    def layer_norm(self, x: Value, weight: str, bias: str, eps: float) -> Value:
        self._expect(weight, (x.width,))
        self._expect(bias, (x.width,))
        return self._append(lambda out: LayerNorm(out, x, weight, bias, eps), x.width)

    def linear(self, x: Value, weight: str, bias: str | None = None) -> Value:
        """A weight of one dimension is a single row."""
        is_row = weight in self.source.tensors and len(self.source.tensors[weight].shape) == 1
        rows = 1 if is_row else self._shape(weight, 2)[0]
        self._expect(weight, (x.width,) if is_row else (rows, x.width))
        if bias is not None:
            self._expect(bias, (rows,))
        read = self._in_order_of(weight, x)
        return self._append(lambda out: Linear(out, read, weight, bias), rows)

    def _in_order_of(self, weight: str, x: Value) -> Value:
        """x with its columns as the weight has them: one value for all weights of that order."""
        order = column_order(self.source, weight)
        if order is None:
            return x
        key = x, order.tobytes()
        if key not in self.reordered:
            self.reordered[key] = self._append(lambda out: Reorder(out, x, weight), x.width)
        return self.reordered[key]

    def _expect_in_order(self, weight: str) -> None:
        if column_order(self.source, weight) is not None:
            raise GraphError(
                f"{weight}: columns in the order of their activations (act-order) are supported "
                "in plain linear layers, not here; use a checkpoint made without desc_act"
            )

    def rope(self, x: Value, heads: int, rope: Rope) -> Value:
        rotated = 2 * len(rope.inv_freq)
        if x.width % heads or x.width // heads < rotated:
            raise GraphError(
                f"rope of {self._origin(x)}: {heads} heads in a row of {x.width} "
                f"cannot rotate {rotated} dimensions each"
            )
        return self._append(lambda out: ApplyRope(out, x, heads, rope), x.width)

    def attention(
        self,
        q: Value,
        k: Value,
        v: Value,
        *,
        group: str,
        layer: int,
        heads: int,
        scale: float,
        soft_cap: float | None = None,
        sinks: str | None = None,
    ) -> Value:
        cache = self.groups[group]
        if k.width != cache.kv_heads * cache.head_dim or v.width != k.width:
            raise GraphError(
                f"attention {group}.{layer}: k and v have widths {k.width} and {v.width}, "
                f"the cache group wants {cache.kv_heads} heads of {cache.head_dim}"
            )
        if q.width != heads * cache.head_dim or heads % cache.kv_heads:
            raise GraphError(
                f"attention {group}.{layer}: q has width {q.width}, expected {heads} heads of "
                f"{cache.head_dim} over {cache.kv_heads} KV heads"
            )
        if sinks is not None:
            self._expect(sinks, (heads,))
        return self._append(
            lambda out: Attention(out, q, k, v, group, layer, heads, scale, soft_cap, sinks),
            q.width,
        )

    def activate(self, x: Value, activation: Activation) -> Value:
        if activation is Activation.SWIGLU_OAI:
            raise GraphError(f"activate: {activation} needs a second factor")
        return self._append(lambda out: Activate(out, x, activation), x.width)

    def gated(self, gate: Value, up: Value, activation: Activation) -> Value:
        self._same_width("gated", gate, up)
        return self._append(lambda out: Gated(out, gate, up, activation), gate.width)

    def add(self, a: Value, b: Value) -> Value:
        self._same_width("add", a, b)
        return self._append(lambda out: Add(out, a, b), a.width)

    def sigmoid(self, x: Value) -> Value:
        return self._append(lambda out: Sigmoid(out, x), x.width)

    def scale_rows(self, x: Value, factor: Value) -> Value:
        if factor.width != 1:
            raise GraphError(f"scale_rows: {self._origin(factor)} gives {factor.width} columns")
        return self._append(lambda out: ScaleRows(out, x, factor), x.width)

    def columns(self, x: Value, first: int, width: int, heads: int = 1) -> Value:
        if x.width % heads or not 0 <= first < first + width <= x.width // heads:
            raise GraphError(
                f"columns {first} to {first + width} of {self._origin(x)}: {heads} parts of a row "
                f"of {x.width}"
            )
        return self._append(lambda out: Columns(out, x, heads, first), heads * width)

    def join(self, a: Value, b: Value, heads: int = 1) -> Value:
        if a.width % heads or b.width % heads:
            raise GraphError(f"join: {heads} parts of rows of {a.width} and {b.width}")
        return self._append(lambda out: Join(out, a, b, heads), a.width + b.width)

    def headwise_linear(self, x: Value, weight: str) -> Value:
        heads, rows, columns = self._shape(weight, 3)
        self._expect_in_order(weight)
        if x.width % heads or x.width // heads < columns:
            raise GraphError(
                f"{weight}: shape {(heads, rows, columns)}, but {self._origin(x)} gives {x.width} "
                "columns for all heads"
            )
        return self._append(lambda out: HeadwiseLinear(out, x, weight, heads), heads * rows)

    def temperature(self, scale: float, length: int) -> Value:
        return self._append(lambda out: Temperature(out, scale, length), 1)

    def route(self, logits: Value, routing: Routing, bias: str | None = None) -> Value:
        experts, what = logits.width, self._origin(logits)
        if not 1 <= routing.groups_used <= routing.groups or experts % routing.groups:
            raise GraphError(
                f"{what}: {routing.groups_used} of {routing.groups} groups of {experts} experts"
            )
        size = experts // routing.groups
        if not 1 <= routing.group_best <= size:
            raise GraphError(f"{what}: the best {routing.group_best} of groups of {size} experts")
        if not 1 <= routing.used <= size * routing.groups_used:
            raise GraphError(
                f"{what}: {routing.used} experts are used of {size * routing.groups_used}"
            )
        if bias is not None:
            self._expect(bias, (experts,))
        return self._append(lambda out: Route(out, logits, routing, bias), 2 * routing.used)

    def experts(
        self,
        x: Value,
        routes: Value,
        *,
        gate: ExpertWeight,
        up: ExpertWeight,
        down: ExpertWeight,
        activation: Activation,
        weighted: bool = True,
    ) -> Value:
        route = next(op for op in self.ops if op.out == routes)
        assert isinstance(route, Route), "routes come from route()"
        count = route.logits.width
        _, inner, _ = self._shape(gate.weight, 3)
        _, width, _ = self._shape(down.weight, 3)
        for part, rows, columns in (
            (gate, inner, x.width),
            (up, inner, x.width),
            (down, width, inner),
        ):
            self._expect(part.weight, (count, rows, columns))
            self._expect_in_order(part.weight)
            if part.bias is not None:
                self._expect(part.bias, (count, rows))
        return self._append(
            lambda out: Experts(out, x, routes, gate, up, down, activation, weighted), width
        )

    def take_rows(self, x: Value) -> Value:
        return self._append(lambda out: TakeRows(out, x), x.width)

    def soft_cap(self, x: Value, cap: float) -> Value:
        return self._append(lambda out: SoftCap(out, x, cap), x.width)

    def cache_group(self, group: CacheGroup) -> None:
        self.groups[group.name] = group

    def finish(self, logits: Value, max_positions: int) -> Graph:
        return Graph(
            tuple(self.ops), tuple(self.groups.values()), logits, logits.width, max_positions
        )

    def _same_width(self, operation: str, a: Value, b: Value) -> None:
        if a.width != b.width:
            raise GraphError(
                f"{operation}: {self._origin(a)} gives {a.width} columns, "
                f"{self._origin(b)} {b.width}"
            )

    def _origin(self, value: Value) -> str:
        """What made a value, in the words of the model file."""
        op = next(op for op in self.ops if op.out == value)
        return str(getattr(op, "weight", type(op).__name__))

    def _append(self, make: Any, width: int) -> Value:
        out = Value(f"v{len(self.ops)}", width)
        self.ops.append(make(out))
        return out

    def _shape(self, weight: str, dims: int) -> tuple[int, ...]:
        if weight not in self.source.tensors:
            raise GraphError(f"{weight}: the model file has no such tensor")
        shape = tuple(self.source.tensors[weight].shape)
        if len(shape) != dims:
            raise GraphError(f"{weight}: shape {shape}, expected {dims} dimensions")
        return shape

    def _expect(self, weight: str, shape: tuple[int, ...]) -> None:
        found = self._shape(weight, len(shape))
        if found != shape:
            raise GraphError(f"{weight}: shape {found}, expected {shape}")
