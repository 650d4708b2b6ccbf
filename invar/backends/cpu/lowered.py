"""A lowered graph: the calls that build its plan, its buffers and its weights' places."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from invar import _native
from invar.backends.cpu.layout import Buffer, PackedWeight, WeightLayout
from invar.graph.fused import FusedOp
from invar.graph.operations import KVFormat, Rope


@dataclass(frozen=True)
class Vector:
    """A weight that is read as fp32 values: norms and biases."""

    tensor: str


def vector(tensor: str | None) -> Vector | None:
    return None if tensor is None else Vector(tensor)


@dataclass(frozen=True)
class Ones:
    """The weight of a norm that has none."""

    width: int


@dataclass(frozen=True)
class RawWeight:
    """A weight that is read in the file's own layout: embeddings."""

    tensor: str


@dataclass(frozen=True)
class OrderOf:
    """The order of a weight's columns (`graph.column_order`)."""

    tensor: str


@dataclass(frozen=True)
class ColumnsOf:
    """Some columns of a buffer, whole panels."""

    buffer: Buffer
    first: int
    width: int


@dataclass(frozen=True)
class SegmentUse:
    weight: PackedWeight
    x: Buffer
    share: float = 1.0  # of the weight, that one row needs: a few experts of many
    heads: int = 1  # x has a row for every token and head, of which those of one head are meant
    head: int = 0

    @property
    def all_bytes(self) -> int:
        panel = _native.panel_bytes(self.weight.weight_format, self.weight.columns)
        return self.weight.panels * panel

    @property
    def row_bytes(self) -> int:
        """Read for one row."""
        return round(self.all_bytes * self.share)


@dataclass(frozen=True)
class Grouping:
    """Sorts the rows of mixtures of so many experts, of which a token uses so many."""

    experts: int
    used: int


@dataclass(frozen=True)
class HeadUse:
    bias: Vector | None
    norm: Vector | None
    eps: float
    rope: Rope | None
    rope_table: Buffer | None


@dataclass(frozen=True)
class FirstFault:
    """Where an eager plan notes the first bad value of every token."""


@dataclass(frozen=True)
class Call:
    """A method of the native plan; buffers, vectors and segments among the arguments are resolved
    when the plan is made."""

    method: str
    arguments: dict[str, Any]
    op: FusedOp | None = None  # that it is part of; None: the plan's own


@dataclass(frozen=True)
class AttentionShape:
    """What the scratch of attention depends on."""

    kv_format: KVFormat
    heads: int  # of q, per KV head
    head_dim: int


PHASES = (  # calls that begin one
    *("begin_rows", "begin_linear", "attention", "sample"),
    *("group_experts", "gather", "experts_gated", "quantize_experts", "experts_store"),
)


@dataclass
class Lowered:
    calls: list[Call] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    weights: WeightLayout = field(default_factory=WeightLayout)
    groupings: list[Grouping] = field(default_factory=list)
    embedding: str = ""
    logits: Buffer | None = None
    tile_columns: int = 0  # of the widest linear part
    attention: set[AttentionShape] = field(default_factory=set)
    checked: list[FusedOp] = field(default_factory=list)  # check n is of the value of operation n-1

    def grouping(self, grouping: Grouping) -> int:
        """Its number; layers of the same numbers share one."""
        if grouping not in self.groupings:
            self.groupings.append(grouping)
        return self.groupings.index(grouping)

    @property
    def phases(self) -> list[list[Call]]:
        """The calls of each phase, in the order in which the plan runs them."""
        phases: list[list[Call]] = []
        for call in self.calls:
            if call.method in PHASES:
                phases.append([])
            if phases and call.method not in ("begin_rows", "begin_linear", "begin_head"):
                phases[-1].append(call)
        return phases
