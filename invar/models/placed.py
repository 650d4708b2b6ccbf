"""Where a stored tensor's weights go: a new name, a part of the rows, another order, turned.

Whole rows stay bytes, so that parts of quantised tensors are not decoded; a range of a matrix is a
view of what is stored. Nothing here holds more than the one tensor that is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from invar.models.metadata import ArchitectureKeys, ConfigError
from invar.weights.formats import PLAIN_TYPES, QuantType, dequantize

Bytes = npt.NDArray[np.uint8]
Shape = tuple[int, ...]
Rows = range | npt.NDArray[np.intp]
RowsOf = Callable[[ArchitectureKeys, int], Rows]
"""Which of so many rows, in the order in which they are wanted."""


@dataclass(frozen=True)
class Placed:
    """A weight that is more than renamed; `{}` in names is the layer.

    A name with one `{}` less than the stored one's is of a stack: the experts of a layer, in order.
    What is done to the tensor is done in the order of the fields, to every matrix of a stack.
    """

    name: str
    plus: float = 0.0  # added to every value: norms that are stored as their distance from 1
    transposed: bool = False  # plain ones are stored as [in_features, out_features]
    rows: RowsOf | None = None
    vectors: bool = False  # stored is a stack of vectors, biases of experts: rows are of the last
    matrices: str | None = None  # key of how many matrices lie below each other
    turned: bool = False  # they are transposed; of quantised ones, the values are as float32
    vector: bool = False  # a matrix of one row

    def kind(self, stored: QuantType) -> QuantType:
        """The number format of what is made of a stored tensor."""
        decoded = self.plus or (self.turned and stored not in PLAIN_TYPES)
        return QuantType.F32 if decoded else stored

    def copies(self, keys: ArchitectureKeys, kind: QuantType, shape: Shape) -> bool:
        """Whether the bytes are others than those that lie beside each other in the file."""
        if self.plus or self.turned or (self.transposed and swaps(kind, shape)):
            return True
        if self.rows is None:
            return False
        axis = self._axis(shape)
        rows = self.rows(keys, shape[axis])
        return not isinstance(rows, range) or rows.step != 1 or math.prod(shape[:axis]) != 1

    def shape(self, keys: ArchitectureKeys, kind: QuantType, stored: Shape) -> Shape:
        """Of what is made of a stored tensor of this format and shape. Raises `ConfigError` where
        it cannot be cut like that."""
        shape = list(stored)
        if self.transposed and kind not in (*PLAIN_TYPES, QuantType.MXFP4):
            raise ConfigError(f"{self.name}: {kind.name} matrices of [in, out] are not supported")
        if self.transposed and swaps(kind, stored):
            shape[-2:] = shape[:-3:-1]
        if self.rows is not None:
            axis = self._axis(stored)
            if axis == len(stored) - 1 and kind not in PLAIN_TYPES:
                raise ConfigError(f"{self.name}: a quantised vector cannot be cut into parts")
            shape[axis] = len(self.rows(keys, shape[axis]))
        if self.matrices is not None:
            count = keys.integer(self.matrices)
            if shape[0] % count:
                raise ConfigError(
                    f"{keys.full(self.matrices)} is {count}, which does not cut {shape[0]} rows"
                )
            shape[:1] = [count, shape[0] // count]
        if self.turned:
            shape[-2:] = shape[:-3:-1]
        if self.vector and shape[:-1] == [1]:
            shape = shape[1:]
        return tuple(shape)

    def take(self, keys: ArchitectureKeys, raw: Bytes, kind: QuantType, stored: Shape) -> Bytes:
        """`[rows, row_bytes]` of the weight, from the bytes of a stored tensor: a view of them
        unless it `copies`."""
        shape = self.shape(keys, kind, stored)
        if self.plus:
            raw = as_bytes(dequantize(raw, kind, stored) + np.float32(self.plus))
            kind = QuantType.F32
        cells = cells_of(raw, kind, stored)
        if self.transposed and swaps(kind, stored):
            cells = cells.swapaxes(-1, -2)
        if self.rows is not None:
            axis = self._axis(stored)
            rows = self.rows(keys, cells.shape[axis])
            chosen = slice(rows.start, rows.stop, rows.step) if isinstance(rows, range) else rows
            cells = cells[(*[slice(None)] * axis, chosen)]
        if self.turned:
            turned = (*shape[:-2], shape[-1], shape[-2])
            if kind not in PLAIN_TYPES:
                raw, kind = as_bytes(dequantize(flat(cells), kind, turned)), QuantType.F32
                cells = cells_of(raw, kind, turned)
            cells = cells.reshape(turned).swapaxes(-1, -2)
        return flat(cells).reshape(math.prod(shape[:-1]), -1)

    def _axis(self, shape: Shape) -> int:
        """The dimension that `rows` counts."""
        return len(shape) - (1 if self.vectors or len(shape) == 1 else 2)


def swaps(kind: QuantType, shape: Shape) -> bool:
    """MXFP4 has blocks along in_features, so it is stored as [out, in] whatever plain ones are."""
    return len(shape) > 1 and kind in PLAIN_TYPES


def as_bytes(values: npt.NDArray[np.float32]) -> Bytes:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def cells_of(raw: Bytes, kind: QuantType, shape: Shape) -> npt.NDArray[Any]:
    """What is moved about as a whole: plain values, or the bytes of quantised rows."""
    if kind in PLAIN_TYPES:
        return raw.reshape(-1).view(f"u{kind.block_bytes}").reshape(shape)
    return raw.reshape(*shape[:-1], -1)


def flat(cells: npt.NDArray[Any]) -> Bytes:
    is_turned = cells.ndim > 1 and cells.strides[-1] > cells.itemsize
    whole = in_strips(cells) if is_turned else np.ascontiguousarray(cells)
    return whole.reshape(-1).view(np.uint8)


STRIP = 16
"""Columns of a transposed matrix that are written at a time, which are rows as they are stored: of
5120 x 4096 in 16 bits, a core writes 1.05 GB/s so, 0.5 with 32 and 0.24 with all."""


def in_strips(cells: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A copy in order of matrices whose columns lie in order."""
    whole = np.empty(cells.shape, cells.dtype)
    for matrix in np.ndindex(cells.shape[:-2]):
        for start in range(0, cells.shape[-1], STRIP):
            strip = (*matrix, slice(None), slice(start, start + STRIP))
            whole[strip] = cells[strip]
    return whole


