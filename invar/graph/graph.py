"""A model as a list of operations on named values.

A value is a matrix ``[tokens, width]`` of fp32; tokens are the rows of a step, whatever requests
they belong to. Weights are named as in the weight source (for GGUF: its tensor names) and have
shape ``[rows, columns]`` = ``[out_features, in_features]``. The numpy meaning of every operation is
in ``interpreter.py``; the CPU meaning in ``backends/cpu``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from invar.graph.routing import Routing


@dataclass(frozen=True)
class Value:
    """The result of an operation, ``[tokens, width]``."""

    name: str
    width: int


class WeightSource(Protocol):
    """What a graph's weights are read from; ``weights.gguf.GGUFFile`` is one."""

    @property
    def tensors(self) -> Mapping[str, Any]:
        """name → an object with ``shape: tuple[int, ...]`` (numpy order) and ``type``."""

    def raw(self, name: str) -> np.ndarray:
        """The stored bytes, uint8, row by row, without a copy: in two dimensions those of a matrix,
        ``[rows, row_bytes]``."""

    def dequantize(self, name: str) -> np.ndarray:
        """float32 values, shaped as the tensor."""


def raw_rows(source: WeightSource, weight: str) -> np.ndarray:
    """The stored bytes ``[rows, row_bytes]``; a vector has one row, the matrices of a stack stand
    below each other."""
    return source.raw(weight).reshape(math.prod(source.tensors[weight].shape[:-1]), -1)


def column_order(source: WeightSource, weight: str) -> npt.NDArray[np.int32] | None:
    """The input feature that each stored column of a weight belongs to, ``[columns]``; None: they
    stand in their order. Sources without such weights need not know of it."""
    told = getattr(source, "column_order", None)
    return None if told is None else cast("npt.NDArray[np.int32] | None", told(weight))


class RopeStyle(StrEnum):
    INTERLEAVED = "interleaved"  # pairs (2i, 2i + 1)
    HALF = "half"  # pairs (i, i + dim / 2)


@dataclass(frozen=True)
class ShorterRope:
    """Frequencies that hold instead where no request is longer than `positions`."""

    positions: int
    inv_freq: tuple[float, ...]


@dataclass(frozen=True)
class Rope:
    """Rotation of the first ``2 * len(inv_freq)`` dimensions of every head."""

    inv_freq: tuple[float, ...]  # double precision; angle = position * inv_freq
    style: RopeStyle
    magnitude: float = 1.0  # factor on cos and sin (YaRN)
    shorter: ShorterRope | None = None  # `passes.with_longest` decides


class Activation(StrEnum):
    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    GELU = "gelu"
    SWIGLU_OAI = "swiglu_oai"  # of GPT-OSS: clamped, x * sigmoid(1.702 x), up + 1


class KVFormat(StrEnum):
    """How K and V are stored between steps; `contract.py` says what each rounds."""

    BF16 = "bf16"
    FP16 = "fp16"
    INT8 = "int8"  # codes with a scale per token and head


@dataclass(frozen=True)
class CacheGroup:
    """Layers of one kind that share a block table."""

    name: str  # "full", "window", "latent"
    layers: int
    kv_heads: int
    head_dim: int
    window: int | None = None  # tokens that a query sees, itself included
    kv_format: KVFormat = KVFormat.BF16
    chunked: bool = False  # it sees those of its own run of `window` tokens, no others


# ---------------------------------------------------------------- operations


@dataclass(frozen=True)
class Embed:
    """Rows of a weight ``[vocab, width]`` by token id."""

    out: Value
    weight: str


@dataclass(frozen=True)
class PositionEmbed:
    """Rows of a weight ``[positions, width]`` by the position of a token in its sequence."""

    out: Value
    weight: str


@dataclass(frozen=True)
class Scale:
    out: Value
    x: Value
    factor: float


@dataclass(frozen=True)
class RMSNorm:
    """``x / sqrt(mean(x²) + eps) * weight``, over each of ``heads`` equal parts of the row."""

    out: Value
    x: Value
    weight: str | None  # none: ones
    eps: float
    heads: int = 1


@dataclass(frozen=True)
class LayerNorm:
    """``(x - mean(x)) / sqrt(mean((x - mean(x))²) + eps) * weight + bias``."""

    out: Value
    x: Value
    weight: str
    bias: str
    eps: float


@dataclass(frozen=True)
class Linear:
    """``x @ weight.T (+ bias)``."""

    out: Value
    x: Value
    weight: str
    bias: str | None = None


@dataclass(frozen=True)
class ApplyRope:
    out: Value
    x: Value
    heads: int
    rope: Rope


