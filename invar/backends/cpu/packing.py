"""Weights from the model file to packed panels in huge-page memory."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from invar import _native
from invar.backends.cpu.layout import WeightLayout
from invar.graph.graph import WeightSource, raw_rows


def pack_weights(
    layout: WeightLayout, source: WeightSource, threads: int, isa: str
) -> _native.Memory:
    """Packs every tensor on all threads, each into its planned place."""
    memory = _native.Memory(layout.size)
    raws = [np.ascontiguousarray(raw_rows(source, weight.tensor)) for weight in layout.weights]
    _native.pack(layout.weights, raws, memory, threads, isa)
    return memory


def vector_values(source: WeightSource, tensor: str) -> npt.NDArray[np.float32]:
    """A norm or bias as fp32 values."""
    return np.ascontiguousarray(source.dequantize(tensor), dtype=np.float32).reshape(-1)
