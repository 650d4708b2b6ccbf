"""Mixtures of experts as native steps (native/runtime/steps_experts.h).

The pairs (token, slot) of a step become *expert rows*, sorted by expert; buffers of expert rows
have as many rows for every token as it uses experts. Codes of a token are made once and copied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from invar import _native
from invar.backends.cpu.formats import ACT_BLOCKS, WHOLE_ROWS, weight_format
from invar.backends.cpu.layout import Buffer, PackedWeight
from invar.backends.cpu.lowered import Grouping, SegmentUse, vector
from invar.graph.fused import Segment
from invar.graph.graph import GraphError
from invar.graph.operations import Experts, ExpertWeight, Route

if TYPE_CHECKING:
    from invar.backends.cpu.lower import Lowering


def lower_route(lowering: Lowering, op: Route) -> None:
    if op.logits.width > _native.MAX_EXPERTS:
        raise GraphError(
            f"{op.logits.name}: the CPU backend cannot run {op.logits.width} experts, only up to "
            f"{_native.MAX_EXPERTS}"
        )
    routing = op.routing
    lowering.row(
        "route",
        logits=lowering.floats(op.logits),
        bias=vector(op.bias),
        scoring=str(routing.scoring),
        used=routing.used,
        normalise=routing.normalise,
        scale=routing.scale,
        groups=routing.groups,
        groups_used=routing.groups_used,
        group_best=routing.group_best,
        out=lowering.define(op.out),
    )


def lower_experts(lowering: Lowering, op: Experts) -> None:
    experts, inner, _ = lowering.source.tensors[op.gate.weight].shape
    step = _ExpertsLowering(lowering, op, experts, inner)
    codes = step.gather()
    step.down(step.gated(codes))
    lowering.row(
        "combine",
        x=step.results,
        routes=lowering.floats(op.routes),
        grouping=step.grouping,
        weighted=op.weighted,
        out=lowering.define(op.out),
    )


class _ExpertsLowering:
    def __init__(self, lowering: Lowering, op: Experts, experts: int, inner: int) -> None:
        for part, rows in ((op.gate, inner), (op.down, op.out.width)):
            if rows % _native.PANEL_COLUMNS:
                raise GraphError(
                    f"{part.weight}: the CPU backend wants experts of whole panels of "
                    f"{_native.PANEL_COLUMNS} rows, not of {rows}"
                )
        self.lowering = lowering
        self.op = op
        self.experts = experts
        self.inner = inner
        self.grouping = lowering.result.grouping(Grouping(experts, op.used))
        self.results = self.expert_rows(op.out.width, None)

    def expert_rows(self, width: int, act_format: str | None) -> Buffer:
        return self.lowering.buffer(width, act_format, per_row=self.op.used)

    def act_format(self, part: ExpertWeight) -> str:
        return _native.act_format_of(weight_format(self.lowering.source, part.weight))

    def gather(self) -> dict[str, Buffer]:
        """Sorts the rows; codes of expert rows for gate and up, by their format."""
        low, op = self.lowering, self.op
        formats = dict.fromkeys(self.act_format(part) for part in (op.gate, op.up))
        tokens = {name: low.activations(op.x, name) for name in formats}
        low.begin("")
        low.call("group_experts", routes=low.touch(low.floats(op.routes)), grouping=self.grouping)
        codes = {}
        for name, of_tokens in tokens.items():
            low.begin("")
            codes[name] = self.expert_rows(op.x.width, name)
            low.call(
                "gather",
                x=low.touch(of_tokens),
                grouping=self.grouping,
                out=low.touch(codes[name]),
            )
        return codes

    def place(self, parts: list[ExpertWeight], panels_per_unit: int) -> list[PackedWeight]:
        """The matrices of all experts below each other."""
        stacks = [self.lowering.part(Segment(part.weight)) for part in parts]
        return self.lowering.pack(stacks, panels_per_unit)

    def gated(self, codes: dict[str, Buffer]) -> Buffer:
        """activation(gate) * up in codes for down: at once where a unit is whole blocks of them."""
        low, op = self.lowering, self.op
        wanted = self.act_format(op.down)
        block = ACT_BLOCKS[wanted]
        panels = max(1, block // _native.PANEL_COLUMNS)
        columns = panels * _native.PANEL_COLUMNS
        if self.inner % block:
            raise GraphError(
                f"{op.down.weight}: {self.inner} columns are not whole blocks of {block}, which "
                "its format needs"
            )
        fair = low.fair_units(op.used * self.inner // columns, panels)
        at_once = not low.eager and fair and wanted != WHOLE_ROWS
        gate, up = self.place([op.gate, op.up], panels if at_once else 1)
        low.begin("")
        out = self.expert_rows(self.inner, wanted if at_once else None)
        low.call(
            "experts_gated",
            gate=SegmentUse(gate, low.touch(codes[self.act_format(op.gate)]), self.share),
            up=SegmentUse(up, low.touch(codes[self.act_format(op.up)]), self.share),
            grouping=self.grouping,
            n=self.inner,
            activation=str(op.activation),
            gate_bias=vector(op.gate.bias),
            up_bias=vector(op.up.bias),
            out=None if at_once else low.touch(out),
            act=low.touch(out) if at_once else None,
        )
        if at_once:
            return out
        low.begin("")
        coded = self.expert_rows(self.inner, wanted)
        low.call("quantize_experts", x=low.touch(out), grouping=self.grouping, out=low.touch(coded))
        return coded

    def down(self, x: Buffer) -> None:
        low, op = self.lowering, self.op
        (weight,) = self.place([op.down], 1)
        low.begin("")
        low.call(
            "experts_store",
            segment=SegmentUse(weight, low.touch(x), self.share),
            grouping=self.grouping,
            n=op.out.width,
            bias=vector(op.down.bias),
            out=low.touch(self.results),
        )

    @property
    def share(self) -> float:
        """Of the weights, that one token needs."""
        return self.op.used / self.experts
