"""Linear layers as native calls: their codes, their weights' parts, and what takes the results."""

from __future__ import annotations

from typing import TYPE_CHECKING

from invar import _native
from invar.backends.cpu.formats import ACT_BLOCKS
from invar.backends.cpu.lowered import ColumnsOf, SegmentUse, vector
from invar.graph.fused import GatedLinear, LinearAdd, MergedLinear, Segment
from invar.graph.graph import GraphError
from invar.graph.operations import HeadwiseLinear, Linear, Value

if TYPE_CHECKING:
    from invar.backends.cpu.lower import Lowering


def lower_linear(lowering: Lowering, op: Linear) -> None:
    stores(lowering, op.x, [Segment(op.weight, op.bias)], [op.out], None)


def lower_merged_linear(lowering: Lowering, op: MergedLinear) -> None:
    stores(lowering, op.x, list(op.segments), list(op.outs), None)


def lower_linear_add(lowering: Lowering, op: LinearAdd) -> None:
    stores(lowering, op.x, [op.segment], [op.out], op.residual)


def stores(
    lowering: Lowering, x: Value, segments: list[Segment], outs: list[Value], residual: Value | None
) -> None:
    uses = [lowering.place(x, [segment], 1)[0] for segment in segments]
    lowering.begin("begin_linear")
    for use, segment, out in zip(uses, segments, outs, strict=True):
        lowering.touch(use.x)
        lowering.call(
            "part_store",
            segment=use,
            n=out.width,
            out=lowering.touch(lowering.define(out)),
            bias=vector(segment.bias),
            residual=lowering.touch(lowering.floats(residual)) if residual else None,
        )


def lower_headwise_linear(lowering: Lowering, op: HeadwiseLinear) -> None:
    """A part for each head: a share of the weight, of the codes' rows and of the columns."""
    _, rows, columns = lowering.source.tensors[op.weight].shape
    if rows % _native.PANEL_COLUMNS:
        raise GraphError(
            f"{op.weight}: the CPU backend wants heads of whole panels of "
            f"{_native.PANEL_COLUMNS} rows, not of {rows}"
        )
    segment = Segment(op.weight)
    codes = lowering.buffer(columns, lowering.act_format(segment), per_row=op.heads)
    lowering.row("quantize_heads", x=lowering.floats(op.x), heads=op.heads, out=codes)
    (weight,) = lowering.pack([lowering.part(segment)], 1)
    lowering.begin("begin_linear")
    lowering.touch(codes)
    out = lowering.touch(lowering.define(op.out))
    for head in range(op.heads):
        lowering.call(
            "part_store",
            segment=SegmentUse(weight.of_stack(head, op.heads), codes, heads=op.heads, head=head),
            n=rows,
            out=ColumnsOf(out, head * rows, rows),
            bias=None,
            residual=None,
        )


def lower_gated_linear(lowering: Lowering, op: GatedLinear) -> None:
    act_format = lowering.only_format(op.out)
    panels = 1
    if act_format is not None:
        panels = max(1, ACT_BLOCKS[act_format] // _native.PANEL_COLUMNS)
        if not lowering.fair_units(op.out.width // (panels * _native.PANEL_COLUMNS), panels):
            act_format, panels = None, 1
    gate, up = lowering.place(op.x, [op.gate, op.up], panels)
    lowering.begin("begin_linear")
    lowering.touch(gate.x)
    lowering.touch(up.x)
    lowering.call(
        "part_gated",
        gate=gate,
        up=up,
        n=op.out.width,
        activation=str(op.activation),
        gate_bias=vector(op.gate.bias),
        up_bias=vector(op.up.bias),
        **lowering.output(op.out, act_format),
    )
