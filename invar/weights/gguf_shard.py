"""One GGUF file on disk: mapped, its header read and checked, its tensors located.

Whatever the header claims is checked against the bytes that are there before it is used, so that a
hostile or damaged file costs neither time nor memory.

Layout: https://github.com/ggerganov/ggml/blob/9c2adc4962a3a5d259f10db2171e0df5c83e4b05/docs/gguf.md
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from invar.weights.formats import FormatError, QuantType
from invar.weights.gguf_values import (
    INTEGER_KINDS,
    Cursor,
    Entry,
    GGUFError,
    decode_value,
    read_kind,
    scan_value,
)
from invar.weights.mapped_file import MappedFile

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)

DEFAULT_ALIGNMENT = 32
SMALLEST_ALIGNMENT = 8
"""The specification asks for a multiple of 8."""
LARGEST_ALIGNMENT = 1 << 21
"""A huge page; nothing gains from more, and padding to it must stay small beside the weights."""

MAX_DIMENSIONS = 4
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 16
"""61 layers with 3 times 256 unmerged experts have 47,000; so many are parsed in under a second."""
LONGEST_KEY_BYTES = 65535
"""From the specification."""
LONGEST_TENSOR_NAME_BYTES = 1024
"""The specification says 64, some converters write more."""

# Length and one byte of a name, then the fixed fields: a smaller record cannot exist.
SMALLEST_KEY_RECORD = 8 + 1 + 4 + 1
SMALLEST_TENSOR_RECORD = 8 + 1 + 4 + 4 + 8

KNOWN_STRANGERS: tuple[tuple[bytes, str], ...] = (
    (
        b"version https://git-lfs",
        "is a Git LFS pointer, not the model itself; run `git lfs pull` or download the file",
    ),
    (b"tjgg", "is a GGJT file, older than GGUF; convert the model again"),
    (b"fmgg", "is a GGMF file, older than GGUF; convert the model again"),
    (b"lmgg", "is a GGML file, older than GGUF; convert the model again"),
    (b"<!doctype", "is a web page, not a model; the download address was wrong"),
    (b"<html", "is a web page, not a model; the download address was wrong"),
    (b"pk\x03\x04", "is a zip archive (a wheel or a PyTorch file), not a GGUF file"),
)


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a GGUF file. `shape` is in numpy order, `(rows, columns)`: GGUF's, reversed."""

    name: str
    shape: tuple[int, ...]
    type: QuantType
    nbytes: int


@dataclass(frozen=True)
class Location:
    """Bytes `[start, start + info.nbytes)` of one shard."""

    info: TensorInfo
    start: int


