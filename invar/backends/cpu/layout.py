"""Where buffers, pages and packed weights lie: sizes known before anything is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from invar import _native
from invar.graph.operations import CacheGroup

LINE = 64  # bytes; every buffer and panel starts on a cache line
SLAB_BYTES = 2 << 20  # a huge page: a smaller slab would share one with another group


def round_up(size: int, unit: int = LINE) -> int:
    return -(-size // unit) * unit


@dataclass(eq=False)
class Buffer:
    """Rows of one value, of floats (``act_format`` None) or of activation codes.

    Alive in phases ``first … last``, both included: threads work on one phase at a time, so that
    what is read and what is written in the same phase must not share memory.
    """

    width: int
    rows: int
    act_format: str | None
    first: int
    last: int
    offset: int = -1
    number: int = -1  # of the native plan

    @property
    def row_bytes(self) -> int:
        if self.act_format is None:
            return _native.matrix_stride(self.width)
        return _native.act_row_bytes(self.act_format, self.width)

    @property
    def size(self) -> int:
        return round_up(self.row_bytes * self.rows)


def place_buffers(buffers: Sequence[Buffer]) -> int:
    """Gives every buffer an offset, sharing memory between lifetimes; returns the bytes needed.

    Largest first, each at the lowest offset that is free during its whole life.
    """
    placed: list[Buffer] = []
    for buffer in sorted(buffers, key=lambda b: -b.size):
        others = sorted(
            (o for o in placed if o.first <= buffer.last and buffer.first <= o.last),
            key=lambda o: o.offset,
        )
        offset = 0
        for other in others:
            if offset + buffer.size <= other.offset:
                break
            offset = max(offset, other.offset + other.size)
        buffer.offset = offset
        placed.append(buffer)
    return max((b.offset + b.size for b in placed), default=0)


@dataclass(frozen=True)
class SlabLayout:
    """How the arena is cut: every slab holds pages of one group."""

    slab_bytes: int
    page_bytes: tuple[int, ...]  # per group
    pages_per_slab: tuple[int, ...]


def page_bytes(group: CacheGroup) -> int:
    return group.layers * group.kv_heads * _native.kv_head_bytes(group.kv_format, group.head_dim)


def plan_slabs(groups: Sequence[CacheGroup]) -> SlabLayout:
    """The slab size that wastes least, of those that hold 1 … 16 of the largest page.

    Waste counts in the group that suffers most; at equal waste the smaller slab wins, since a
    group's last slab is half empty on average.
    """
    sizes = tuple(page_bytes(group) for group in groups)
    largest = max(sizes)
    fewest = -(-SLAB_BYTES // largest)
    candidates = [round_up(largest * n, 4096) for n in range(fewest, fewest + 16)]

    def waste(slab: int) -> float:
        return max(slab % size / slab for size in sizes)

    slab_bytes = min(candidates, key=lambda slab: (round(waste(slab), 2), slab))
    return SlabLayout(slab_bytes, sizes, tuple(slab_bytes // size for size in sizes))


@dataclass(frozen=True)
class PackedWeight:
    """A weight inside the packed memory; unit u starts at ``offset + u * unit_stride``."""

    tensor: str
    weight_format: str
    columns: int  # k
    rows: int  # n
    offset: int
    unit_stride: int
    panels_per_unit: int

    @property
    def panels(self) -> int:
        return -(-self.rows // _native.PANEL_COLUMNS)

    def of_stack(self, number: int, count: int) -> PackedWeight:
        """One of ``count`` matrices of whole units that this weight is made of."""
        units = self.panels // self.panels_per_unit // count
        offset = self.offset + number * units * self.unit_stride
        return replace(self, rows=self.rows // count, offset=offset)


@dataclass(frozen=True)
class WeightPart:
    """What a part needs to know of a weight before it has a place."""

    tensor: str
    weight_format: str
    columns: int
    rows: int


@dataclass
class WeightLayout:
    """Packed weights one after another, in the order in which a step reads them."""

    weights: list[PackedWeight] = field(default_factory=list)
    size: int = 0

    def place(self, parts: Sequence[WeightPart], panels_per_unit: int) -> list[PackedWeight]:
        """Interleaves the weights of a part unit by unit, so that a thread reads one stream."""
        unit_bytes = [
            panels_per_unit * _native.panel_bytes(part.weight_format, part.columns)
            for part in parts
        ]
        stride = sum(unit_bytes)
        placed = []
        units = 0
        for index, part in enumerate(parts):
            weight = PackedWeight(
                part.tensor,
                part.weight_format,
                part.columns,
                part.rows,
                self.size + sum(unit_bytes[:index]),
                stride,
                panels_per_unit,
            )
            units = max(units, -(-weight.panels // panels_per_unit))
            placed.append(weight)
        self.weights += placed
        self.size += units * stride
        return placed
