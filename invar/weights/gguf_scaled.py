"""A GGUF file whose NVFP4 matrices carry a scale of their own, which lies beside them.

`blk.0.attn_q.weight` may have `blk.0.attn_q.scale`, one number or one for each matrix of a stack,
which multiplies all of it, and `blk.0.attn_q.input_scale`, which is for activations in four bits:
these have eight here, so that it is not used. The optional tensors of `load_tensors`,
https://github.com/ggml-org/llama.cpp/blob/7bca1fd9ca2a681b0182e16f24f832b7be1942af/src/llama-model.cpp
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from invar.weights.formats import QuantType, dequantize
from invar.weights.gguf import GGUFError, GGUFFile, TensorInfo
from invar.weights.quantized_layouts import scaled_rows

logger = logging.getLogger("invar")

Bytes = npt.NDArray[np.uint8]
SCALE, INPUT_SCALE = "scale", "input_scale"


class ScaledGGUFFile(GGUFFile):
    """As `GGUFFile`, NVFP4 being presented as NVFP4_ROWS: a scale for every row."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.stored = self.tensors
        self._scales: dict[str, str | None] = {}  # of what has rows → the tensor with its scales
        presented, unused = dict(self.stored), 0
        for name, info in self.stored.items():
            if info.type is not QuantType.NVFP4:
                continue
            stem = name.removesuffix("weight")
            unused += presented.pop(stem + INPUT_SCALE, None) is not None
            scale = presented.pop(stem + SCALE, None)
            self._scales[name] = None if scale is None else self._checked(scale, info)
            kind = QuantType.NVFP4_ROWS
            presented[name] = TensorInfo(name, info.shape, kind, kind.tensor_bytes(info.shape))
        if unused:
            logger.warning("%d scales of activations in four bits are not used", unused)
        self.tensors = MappingProxyType(presented)

    def _checked(self, scale: TensorInfo, weight: TensorInfo) -> str:
        matrices = math.prod(weight.shape[:-2])
        count = math.prod(scale.shape)
        if scale.type is not QuantType.F32 or count not in (1, matrices):
            raise GGUFError(
                f"{self.path.name}: tensor {scale.name}: {scale.type.name} of shape {scale.shape}, "
                f"expected F32 and one scale{f' or {matrices}' if matrices > 1 else ''}"
            )
        return scale.name

    def raw(self, name: str) -> Bytes:
        """As of `GGUFFile`; of matrices with scales a copy."""
        raw = super().raw(name)
        if name not in self._scales:
            return raw
        shape = self.tensors[name].shape
        scale = self._scales[name]
        values = np.ones(1, np.float32) if scale is None else super().raw(scale).view("<f4")
        if not np.isfinite(values).all():
            raise GGUFError(f"{self.path.name}: tensor {scale}: NaN or infinity among the scales")
        rows = math.prod(shape[:-1])
        of_rows = np.repeat(values.reshape(-1), rows // values.size)
        made = scaled_rows(raw.reshape(rows, -1), of_rows)
        return made if len(shape) == 2 else made.reshape(-1)

    def made_from(self, name: str) -> Sequence[Bytes] | None:
        """The stored bytes behind `raw(name)`, if that makes others of them at every call."""
        if name not in self._scales:
            return None
        scale = self._scales[name]
        parts = [super().raw(name)]
        return parts if scale is None else [*parts, super().raw(scale)]

    def dequantize(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor as float32 of its shape."""
        if name not in self._scales:
            return super().dequantize(name)
        info = self.tensors[name]
        return dequantize(self.raw(name), info.type, info.shape)
