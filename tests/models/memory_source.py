"""A model in memory: what `GGUFFile` gives, without a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from invar.weights.formats import QuantType, dequantize, quantize
from invar.weights.gguf import GGUFFile
from invar.weights.gguf_writer import GGUFWriter

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class MemoryTensor:
    shape: tuple[int, ...]
    type: QuantType
    data: npt.NDArray[np.uint8]  # [rows, row_bytes], flat for one dimension


class MemorySource:
    """Metadata and tensors; both may be changed before a graph is built from them."""

    def __init__(self, metadata: Mapping[str, Any], values: Mapping[str, Floats]) -> None:
        self.metadata = dict(metadata)
        self.tensors: dict[str, MemoryTensor] = {}
        for name, array in values.items():
            self.put(name, array)

    @classmethod
    def read(cls, path: Path) -> MemorySource:
        with GGUFFile(path) as model:
            values = {name: model.dequantize(name).copy() for name in model.tensors}
            return cls(model.metadata, values)

    def put(self, name: str, values: Floats, quant_type: QuantType = QuantType.F32) -> None:
        rows = values.astype(np.float32).reshape(-1, values.shape[-1])
        data = quantize(rows, quant_type)
        data = data if values.ndim == 2 else data.reshape(-1)
        self.tensors[name] = MemoryTensor(values.shape, quant_type, data)

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        return self.tensors[name].data

    def dequantize(self, name: str) -> Floats:
        tensor = self.tensors[name]
        return dequantize(tensor.data, tensor.type, tensor.shape)

    def write(self, path: Path) -> Path:
        writer = GGUFWriter(path, self.metadata)
        for name, tensor in self.tensors.items():
            writer.add_tensor(name, tensor.shape, tensor.type, tensor.data)
        writer.write()
        return path
