"""Builds the native plan from lowered calls: the only place that knows both sides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from invar import _native
from invar.backends.cpu.layout import Buffer, SlabLayout
from invar.backends.cpu.lowered import (
    Call,
    ColumnsOf,
    FirstFault,
    HeadUse,
    Lowered,
    Ones,
    OrderOf,
    RawWeight,
    SegmentUse,
    Vector,
)
from invar.backends.cpu.packing import vector_values
from invar.graph.graph import WeightSource, column_order, raw_rows
from invar.graph.operations import CacheGroup


@dataclass(frozen=True)
class PlanMemory:
    """What a plan points to; all of it is allocated before the plan is built."""

    workspace: _native.Memory
    weights: _native.Memory
    arena: _native.Memory


@dataclass(frozen=True)
class PlanShape:
    """Limits and scratch of a native plan."""

    isa: str
    threads: int
    max_tokens: int
    max_sequences: int
    vocab_size: int
    scratch_offset: int  # in the workspace, behind the buffers
    scratch_bytes: int  # per thread
    sampling_scratch_bytes: int  # per thread
    partials: int  # results of attention over one split, for a query token and a KV head
    partial_bytes: int

    @property
    def thread_bytes(self) -> int:
        """Scratch of all threads."""
        return self.threads * (self.scratch_bytes + self.sampling_scratch_bytes)


def emit(
    lowered: Lowered,
    source: WeightSource,
    memory: PlanMemory,
    shape: PlanShape,
    groups: tuple[CacheGroup, ...],
    slabs: SlabLayout,
    first_fault: npt.NDArray[np.int32],
) -> _native.Plan:
    """The finished plan. It keeps alive what it points to.

    first_fault ``[max_tokens]``: where the checks of an eager plan note their number.
    """
    plan = _native.Plan(
        isa=shape.isa,
        memory=memory.workspace,
        scratch_offset=shape.scratch_offset,
        max_tokens=shape.max_tokens,
        max_sequences=shape.max_sequences,
        embedding_rows=source.tensors[lowered.embedding].shape[0],
        vocab=shape.vocab_size,
        threads=shape.threads,
        scratch_bytes=shape.scratch_bytes,
        sampling_scratch_bytes=shape.sampling_scratch_bytes,
        partials=shape.partials,
        partial_bytes=shape.partial_bytes,
    )
    for group, page_bytes, per_slab in zip(
        groups, slabs.page_bytes, slabs.pages_per_slab, strict=True
    ):
        plan.cache_group(
            memory=memory.arena,
            slab_bytes=slabs.slab_bytes,
            page_bytes=page_bytes,
            pages_per_slab=per_slab,
            slabs=memory.arena.bytes // slabs.slab_bytes,
            kv_heads=group.kv_heads,
            head_dim=group.head_dim,
            window=group.window or 0,
            chunked=group.chunked,
            format=group.kv_format,
        )
    _number_buffers(plan, lowered.buffers)
    for grouping in lowered.groupings:
        plan.grouping(experts=grouping.experts, used=grouping.used)
    resolver = _Resolver(plan, source, memory.weights, first_fault)
    for call in lowered.calls:
        resolver.make(call)
    plan.finish()
    return plan


def _number_buffers(plan: _native.Plan, buffers: list[Buffer]) -> None:
    for buffer in buffers:
        if buffer.act_format is None:
            buffer.number = plan.matrix(offset=buffer.offset, width=buffer.width, rows=buffer.rows)
        else:
            buffer.number = plan.activations(
                offset=buffer.offset,
                format=buffer.act_format,
                k=buffer.width,
                rows=buffer.rows,
            )


class _Resolver:
    """Turns arguments of calls into what the native side takes."""

    def __init__(
        self,
        plan: _native.Plan,
        source: WeightSource,
        weights: _native.Memory,
        first_fault: npt.NDArray[np.int32],
    ) -> None:
        self.plan = plan
        self.source = source
        self.weights = weights
        self.first_fault = first_fault
        self.vectors: dict[str, npt.NDArray[np.float32]] = {}

    def make(self, call: Call) -> None:
        arguments = {name: self.resolve(value) for name, value in call.arguments.items()}
        getattr(self.plan, call.method)(**arguments)

    def resolve(self, argument: Any) -> Any:
        match argument:
            case Buffer():
                return argument.number
            case Vector():
                return self.vector(argument)
            case ColumnsOf():
                return self.plan.matrix_columns(
                    argument.buffer.number, first=argument.first, width=argument.width
                )
            case Ones():
                return np.ones(argument.width, np.float32)
            case RawWeight():
                return np.ascontiguousarray(raw_rows(self.source, argument.tensor))
            case OrderOf():
                return column_order(self.source, argument.tensor)
            case SegmentUse():
                return self.segment(argument)
            case HeadUse():
                return self.head(argument)
            case FirstFault():
                return self.first_fault
        return argument

    def activations(self, use: SegmentUse) -> int:
        if use.heads == 1:
            return use.x.number
        return self.plan.head_activations(use.x.number, heads=use.heads, head=use.head)

    def vector(self, use: Vector | None) -> npt.NDArray[np.float32] | None:
        if use is None:
            return None
        if use.tensor not in self.vectors:
            self.vectors[use.tensor] = vector_values(self.source, use.tensor)
        return self.vectors[use.tensor]

    def segment(self, use: SegmentUse) -> _native.Segment:
        return _native.Segment(
            format=use.weight.weight_format,
            x=self.activations(use),
            memory=self.weights,
            offset=use.weight.offset,
            unit_stride=use.weight.unit_stride,
            panels_per_unit=use.weight.panels_per_unit,
            panels=use.weight.panels,
        )

    def head(self, use: HeadUse) -> _native.HeadTransform:
        return _native.HeadTransform(
            bias=self.vector(use.bias),
            norm=self.vector(use.norm),
            eps=use.eps,
            rope_table=use.rope_table.number if use.rope_table else None,
            rope_style=str(use.rope.style) if use.rope else "",
            rope_pairs=len(use.rope.inv_freq) if use.rope else 0,
        )
