"""From a graph to the calls that build its native plan.

A plan is a list of *phases*: the next one starts when all items of this one are done. Row
operations that follow each other share a phase, whatever they are (norm, quantise, add, …): a
thread runs all of them on its rows. Activation codes of a value are made once per format, when the
first linear asks for them, or at once by the operation that makes the value if nobody wants it in
fp32.

An *eager* plan has a phase for every operation, every value in fp32, and behind each operation a
check of its value. Given the graph as the model file wrote it, it says which operation made a NaN
and what each one costs; the bits are the same, since fusion changes none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from invar import _native
from invar.backends.cpu.formats import ACT_BLOCKS, WHOLE_ROWS, weight_format
from invar.backends.cpu.layout import Buffer, PackedWeight, WeightPart
from invar.backends.cpu.lower_attention import (
    lower_attention,
    lower_heads_linear,
    lower_store_kv,
)
from invar.backends.cpu.lower_experts import lower_experts, lower_route
from invar.backends.cpu.lower_linear import (
    lower_gated_linear,
    lower_headwise_linear,
    lower_linear,
    lower_linear_add,
    lower_merged_linear,
)
from invar.backends.cpu.lowered import (
    Call,
    FirstFault,
    Lowered,
    Ones,
    OrderOf,
    RawWeight,
    SegmentUse,
    Vector,
)
from invar.graph.fused import (
    FusedGraph,
    FusedOp,
    GatedLinear,
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
from invar.graph.graph import GraphError, WeightSource
from invar.graph.operations import (
    Activate,
    Add,
    ApplyRope,
    Columns,
    Embed,
    Experts,
    Gated,
    HeadwiseLinear,
    Join,
    LayerNorm,
    Linear,
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

UNITS_PER_THREAD = 8
"""A feed-forward that quantises its own output works in units of a whole activation block (256
columns for K-quants). Below this many units per thread the shares become too uneven."""


def lower(
    graph: FusedGraph, source: WeightSource, max_tokens: int, threads: int, eager: bool = False
) -> Lowered:
    """Raises ``GraphError`` for what the backend cannot run, naming it."""
    lowering = Lowering(graph, source, max_tokens, threads, eager)
    for op in graph.ops:
        lowering.op(op)
    return lowering.finish()


class Lowering:
    def __init__(
        self,
        graph: FusedGraph,
        source: WeightSource,
        max_tokens: int,
        threads: int,
        eager: bool,
    ) -> None:
        self.graph = graph
        self.source = source
        self.threads = threads
        self.eager = eager
        self.current: FusedOp | None = None
        self.rows = max_tokens
        self.result = Lowered()
        self.phase = -1
        self.in_rows = False
        self.head_phase: int | None = None
        self.values: dict[Value, Buffer] = {}
        self.codes: dict[tuple[Value, str], Buffer] = {}
        self.ropes: dict[Rope, Buffer] = {}
        self.groups = {group.name: index for index, group in enumerate(graph.groups)}
        self.readers: dict[Value, list[FusedOp]] = {}
        for op in graph.ops:
            for value in inputs(op):
                self.readers.setdefault(value, []).append(op)
        self._rope_tables()

    # ------------------------------------------------------------ phases and buffers

    def begin(self, method: str) -> None:
        self.phase += 1
        self.in_rows = method == "begin_rows"
        if method:
            self.call(method)

    def call(self, method: str, **arguments: Any) -> None:
        self.result.calls.append(Call(method, arguments, self.current))

    def row(self, method: str, **arguments: Any) -> None:
        """A row operation, in the open phase of rows or a new one."""
        if not self.in_rows or self.eager:
            self.begin("begin_rows")
        for argument in arguments.values():
            if isinstance(argument, Buffer):
                self.touch(argument)
        self.call(method, **arguments)

    def touch(self, buffer: Buffer) -> Buffer:
        buffer.last = max(buffer.last, self.phase)
        if buffer.first < 0:
            buffer.first = self.phase
        return buffer

    def buffer(self, width: int, act_format: str | None = None, per_row: int = 1) -> Buffer:
        buffer = Buffer(width, self.rows * per_row, act_format, -1, -1)
        self.result.buffers.append(buffer)
        return buffer

    def define(self, value: Value) -> Buffer:
        self.values[value] = self.buffer(value.width)
        return self.values[value]

    def floats(self, value: Value) -> Buffer:
        return self.values[value]

    def activations(self, value: Value, act_format: str) -> Buffer:
        """Codes of a value, quantised now if they do not exist."""
        key = (value, act_format)
        if key not in self.codes:
            if value.width % ACT_BLOCKS[act_format]:
                raise GraphError(
                    f"{value.name}: {value.width} columns are not whole blocks of "
                    f"{ACT_BLOCKS[act_format]}, which its weights' format needs"
                )
            self.codes[key] = self.buffer(value.width, act_format)
            self.row("quantize", x=self.floats(value), out=self.codes[key])
        return self.codes[key]

    # ------------------------------------------------------------ weights

    def part(self, segment: Segment | Linear) -> WeightPart:
        *stack, columns = self.source.tensors[segment.weight].shape
        kernel_format = weight_format(self.source, segment.weight)
        return WeightPart(segment.weight, kernel_format, columns, math.prod(stack))

    def act_format(self, segment: Segment | Linear) -> str:
        return _native.act_format_of(weight_format(self.source, segment.weight))

    def place(self, x: Value, segments: list[Segment], panels_per_unit: int) -> list[SegmentUse]:
        """Packs segments side by side and makes their input's codes."""
        return [
            SegmentUse(weight, self.activations(x, _native.act_format_of(weight.weight_format)))
            for weight in self.pack([self.part(segment) for segment in segments], panels_per_unit)
        ]

    def pack(self, parts: list[WeightPart], panels_per_unit: int) -> list[PackedWeight]:
        """Places parts side by side; a tile has room for a unit of them."""
        columns = panels_per_unit * _native.PANEL_COLUMNS * len(parts)
        self.result.tile_columns = max(self.result.tile_columns, columns)
        return self.result.weights.place(parts, panels_per_unit)

    def only_format(self, value: Value) -> str | None:
        """The activation format of a value that is read by linears of one format alone, if it can
        be made of some columns at a time."""
        if self.eager:
            return None
        formats: set[str] = set()
        for op in self.readers.get(value, []):
            match op:
                case Linear():
                    formats.add(self.act_format(op))
                case LinearAdd() if op.residual != value:
                    formats.add(self.act_format(op.segment))
                case _:
                    return None
        if len(formats) != 1 or WHOLE_ROWS in formats or value == self.graph.logits:
            return None
        return formats.pop()

    def fair_units(self, units: int, panels: int) -> bool:
        """Whether so many units of so many panels make even shares for all threads."""
        return panels == 1 or units >= UNITS_PER_THREAD * self.threads

    def output(self, value: Value, act_format: str | None) -> dict[str, Buffer | None]:
        """A result in fp32 or, where a format is given, in activation codes at once."""
        if act_format is None:
            return {"out": self.touch(self.define(value)), "act": None}
        self.codes[value, act_format] = self.buffer(value.width, act_format)
        return {"out": None, "act": self.touch(self.codes[value, act_format])}

    # ------------------------------------------------------------ operations

    def op(self, op: FusedOp) -> None:
        lowerings: dict[type, Callable[[Any], None]] = {
            Embed: lambda o: self.embed(o, 1.0),
            ScaledEmbed: lambda o: self.embed(o, o.factor),
            PositionEmbed: self.position_embed,
            RMSNorm: self.rms_norm,
            LayerNorm: self.layer_norm,
            Linear: lambda o: lower_linear(self, o),
            MergedLinear: lambda o: lower_merged_linear(self, o),
            LinearAdd: lambda o: lower_linear_add(self, o),
            GatedLinear: lambda o: lower_gated_linear(self, o),
            HeadsLinear: lambda o: lower_heads_linear(self, o),
            StoreKV: lambda o: lower_store_kv(self, o),
            PagedAttention: lambda o: lower_attention(self, o),
            ApplyRope: self.rope,
            Activate: lambda o: self.unary("activate", o, activation=str(o.activation)),
            Gated: self.gated,
            Add: lambda o: self.binary("add", o),
            Scale: lambda o: self.unary("scale", o, factor=o.factor),
            SoftCap: lambda o: self.unary("soft_cap", o, cap=o.cap),
            Sigmoid: lambda o: self.unary("sigmoid", o),
            ScaleRows: self.scale_rows,
            Columns: lambda o: self.unary("columns", o, heads=o.heads, first=o.first),
            Join: self.join,
            Reorder: lambda o: self.unary("reorder", o, order=OrderOf(o.like)),
            HeadwiseLinear: lambda o: lower_headwise_linear(self, o),
            Temperature: self.temperature,
            Route: lambda o: lower_route(self, o),
            Experts: lambda o: lower_experts(self, o),
            TakeRows: self.take_rows,
        }
        self.current = op
        lowerings[type(op)](op)
        if self.eager:
            for value in outputs(op):
                self.result.checked.append(op)
                number = len(self.result.checked)
                self.row("check", x=self.floats(value), number=number, first_fault=FirstFault())
        self.current = None

    def embed(self, op: Embed | ScaledEmbed, factor: float) -> None:
        if self.result.embedding:
            raise GraphError(f"{op.weight}: a graph with two embeddings is not supported")
        self.result.embedding = op.weight
        kernel_format = weight_format(self.source, op.weight)
        self.row(
            "embed",
            raw=RawWeight(op.weight),
            format=kernel_format,
            factor=factor,
            out=self.define(op.out),
        )

    def position_embed(self, op: PositionEmbed) -> None:
        raw, kernel_format = RawWeight(op.weight), weight_format(self.source, op.weight)
        self.row("position_embed", raw=raw, format=kernel_format, out=self.define(op.out))

    def layer_norm(self, op: LayerNorm) -> None:
        self.row(
            "layer_norm",
            x=self.floats(op.x),
            weight=Vector(op.weight),
            bias=Vector(op.bias),
            eps=op.eps,
            out=self.define(op.out),
        )

    def rms_norm(self, op: RMSNorm) -> None:
        self.row(
            "rms_norm",
            x=self.floats(op.x),
            weight=Vector(op.weight) if op.weight else Ones(op.x.width // op.heads),
            eps=op.eps,
            heads=op.heads,
            out=self.define(op.out),
        )

    def unary(
        self,
        method: str,
        op: Scale | SoftCap | Sigmoid | Activate | Columns | Reorder,
        **arguments: Any,
    ) -> None:
        self.row(method, x=self.floats(op.x), out=self.define(op.out), **arguments)

    def scale_rows(self, op: ScaleRows) -> None:
        x, factor = self.floats(op.x), self.floats(op.factor)
        self.row("scale_rows", x=x, factor=factor, out=self.define(op.out))

    def binary(self, method: str, op: Add) -> None:
        self.row(method, a=self.floats(op.a), b=self.floats(op.b), out=self.define(op.out))

    def join(self, op: Join) -> None:
        a, b = self.floats(op.a), self.floats(op.b)
        self.row("join", a=a, b=b, heads=op.heads, out=self.define(op.out))

    def temperature(self, op: Temperature) -> None:
        self.row("temperature", scale=op.scale, length=op.length, out=self.define(op.out))

    def gated(self, op: Gated) -> None:
        self.row(
            "gated",
            gate=self.floats(op.gate),
            up=self.floats(op.up),
            activation=str(op.activation),
            out=self.define(op.out),
        )

    def rope(self, op: ApplyRope) -> None:
        self.row(
            "rope",
            x=self.floats(op.x),
            table=self.ropes[op.rope],
            style=str(op.rope.style),
            pairs=len(op.rope.inv_freq),
            heads=op.heads,
            out=self.define(op.out),
        )

    def take_rows(self, op: TakeRows) -> None:
        if self.head_phase is not None:
            raise GraphError("take_rows: stands twice in a graph")
        self.rows = _native.HEAD_ROWS
        self.head_phase = self.phase + 1
        self.in_rows = False
        self.call("begin_head")
        self.row("take_rows", x=self.floats(op.x), out=self.define(op.out))

    # ------------------------------------------------------------ beginning and end

    def _rope_tables(self) -> None:
        for op in self.graph.ops:
            heads = (op.query, op.key, op.value) if isinstance(op, HeadsLinear) else ()
            ropes = [op.rope] if isinstance(op, ApplyRope) else [h.rope for h in heads]
            for rope in ropes:
                if rope is None or rope in self.ropes:
                    continue
                self.ropes[rope] = self.buffer(2 * len(rope.inv_freq))
                self.row(
                    "rope_table",
                    inv_freq=np.array(rope.inv_freq, np.float64),
                    magnitude=rope.magnitude,
                    out=self.ropes[rope],
                )

    def finish(self) -> Lowered:
        if self.head_phase is None:
            raise GraphError("the graph has no take_rows: nothing says which rows want logits")
        logits = self.floats(self.graph.logits)
        self.begin("")
        self.call("sample", logits=self.touch(logits))
        # The head runs once per tile: what it reads of the body lives until its last phase.
        for buffer in self.result.buffers:
            if buffer.first < self.head_phase <= buffer.last:
                buffer.last = self.phase
        self.result.logits = logits
        return self.result
