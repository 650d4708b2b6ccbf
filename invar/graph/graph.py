"""A model as a list of operations on named values.

A value is a matrix ``[tokens, width]`` of fp32; tokens are the rows of a step, whatever requests
they belong to. Weights are named as in the weight source (for GGUF: its tensor names) and have
shape ``[rows, columns]`` = ``[out_features, in_features]``. ``operations.py`` has the operations,
``builder.py`` what makes a graph.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from invar.graph.operations import CacheGroup, Experts, Op, Value


class WeightSource(Protocol):
    """What a graph's weights are read from; ``weights.gguf.GGUFFile`` is one."""

    @property
    def tensors(self) -> Mapping[str, Any]:
        """name → an object with ``shape: tuple[int, ...]`` (numpy order) and ``type``."""

    def raw(self, name: str) -> np.ndarray:
        """The stored bytes, uint8, row by row, without a copy: in two dimensions those of a matrix,
        ``[rows, row_bytes]``."""

    def dequantize(self, name: str) -> np.ndarray:
        """float32 values, shaped as the tensor."""


def raw_rows(source: WeightSource, weight: str) -> np.ndarray:
    """The stored bytes ``[rows, row_bytes]``; a vector has one row, the matrices of a stack stand
    below each other."""
    return source.raw(weight).reshape(math.prod(source.tensors[weight].shape[:-1]), -1)


def column_order(source: WeightSource, weight: str) -> npt.NDArray[np.int32] | None:
    """The input feature that each stored column of a weight belongs to, ``[columns]``; None: they
    stand in their order. Sources without such weights need not know of it."""
    told = getattr(source, "column_order", None)
    return None if told is None else cast("npt.NDArray[np.int32] | None", told(weight))


@dataclass(frozen=True)
class Graph:
    ops: tuple[Op, ...]
    groups: tuple[CacheGroup, ...]
    logits: Value
    vocab_size: int
    max_positions: int  # the context length the weights were trained or scaled for

    def weight_names(self) -> set[str]:
        """Every weight and bias that an operation reads."""
        experts = [op for op in self.ops if isinstance(op, Experts)]
        readers = [*self.ops, *(part for op in experts for part in (op.gate, op.up, op.down))]
        parts = ("weight", "bias", "sinks")
        named = (getattr(op, part, None) for op in readers for part in parts)
        return {name for name in named if name is not None}


class GraphError(ValueError):
    """A model that does not fit together: names the operation, the weight and both shapes."""
