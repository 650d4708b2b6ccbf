"""Writes GGUF version 3 files, for test models and synthetic benchmarks.

writer = GGUFWriter(path, {"general.architecture": "llama", "llama.block_count": 2})
writer.add_tensor("token_embd.weight", (rows, columns), QuantType.Q4_K, weights)
writer.write()

Layout: https://github.com/ggerganov/ggml/blob/9c2adc4962a3a5d259f10db2171e0df5c83e4b05/docs/gguf.md
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from invar.weights.formats import QuantType, quantize
from invar.weights.gguf_shard import MAGIC, aligned
from invar.weights.gguf_split import SPLIT_COUNT, SPLIT_NUMBER, SPLIT_TENSORS
from invar.weights.gguf_values import SCALAR_DTYPES, ValueKind

VERSION = 3

Chunks = np.ndarray | Iterable[np.ndarray]
TensorData = Chunks | Callable[[], Chunks]


@dataclass(frozen=True)
class PlannedTensor:
    name: str
    shape: tuple[int, ...]
    type: QuantType
    data: TensorData

    @property
    def nbytes(self) -> int:
        return self.type.tensor_bytes(self.shape)


class GGUFWriter:
    """Collects metadata and tensors and writes them in one pass; tensor data are streamed.

    Metadata values get their type from Python: bool; int as uint32 where it fits, else int32,
    uint64 or int64; float as float32; str; lists of one of these (integers as int32, else int64).
    A numpy scalar or array keeps its own type. With `shards` above one, `path` "x.gguf" becomes
    "x-00001-of-0000N.gguf" and so on: tensors dealt out in order, the metadata in the first.
    """

    def __init__(
        self, path: str | Path, metadata: Mapping[str, Any], alignment: int = 32, shards: int = 1
    ) -> None:
        if shards < 1 or alignment < 8 or alignment & (alignment - 1):
            raise ValueError(
                f"{shards} shards aligned to {alignment}: give at least one shard and a power of "
                "two from 8 on"
            )
        self.path = Path(path)
        self.metadata = dict(metadata)
        self.alignment = alignment
        self.shards = shards
        self._tensors: dict[str, PlannedTensor] = {}
        if alignment != 32:
            self.metadata["general.alignment"] = np.uint32(alignment)

    def add_tensor(
        self, name: str, shape: Sequence[int], quant_type: QuantType, data: TensorData
    ) -> None:
        """Plan a tensor. `shape` is in numpy order, rows first.

        data: uint8, written as it is, or float32, quantised to `quant_type`; an array, an iterable
        of arrays (whole rows, in order), or a function that returns one of them when it is written.
        """
        if name in self._tensors:
            raise ValueError(f"{self.path.name}: tensor {name} was added twice")
        if not quant_type.in_gguf:
            raise ValueError(f"{self.path.name}: tensor {name}: GGUF has no {quant_type.name}")
        tensor = PlannedTensor(name, tuple(shape), quant_type, data)
        _ = tensor.nbytes  # a row that is not whole blocks is refused here, where it was asked for
        self._tensors[name] = tensor

    def write(self) -> list[Path]:
        """Write everything and return the paths, in order. Files appear whole or not at all."""
        tensors = list(self._tensors.values())
        if self.shards == 1:
            self._write_file(self.path, self.metadata, tensors)
            return [self.path]
        paths = []
        for number in range(self.shards):
            first = number * len(tensors) // self.shards
            last = (number + 1) * len(tensors) // self.shards
            keys: dict[str, Any] = dict(self.metadata) if number == 0 else {}
            if number and self.alignment != 32:
                keys["general.alignment"] = np.uint32(self.alignment)
            keys[SPLIT_NUMBER] = np.uint16(number)
            keys[SPLIT_COUNT] = np.uint16(self.shards)
            keys[SPLIT_TENSORS] = np.int32(len(tensors))
            name = f"{self.path.stem}-{number + 1:05d}-of-{self.shards:05d}.gguf"
            paths.append(self.path.with_name(name))
            self._write_file(paths[-1], keys, tensors[first:last])
        return paths

    def _write_file(
        self, path: Path, metadata: Mapping[str, Any], tensors: list[PlannedTensor]
    ) -> None:
        partial = path.with_name(path.name + ".partial")
        try:
            with partial.open("wb") as file:
                file.write(header(metadata, tensors, self.alignment))
                for tensor in tensors:
                    pad(file, self.alignment)
                    write_tensor(file, tensor, path.name)
                pad(file, self.alignment)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)


def header(metadata: Mapping[str, Any], tensors: list[PlannedTensor], alignment: int) -> bytes:
    parts = [MAGIC, struct.pack("<IQQ", VERSION, len(tensors), len(metadata))]
    for key, value in metadata.items():
        kind, payload = encode_value(key, value)
        parts += [encode_string(key), struct.pack("<I", kind), payload]
    offset = 0
    for tensor in tensors:
        dimensions = tuple(reversed(tensor.shape))
        parts.append(encode_string(tensor.name))
        parts.append(struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions))
        parts.append(struct.pack("<IQ", tensor.type, offset))
        offset = aligned(offset + tensor.nbytes, alignment)
    return b"".join(parts)


def pad(file: BinaryIO, alignment: int) -> None:
    position = file.tell()
    file.write(bytes(aligned(position, alignment) - position))


def write_tensor(file: BinaryIO, tensor: PlannedTensor, file_name: str) -> None:
    written = 0
    for chunk in chunks_of(tensor.data):
        data = chunk
        if data.dtype != np.uint8:
            rows = data.reshape(-1, tensor.shape[-1] if tensor.shape else 1)
            data = quantize(rows, tensor.type)
        written += file.write(np.ascontiguousarray(data).data)
    if written != tensor.nbytes:
        raise ValueError(
            f"{file_name}: tensor {tensor.name}: {tensor.type.name} of shape {tensor.shape} takes "
            f"{tensor.nbytes} bytes, its data have {written}"
        )


def chunks_of(data: TensorData) -> Iterator[np.ndarray]:
    source = data() if callable(data) else data
    if isinstance(source, np.ndarray):
        yield source
    else:
        yield from source


def encode_string(text: str) -> bytes:
    raw = text.encode("utf-8")
    return struct.pack("<Q", len(raw)) + raw


KIND_OF_DTYPE = {
    dtype: kind for kind, dtype in SCALAR_DTYPES.items() if kind is not ValueKind.BOOL
} | {np.dtype(np.bool_): ValueKind.BOOL}


def encode_value(key: str, value: Any) -> tuple[ValueKind, bytes]:
    """Type number and bytes of a metadata value."""
    if isinstance(value, str):
        return ValueKind.STRING, encode_string(value)
    if isinstance(value, (list, tuple, np.ndarray)):
        return ValueKind.ARRAY, encode_array(key, value)
    scalar = value if isinstance(value, np.generic) else scalar_of(key, value)
    return kind_of(key, scalar.dtype), scalar.tobytes()


def kind_of(key: str, dtype: np.dtype[Any]) -> ValueKind:
    kind = KIND_OF_DTYPE.get(dtype)
    if kind is None:
        raise ValueError(f"key {key}: {dtype} has no GGUF type")
    return kind


def scalar_of(key: str, value: Any) -> np.generic:
    if isinstance(value, bool):
        return np.bool_(value)
    if isinstance(value, float):
        return np.float32(value)
    if isinstance(value, int):
        for dtype in (np.uint32, np.int32, np.uint64, np.int64):
            if np.iinfo(dtype).min <= value <= np.iinfo(dtype).max:
                return dtype(value)
    raise ValueError(f"key {key}: {value!r} has no GGUF type")


def encode_array(key: str, values: Sequence[Any] | np.ndarray) -> bytes:
    if len(values) == 0 and not isinstance(values, np.ndarray):
        raise ValueError(f"key {key}: an empty list has no element type; give an empty numpy array")
    if isinstance(values, np.ndarray):
        head = struct.pack("<IQ", kind_of(key, values.dtype), len(values))
        return head + np.ascontiguousarray(values).tobytes()
    if isinstance(values[0], str):
        strings = b"".join(encode_string(text) for text in values)
        return struct.pack("<IQ", ValueKind.STRING, len(values)) + strings
    if isinstance(values[0], (list, tuple, np.ndarray)):
        inner = b"".join(encode_array(key, part) for part in values)
        return struct.pack("<IQ", ValueKind.ARRAY, len(values)) + inner
    numbers = np.asarray(values)
    if numbers.dtype.kind == "f":
        numbers = numbers.astype(np.float32)
    elif numbers.dtype.kind == "i" and np.abs(numbers).max() < 1 << 31:
        numbers = numbers.astype(np.int32)
    return encode_array(key, numbers)
