"""Safetensors files: mapped, lazy, and checked before anything is believed.

The format: https://github.com/huggingface/safetensors/blob/v0.5.3/README.md#format
A reader of our own, since the library's gives numpy no bf16 and its arrays are copies.
"""

from __future__ import annotations

import json
import math
import mmap
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from invar.weights.mapped_file import MappedFile

LENGTH_BYTES = 8  # little-endian, before the header
LONGEST_HEADER_BYTES = 100_000_000  # the reference's own limit
MAX_DIMENSIONS = 8
METADATA = "__metadata__"

BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}

KNOWN_STRANGERS = (
    (b"version https://git-lfs", "is a pointer of Git LFS, not the file: run `git lfs pull`"),
    (b"<!doctype", "is a web page, not a model: the download was redirected or refused"),
    (b"<html", "is a web page, not a model: the download was redirected or refused"),
    (b"GGUF", "is a GGUF file: name it .gguf"),
    (b"PK\x03\x04", "is a pickle of PyTorch, which could run any code: it is never opened"),
    (b"\x80\x02", "is a pickle of PyTorch, which could run any code: it is never opened"),
)


class SafetensorsError(ValueError):
    """A file or directory that is not what it should be; the message names the place."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as a checkpoint has it, row-major."""

    name: str
    dtype: str  # of BITS
    shape: tuple[int, ...]
    start: int  # of its bytes, in the file
    nbytes: int


class SafetensorsFile(MappedFile):
    """One file. Opening checks the whole header and touches no weights."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, SafetensorsError)
        try:
            self.tensors: Mapping[str, StoredTensor] = _read_header(self.buffer, path.name)
        except BaseException:
            self.close()
            raise

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """Bytes of a tensor as stored: a flat read-only view, aligned to its elements."""
        tensor = self.tensors[name]
        self.require_whole(f"tensor {name}")
        view = np.frombuffer(self.buffer, np.uint8, tensor.nbytes, tensor.start)
        # Writers pad the header so that tensors are aligned; nothing obliges them to.
        element_bytes = max(1, BITS[tensor.dtype] // 8)
        return view if tensor.start % element_bytes == 0 else view.copy()


def _read_header(buffer: mmap.mmap, file: str) -> dict[str, StoredTensor]:
    start = buffer[:64]
    for prefix, explanation in KNOWN_STRANGERS:
        if start.lower().startswith(prefix.lower()):
            raise SafetensorsError(f"{file}: {explanation}")
    length = int.from_bytes(start[:LENGTH_BYTES], "little")
    data_start = LENGTH_BYTES + length
    if len(buffer) < LENGTH_BYTES or length > LONGEST_HEADER_BYTES or data_start > len(buffer):
        raise SafetensorsError(
            f"{file}: the header would have {length} bytes, the file has {len(buffer)} and at most "
            f"{LONGEST_HEADER_BYTES} are read; it is cut short, damaged or no safetensors file"
        )
    entries = read_json(buffer[LENGTH_BYTES:data_start], f"{file}: the header")
    entries.pop(METADATA, None)  # free text, of which nothing depends
    tensors = {
        name: _read_tensor(file, name, entry, data_start, len(buffer))
        for name, entry in entries.items()
    }
    _check_no_overlap(file, tensors, data_start, len(buffer))
    return tensors


def read_json(data: bytes, what: str) -> dict[str, Any]:
    """An object of JSON in which no key stands twice; raises `SafetensorsError`, naming `what`."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            counts = Counter(name for name, _ in pairs)
            twice = next(name for name, count in counts.items() if count > 1)
            raise SafetensorsError(f"{what}: {shown(twice)} stands there twice")
        return found

    try:
        value = json.loads(data, object_pairs_hook=unique)
    except SafetensorsError:
        raise
    except (ValueError, RecursionError) as error:
        problem = "is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise SafetensorsError(f"{what} is not JSON: {problem}") from None
    if not isinstance(value, dict):
        raise SafetensorsError(f"{what} is no JSON object but {type(value).__name__}")
    return value


def _read_tensor(file: str, name: str, entry: Any, data_start: int, size: int) -> StoredTensor:
    def fault(problem: str) -> SafetensorsError:
        return SafetensorsError(f"{file}: tensor {shown(name)}: {problem}")

    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise fault("expected dtype, shape and data_offsets, and nothing else")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise fault(f"dtype {shown(dtype)} is not known (known: {', '.join(BITS)})")
    if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise fault(f"shape {shown(shape)} is not a list of up to {MAX_DIMENSIONS} sizes")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise fault(f"data_offsets {shown(offsets)} are not two offsets")
    begin, end = offsets
    bits = math.prod(shape) * BITS[dtype]
    if bits % 8 or bits // 8 != end - begin:
        raise fault(
            f"{dtype} of shape {shown(shape)} takes {bits / 8:g} bytes, its data_offsets "
            f"{begin} … {end} say {end - begin}"
        )
    if data_start + end > size:
        raise fault(
            f"its bytes end at {data_start + end}, the file at {size}; it is cut short, "
            "download it again"
        )
    return StoredTensor(name, dtype, tuple(shape), data_start + begin, end - begin)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 2**62 for v in values)


def _check_no_overlap(
    file: str, tensors: Mapping[str, StoredTensor], data_start: int, size: int
) -> None:
    """Tensors lie one behind the other, without holes, to the end of the file."""
    end, before = data_start, "the header"
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.nbytes)):
        if tensor.start != end:
            how = "overlaps" if tensor.start < end else "leaves a hole behind"
            raise SafetensorsError(f"{file}: tensor {shown(tensor.name)} {how} {before}")
        end, before = tensor.start + tensor.nbytes, shown(tensor.name)
    if end != size:
        raise SafetensorsError(
            f"{file}: {size - end} bytes follow the last tensor; the file is damaged or glued "
            "together from several"
        )


def shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."
