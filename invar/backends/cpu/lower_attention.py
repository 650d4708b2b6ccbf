"""Attention as native calls: what q, k and v go through, K and V into pages, attention itself."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from invar import _native
from invar.backends.cpu.formats import ACT_BLOCKS
from invar.backends.cpu.lowered import AttentionShape, HeadUse, vector
from invar.graph.fused import Head, HeadsLinear, PagedAttention, StoreKV
from invar.graph.graph import GraphError

if TYPE_CHECKING:
    from invar.backends.cpu.lower import Lowering

HEAD_DIM_STEP = 16
"""Attention works on 16 dimensions at a time (``head_dim`` in kernels.h)."""


def lower_heads_linear(lowering: Lowering, op: HeadsLinear) -> None:
    group = lowering.graph.groups[lowering.groups[op.group]]
    refuse_head_size(op.key.segment.weight, group.head_dim)
    columns = math.lcm(group.head_dim, _native.PANEL_COLUMNS)
    panels = columns // _native.PANEL_COLUMNS
    (query,) = lowering.place(op.x, [op.query.segment], panels)
    key, value = lowering.place(op.x, [op.key.segment, op.value.segment], panels)
    lowering.begin("begin_linear")
    for use in (query, key, value):
        lowering.touch(use.x)
    lowering.call(
        "part_query",
        segment=query,
        transform=head_use(lowering, op.query),
        head_dim=group.head_dim,
        heads=op.heads,
        out=lowering.touch(lowering.define(op.q)),
    )
    lowering.call(
        "part_cache",
        key=key,
        value=value,
        key_transform=head_use(lowering, op.key),
        value_transform=head_use(lowering, op.value),
        group=lowering.groups[op.group],
        layer=op.layer,
    )


def head_use(lowering: Lowering, head: Head) -> HeadUse:
    table = lowering.touch(lowering.ropes[head.rope]) if head.rope else None
    return HeadUse(vector(head.segment.bias), vector(head.norm), head.eps, head.rope, table)


def lower_store_kv(lowering: Lowering, op: StoreKV) -> None:
    refuse_head_size(op.k.name, lowering.graph.groups[lowering.groups[op.group]].head_dim)
    lowering.row(
        "store_kv",
        k=lowering.floats(op.k),
        v=lowering.floats(op.v),
        group=lowering.groups[op.group],
        layer=op.layer,
    )


def lower_attention(lowering: Lowering, op: PagedAttention) -> None:
    group = lowering.graph.groups[lowering.groups[op.group]]
    per_kv_head = op.heads // group.kv_heads
    act_format = lowering.only_format(op.out)
    if act_format and per_kv_head * group.head_dim % ACT_BLOCKS[act_format]:
        act_format = None
    lowering.result.attention.add(AttentionShape(group.kv_format, per_kv_head, group.head_dim))
    lowering.begin("")
    lowering.call(
        "attention",
        q=lowering.touch(lowering.floats(op.q)),
        group=lowering.groups[op.group],
        layer=op.layer,
        heads=op.heads,
        scale=op.scale,
        soft_cap=op.soft_cap or 0.0,
        sinks=vector(op.sinks),
        **lowering.output(op.out, act_format),
    )


def refuse_head_size(what: str, head_dim: int) -> None:
    if head_dim % HEAD_DIM_STEP or head_dim > _native.MAX_HEAD_DIM:
        raise GraphError(
            f"{what}: the CPU backend cannot run heads of {head_dim} dimensions, only of "
            f"multiples of {HEAD_DIM_STEP} up to {_native.MAX_HEAD_DIM}"
        )