class Shard(MappedFile):
    """One file. Opening reads its header; raises `GGUFError`, and nothing stays open then."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, GGUFError)
        try:
            cursor = Cursor(self.buffer, path.name)
            self.version, tensor_count, key_count = read_preamble(cursor)
            self.entries: dict[str, Entry] = read_keys(cursor, key_count)
            alignment = read_alignment(cursor, self.entries)
            self.tensors: dict[str, Location] = read_tensors(cursor, tensor_count, alignment)
            check_overlaps(cursor, self.tensors)
            check_not_glued(cursor, self.tensors, alignment)
        except BaseException:
            self.close()
            raise

    def value(self, key: str) -> Any:
        self.require_whole(f"key {key}")
        return decode_value(self.buffer, self.entries[key], self.path.name, key)


def read_preamble(cursor: Cursor) -> tuple[int, int, int]:
    """Version, number of tensors, number of keys."""
    start = cursor.buffer[:64]
    if start[:4] != MAGIC:
        for prefix, explanation in KNOWN_STRANGERS:
            if start.lower().startswith(prefix):
                raise cursor.error(explanation)
        raise cursor.error(f"is not a GGUF file: it starts with {start[:4]!r}, not {MAGIC!r}")
    cursor.advance(4, "the magic")
    version = cursor.u32("the version")
    swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
    if swapped in (1, *SUPPORTED_VERSIONS):
        raise cursor.error(
            f"is a big-endian GGUF file (version {swapped}); convert it with "
            "`gguf-convert-endian` of the gguf package"
        )
    if version not in SUPPORTED_VERSIONS:
        raise cursor.error(
            f"GGUF version {version} is not supported (supported: 2, 3); convert the model again"
        )
    tensor_count = cursor.u64("the number of tensors")
    key_count = cursor.u64("the number of keys")
    check_count(cursor, "keys", key_count, MAX_KEYS, SMALLEST_KEY_RECORD)
    check_count(cursor, "tensors", tensor_count, MAX_TENSORS, SMALLEST_TENSOR_RECORD)
    return version, tensor_count, key_count


def check_count(cursor: Cursor, what: str, count: int, most: int, smallest: int) -> None:
    left = cursor.size - cursor.position
    if count > most or count > left // smallest:
        raise cursor.error(
            f"the header announces {count} {what}, but {left} bytes follow and at most {most} are "
            "read; the file is cut short or damaged, download it again"
        )


def read_keys(cursor: Cursor, count: int) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for index in range(count):
        key = cursor.name(f"the name of key {index}", LONGEST_KEY_BYTES)
        if key in entries:
            raise cursor.error(f"key {key} is there twice; the file is damaged")
        kind = read_kind(cursor, f"key {key}")
        entries[key] = scan_value(cursor, kind, key)
    return entries


def read_alignment(cursor: Cursor, entries: dict[str, Entry]) -> int:
    key = "general.alignment"
    entry = entries.get(key)
    if entry is None:
        return DEFAULT_ALIGNMENT
    if entry.kind not in INTEGER_KINDS:
        raise cursor.error(f"key {key}: expected an integer, found {entry.describe()}")
    alignment: int = decode_value(cursor.buffer, entry, cursor.file_name, key)
    is_power_of_two = alignment > 0 and alignment & (alignment - 1) == 0
    if not is_power_of_two or not SMALLEST_ALIGNMENT <= alignment <= LARGEST_ALIGNMENT:
        raise cursor.error(
            f"key {key}: {alignment} is not a power of two from {SMALLEST_ALIGNMENT} to "
            f"{LARGEST_ALIGNMENT}; convert the model again"
        )
    return alignment


@dataclass(frozen=True)
class TensorRecord:
    """A tensor as the header announces it, sizes checked, place not yet."""

    info: TensorInfo
    offset: int


def read_tensors(cursor: Cursor, count: int, alignment: int) -> dict[str, Location]:
    records: dict[str, TensorRecord] = {}
    for index in range(count):
        record = read_tensor_record(cursor, index)
        if record.info.name in records:
            raise cursor.error(f"tensor {record.info.name} is there twice; the file is damaged")
        records[record.info.name] = record
    data_start = aligned(cursor.position, alignment)
    return {name: locate(cursor, record, data_start, alignment) for name, record in records.items()}


def read_tensor_record(cursor: Cursor, index: int) -> TensorRecord:
    name = cursor.name(f"the name of tensor {index}", LONGEST_TENSOR_NAME_BYTES)
    what = f"tensor {name}"
    dimensions = cursor.u32(what)
    if dimensions > MAX_DIMENSIONS:
        raise cursor.error(
            f"{what}: {dimensions} dimensions (at most {MAX_DIMENSIONS}); the file is damaged"
        )
    shape = tuple(reversed([cursor.u64(what) for _ in range(dimensions)]))
    number = cursor.u32(what)
    offset = cursor.u64(what)
    try:
        quant_type = QuantType(number)
        if not quant_type.in_gguf:
            raise ValueError(number)
    except ValueError:
        known = ", ".join(quant_type.name for quant_type in QuantType if quant_type.in_gguf)
        raise cursor.error(f"{what}: type {number} is not known (known: {known})") from None
    # Python integers do not wrap: a product past 64 bits is simply larger than the file.
    if 0 in shape or math.prod(shape) > cursor.size * quant_type.block_size:
        raise cursor.error(
            f"{what}: shape {shape} in {quant_type.name} does not fit into a file of {cursor.size} "
            "bytes; it is cut short or damaged, download it again"
        )
    try:
        nbytes = quant_type.tensor_bytes(shape)
    except FormatError as error:
        raise cursor.error(f"{what}: {error}") from None
    return TensorRecord(TensorInfo(name, shape, quant_type, nbytes), offset)


def aligned(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


def locate(cursor: Cursor, record: TensorRecord, data_start: int, alignment: int) -> Location:
    info = record.info
    if record.offset % alignment:
        raise cursor.error(
            f"tensor {info.name}: offset {record.offset} is not a multiple of the alignment "
            f"{alignment}; the file is damaged"
        )
    start = data_start + record.offset
    if start + info.nbytes > cursor.size:
        raise cursor.error(
            f"tensor {info.name}: its data end at byte {start + info.nbytes}, the file at "
            f"{cursor.size}; it is cut short or damaged, download it again"
        )
    return Location(info, start)


def check_overlaps(cursor: Cursor, tensors: dict[str, Location]) -> None:
    ordered = sorted(tensors.values(), key=lambda location: location.start)
    for before, after in itertools.pairwise(ordered):
        if before.start + before.info.nbytes > after.start:
            raise cursor.error(
                f"tensor {after.info.name} overlaps tensor {before.info.name}; the file is damaged"
            )


def check_not_glued(cursor: Cursor, tensors: dict[str, Location], alignment: int) -> None:
    """A split model joined with `cat` has a second header where the first file's data end."""
    end = max(
        (location.start + location.info.nbytes for location in tensors.values()),
        default=cursor.position,
    )
    for position in (end, aligned(end, alignment)):
        if cursor.buffer[position : position + 4] == MAGIC:
            raise cursor.error(
                f"another GGUF file begins at byte {position}: split files were glued together; "
                "keep them apart and open the first, or join them with `llama-gguf-split --merge`"
            )
