"""The operations of a graph and what they are told: values, rope, caches.

The numpy meaning of every operation is in ``interpreter.py`` and ``functions.py``; the CPU
meaning in ``backends/cpu``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from invar.graph.routing import Routing


@dataclass(frozen=True)
class Value:
    """The result of an operation, ``[tokens, width]``."""

    name: str
    width: int


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