# ---------------------------------------------------------------- which rows


def interleaved(heads: str) -> RowsOf:
    """Rows of q or k so that the halves of a head alternate, as GGUF has them for some families.

    heads: the key of their number.
    https://github.com/ggml-org/llama.cpp/blob/7bca1fd9ca2a681b0182e16f24f832b7be1942af/conversion/llama.py
    """

    def order(keys: ArchitectureKeys, rows: int) -> Rows:
        count = keys.optional_integer(heads) or keys.integer("attention.head_count")
        if rows % (2 * count):
            raise ConfigError(f"{keys.full(heads)} is {count}, which does not cut {rows} rows")
        return np.arange(rows).reshape(count, 2, -1).swapaxes(1, 2).reshape(-1)

    return order


def part(number: int, of: int) -> RowsOf:
    """One of so many equal parts."""

    def rows_of(keys: ArchitectureKeys, rows: int) -> Rows:
        refuse_remainder(rows, of)
        return range(rows // of * number, rows // of * (number + 1))

    return rows_of


def every(step: int, first: int) -> RowsOf:
    """One row of so many, from the first on: parts that alternate."""

    def rows_of(keys: ArchitectureKeys, rows: int) -> Rows:
        refuse_remainder(rows, step)
        return range(first, rows, step)

    return rows_of


def refuse_remainder(rows: int, parts: int) -> None:
    if rows % parts:
        raise ConfigError(f"a tensor of {rows} rows cannot hold {parts} weights of the same size")


def heads_of(which: str) -> RowsOf:
    """Rows of q, k or v where the heads of q, those of k, and those of v lie below each other."""

    def rows_of(keys: ArchitectureKeys, rows: int) -> Rows:
        heads = keys.integer("attention.head_count")
        kv_heads = keys.optional_integer("attention.head_count_kv") or heads
        total = heads + 2 * kv_heads
        if rows % total:
            raise ConfigError(
                f"{keys.full('attention.head_count')} is {heads} and "
                f"{keys.full('attention.head_count_kv')} {kv_heads}, which do not cut {rows} rows "
                "of q, k and v"
            )
        size = rows // total
        ends = {"q": (0, heads), "k": (heads, heads + kv_heads), "v": (heads + kv_heads, total)}
        first, last = ends[which]
        return range(first * size, last * size)

    return rows_of


def alternating(which: str) -> RowsOf:
    """Rows of q, k or v where every head has its q, its k and its v below each other."""

    def rows_of(keys: ArchitectureKeys, rows: int) -> Rows:
        heads = keys.integer("attention.head_count")
        if rows % (3 * heads):
            raise ConfigError(
                f"{keys.full('attention.head_count')} is {heads}, which does not cut {rows} rows "
                "of q, k and v"
            )
        return np.arange(rows).reshape(heads, 3, -1)[:, "qkv".index(which)].reshape(-1)

    return rows_of


QKV = tuple(Placed(f"blk.{{}}.attn_{name}", rows=heads_of(name)) for name in "qkv")
GATE_UP = (
    Placed("blk.{}.ffn_gate", rows=part(0, 2)),
    Placed("blk.{}.ffn_up", rows=part(1, 2)),
)
EXPERTS_GATE_UP = (
    Placed("blk.{}.ffn_gate_exps", rows=part(0, 2)),
    Placed("blk.{}.ffn_up_exps", rows=part(1, 2)),
)
