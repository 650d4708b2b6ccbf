"""A GGUF file whose tensors hold several weights, presented with each by itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from invar.models.metadata import ArchitectureKeys, ConfigError
from invar.models.placed import EXPERTS_GATE_UP, QKV, Placed
from invar.weights.formats import dequantize
from invar.weights.gguf import TensorInfo
from invar.weights.gguf_scaled import ScaledGGUFFile

Fused = Mapping[str, tuple[Placed, ...]]
"""What is stored, without `.weight` or `.bias` → the weights in it; `{}` is the layer."""

OF_ANY: Fused = {"blk.{}.attn_qkv": QKV, "blk.{}.ffn_gate_up_exps": EXPERTS_GATE_UP}
"""What converters may store as one whatever the architecture.

https://github.com/ggml-org/llama.cpp/pull/19139
"""

LAYER = re.compile(r"(?<=^blk\.)\d+(?=\.)")


class GGUFSource(ScaledGGUFFile):
    """As `ScaledGGUFFile`; `ConfigError` says which tensor its architecture cannot cut."""

    def __init__(self, path: str | Path, fused_of: Callable[[Mapping[str, Any]], Fused]) -> None:
        """fused_of: what a model with such metadata stores as one, besides what any may."""
        super().__init__(path)
        fused = {**OF_ANY, **fused_of(self.metadata)}
        architecture = self.metadata.get("general.architecture", "")
        self._keys = ArchitectureKeys(self.metadata, str(architecture))
        self._parts: dict[str, tuple[str, Placed]] = {}
        stored, presented = self.tensors, dict(self.tensors)
        self._whole = stored
        for name, info in stored.items():
            stem, _, ending = name.rpartition(".")
            entry = fused.get(LAYER.sub("{}", stem), ())
            numbers = LAYER.findall(stem)
            if ending == "bias":  # one for every row, of experts in a stack
                entry = tuple(replace(placed, vectors=True) for placed in entry)
            ours = {f"{placed.name.format(*numbers)}.{ending}": placed for placed in entry}
            if not ours or any(part in stored for part in ours.keys() - {name}):
                continue  # a tensor of one weight
            del presented[name]
            for part, placed in ours.items():
                try:
                    shape = placed.shape(self._keys, info.type, info.shape)
                except ConfigError as error:
                    raise ConfigError(f"{self.path.name}: tensor {name}: {error}") from None
                kind = placed.kind(info.type)
                presented[part] = TensorInfo(part, shape, kind, kind.tensor_bytes(shape))
                self._parts[part] = (name, placed)
        self.tensors = MappingProxyType(presented)

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """Bytes of a tensor: `[rows, row_bytes]` if 2-D, else flat; a view of the file where a
        weight lies there as it is, else a copy."""
        if name not in self._parts:
            return super().raw(name)
        stored, placed = self._parts[name]
        info = self._whole[stored]
        rows = placed.take(self._keys, super().raw(stored), info.type, info.shape)
        return rows if len(self.tensors[name].shape) == 2 else rows.reshape(-1)

    def made_from(self, name: str) -> Sequence[npt.NDArray[np.uint8]] | None:
        """The stored bytes behind `raw(name)`, if that makes others of them at every call."""
        if name not in self._parts:
            return super().made_from(name)
        stored, placed = self._parts[name]
        info, made = self._whole[stored], super().made_from(stored)
        if made is not None:
            return made
        return [super().raw(stored)] if placed.copies(self._keys, info.type, info.shape) else None

    def dequantize(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor as float32 of its shape."""
        if name not in self._parts:
            return super().dequantize(name)
        info = self.tensors[name]
        return dequantize(self.raw(name), info.type, info.shape)
