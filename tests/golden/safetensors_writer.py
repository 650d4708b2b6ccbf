"""Writes safetensors files, well-formed or not."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from invar.weights.formats import QuantType, quantize

Tensor = tuple[str, Sequence[int], bytes]  # dtype, shape, bytes


def stored(values: npt.NDArray[np.float32], dtype: str) -> Tensor:
    """Values as F32, F16 or BF16."""
    rows = values.astype(np.float32).reshape(1, -1)
    return dtype, values.shape, quantize(rows, QuantType[dtype]).tobytes()


def file_bytes(header: Mapping[str, Any] | bytes, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def safetensors_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape, raw) in tensors.items():
        offsets = [end, end + len(raw)]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        end += len(raw)
    return file_bytes(header, b"".join(raw for _, _, raw in tensors.values()))


def write_sharded(folder: Path, tensors: Mapping[str, Tensor], shards: int) -> None:
    """`model-0000i-of-0000n.safetensors` and their index; of one, a single file without."""
    if shards == 1:
        (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
        return
    weight_map: dict[str, str] = {}
    names = list(tensors)
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = names[number::shards]
        (folder / file).write_bytes(safetensors_bytes({name: tensors[name] for name in part}))
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