@dataclass(frozen=True)
class Attention:
    """Writes k and v to the cache and attends causally over it (window: from the group).

    q ``[tokens, heads * head_dim]``, k and v ``[tokens, kv_heads * head_dim]``; query head h uses
    KV head ``h // (heads / kv_heads)``. A sink, one of ``[heads]``, is a logit more in the softmax
    of its head that brings no value.
    """

    out: Value
    q: Value
    k: Value
    v: Value
    group: str
    layer: int  # index inside the group
    heads: int
    scale: float
    soft_cap: float | None = None
    sinks: str | None = None


@dataclass(frozen=True)
class Activate:
    out: Value
    x: Value
    activation: Activation


@dataclass(frozen=True)
class Gated:
    """``activation(gate) * up``."""

    out: Value
    gate: Value
    up: Value
    activation: Activation


@dataclass(frozen=True)
class Add:
    out: Value
    a: Value
    b: Value


@dataclass(frozen=True)
class Sigmoid:
    out: Value
    x: Value


@dataclass(frozen=True)
class ScaleRows:
    """``x * factor``, where factor has one column."""

    out: Value
    x: Value
    factor: Value


@dataclass(frozen=True)
class Columns:
    """Columns ``[first, first + width)`` of each of ``heads`` equal parts of the row."""

    out: Value
    x: Value
    heads: int
    first: int


@dataclass(frozen=True)
class Join:
    """Of each of ``heads`` parts of the row, that of a and then that of b."""

    out: Value
    a: Value
    b: Value
    heads: int


@dataclass(frozen=True)
class Reorder:
    """Columns of x in the order in which a weight stores its own (`column_order`)."""

    out: Value
    x: Value
    like: str


@dataclass(frozen=True)
class HeadwiseLinear:
    """``x_h @ weight[h].T`` for each head: weight ``[heads, rows, columns]``.

    x_h is the first ``columns`` of the h-th of ``heads`` equal parts of the row.
    """

    out: Value
    x: Value
    weight: str
    heads: int


@dataclass(frozen=True)
class Temperature:
    """``1 + scale * log(1 + floor((position + 1) / length))``, one column: what Llama 4 multiplies
    the queries of layers without positions by."""

    out: Value
    scale: float
    length: int


@dataclass(frozen=True)
class Route:
    """A token's experts, best first, then their weights: ``[tokens, 2 * used]`` from ``[tokens,
    experts]``. The bias is added to scores for the choice alone."""

    out: Value
    logits: Value
    routing: Routing
    bias: str | None = None


@dataclass(frozen=True)
class ExpertWeight:
    """A weight ``[experts, rows, columns]`` with a bias ``[experts, rows]``."""

    weight: str
    bias: str | None = None


@dataclass(frozen=True)
class Experts:
    """``sum over slots of weight * down(activation(gate(x)) * up(x))``, in the order of slots.

    Slot s of a token has expert ``routes[s]`` and, if ``weighted``, weight ``routes[used + s]``,
    else 1.
    """

    out: Value
    x: Value
    routes: Value
    gate: ExpertWeight
    up: ExpertWeight
    down: ExpertWeight
    activation: Activation
    weighted: bool = True

    @property
    def used(self) -> int:
        return self.routes.width // 2


@dataclass(frozen=True)
class TakeRows:
    """The rows whose logits are needed; everything after it works on these rows alone."""

    out: Value
    x: Value


@dataclass(frozen=True)
class SoftCap:
    """``cap * tanh(x / cap)``."""

    out: Value
    x: Value
    cap: float


Op = (
    Embed
    | PositionEmbed
    | Scale
    | RMSNorm
    | LayerNorm
    | Linear
    | ApplyRope
    | Attention
    | Activate
    | Gated
    | Add
    | Sigmoid
    | ScaleRows
    | Columns
    | Join
    | Reorder
    | HeadwiseLinear
    | Temperature
    | Route
    | Experts
    | TakeRows
    | SoftCap
)


@dataclass(frozen=True)
class Graph:
    ops: tuple[Op, ...]
    groups: tuple[CacheGroup, ...]
    logits: Value
    vocab_size: int
    max_positions: int  # the context length the weights were trained or scaled for

    def weight_names(self) -> set[str]:
        """Every weight and bias that an operation reads."""
        experts = [op for op in self.ops if isinstance(op, Experts)]
        readers = [*self.ops, *(part for op in experts for part in (op.gate, op.up, op.down))]
        parts = ("weight", "bias", "sinks")
        named = (getattr(op, part, None) for op in readers for part in parts)
        return {name for name in named if name is not None}


class GraphError(ValueError):
    """A model that does not fit together: names the operation, the weight and both shapes."""


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
