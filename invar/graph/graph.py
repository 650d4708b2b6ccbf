"""A model as a list of operations on named values.

A value is a matrix ``[tokens, width]`` of fp32; tokens are the rows of a step, whatever requests
they belong to. Weights are named as in the weight source (for GGUF: its tensor names) and have
shape ``[rows, columns]`` = ``[out_features, in_features]``. The numpy meaning of every operation is
in ``interpreter.py``; the CPU meaning in ``backends/cpu``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import numpy as np


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
        """The stored bytes, uint8 ``[rows, row_bytes]``, without a copy."""

    def dequantize(self, name: str) -> np.ndarray:
        """float32 values, shaped as the tensor."""


class RopeStyle(StrEnum):
    INTERLEAVED = "interleaved"  # pairs (2i, 2i + 1)
    HALF = "half"  # pairs (i, i + dim / 2)


@dataclass(frozen=True)
class Rope:
    """Rotation of the first ``2 * len(inv_freq)`` dimensions of every head."""

    inv_freq: tuple[float, ...]  # double precision; angle = position * inv_freq
    style: RopeStyle
    magnitude: float = 1.0  # factor on cos and sin (YaRN)


class Activation(StrEnum):
    SILU = "silu"
    GELU_TANH = "gelu_tanh"


class KVFormat(StrEnum):
    """How K and V are stored between steps; `contract.py` says what each rounds."""

    BF16 = "bf16"
    FP16 = "fp16"
    INT8 = "int8"  # codes with a scale per token and head


@dataclass(frozen=True)
class CacheGroup:
    """Layers of one kind that share a block table."""

    name: str  # "full", "window"
    layers: int
    kv_heads: int
    head_dim: int
    window: int | None = None  # tokens that a query sees, itself included
    kv_format: KVFormat = KVFormat.BF16


# ---------------------------------------------------------------- operations


@dataclass(frozen=True)
class Embed:
    """Rows of a weight ``[vocab, width]`` by token id."""

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
    weight: str
    eps: float
    heads: int = 1


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
    KV head ``h // (heads / kv_heads)``.
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


Op = Embed | Scale | RMSNorm | Linear | ApplyRope | Attention | Gated | Add | TakeRows | SoftCap


@dataclass(frozen=True)
class Graph:
    ops: tuple[Op, ...]
    groups: tuple[CacheGroup, ...]
    logits: Value
    vocab_size: int
    max_positions: int  # the context length the weights were trained or scaled for

    def weight_names(self) -> set[str]:
        """Every weight and bias that an operation reads."""
        named = (getattr(op, part, None) for op in self.ops for part in ("weight", "bias"))
        return {name for name in named if name is not None}


class GraphError(ValueError):
    """A model that does not fit together: names the operation, the weight and both shapes."""


@dataclass
class GraphBuilder:
    """Collects operations in order; every method checks shapes and returns the new value."""

    source: WeightSource
    ops: list[Op] = field(default_factory=list)
    groups: dict[str, CacheGroup] = field(default_factory=dict)

    def embed(self, weight: str) -> Value:
        _, width = self._shape(weight, 2)
        return self._append(lambda out: Embed(out, weight), width)

    def scale(self, x: Value, factor: float) -> Value:
        return self._append(lambda out: Scale(out, x, factor), x.width)

    def rms_norm(self, x: Value, weight: str, eps: float, heads: int = 1) -> Value:
        self._expect(weight, (x.width // heads,))
        return self._append(lambda out: RMSNorm(out, x, weight, eps, heads), x.width)

    def linear(self, x: Value, weight: str, bias: str | None = None) -> Value:
        rows, _ = self._shape(weight, 2)
        self._expect(weight, (rows, x.width))
        if bias is not None:
            self._expect(bias, (rows,))
        return self._append(lambda out: Linear(out, x, weight, bias), rows)

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
        return self._append(
            lambda out: Attention(out, q, k, v, group, layer, heads, scale, soft_cap), q.width
        )

    def gated(self, gate: Value, up: Value, activation: Activation) -> Value:
        self._same_width("gated", gate, up)
        return self._append(lambda out: Gated(out, gate, up, activation), gate.width)

    def add(self, a: Value, b: Value) -> Value:
        self._same_width("add", a, b)
        return self._append(lambda out: Add(out, a, b), a.width)

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
