"""A lowered graph: the calls that build its plan, its buffers and its weights' places."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from invar.backends.cpu.layout import Buffer, PackedWeight, WeightLayout
from invar.graph.fused import FusedOp
from invar.graph.graph import KVFormat, Rope


@dataclass(frozen=True)
class Vector:
    """A weight that is read as fp32 values: norms and biases."""

    tensor: str


@dataclass(frozen=True)
class RawWeight:
    """A weight that is read in the file's own layout: embeddings."""

    tensor: str


@dataclass(frozen=True)
class SegmentUse:
    weight: PackedWeight
    x: Buffer


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


PHASES = ("begin_rows", "begin_linear", "attention", "sample")  # calls that begin one


@dataclass
class Lowered:
    calls: list[Call] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    weights: WeightLayout = field(default_factory=WeightLayout)
    embedding: str = ""
    logits: Buffer | None = None
    tile_columns: int = 0  # of the widest linear part
    attention: set[AttentionShape] = field(default_factory=set)
    checked: list[FusedOp] = field(default_factory=list)  # check n is of the value of operation n-1

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
