"""Weights from the model file to packed panels in huge-page memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from invar import _native
from invar.backends.cpu.layout import PackedWeight, WeightLayout
from invar.graph.graph import WeightSource, raw_rows

MadeFrom = Callable[[str], Sequence[npt.NDArray[np.uint8]] | None]


def pack_weights(
    layout: WeightLayout, source: WeightSource, threads: int, isa: str
) -> _native.Memory:
    """Packs every tensor on all threads, each into its planned place.

    Those that are stored as they are packed go together. What is made of other bytes is there for
    one tensor at a time, so that a second model does not lie in memory beside the packed one.
    """
    memory = _native.Memory(layout.size)
    stored: list[PackedWeight] = []
    made: list[PackedWeight] = []
    for weight in layout.weights:
        (made if made_from(source, weight.tensor) else stored).append(weight)
    for group in (stored, *([weight] for weight in made)):
        raws = [np.ascontiguousarray(raw_rows(source, weight.tensor)) for weight in group]
        _native.pack(group, raws, memory, threads, isa)
    return memory


def made_from(source: WeightSource, tensor: str) -> Sequence[npt.NDArray[np.uint8]] | None:
    """What a source that makes this tensor's rows at every call makes them of; None: they are
    stored."""
    told: MadeFrom | None = getattr(source, "made_from", None)
    return None if told is None else told(tensor)


def vector_values(source: WeightSource, tensor: str) -> npt.NDArray[np.float32]:
    """A norm or bias as fp32 values."""
    return np.ascontiguousarray(source.dequantize(tensor), dtype=np.float32).reshape(-1)
