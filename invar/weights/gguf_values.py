"""Metadata values of a GGUF file: a bounds-checked cursor, a scan that skips them, a decoder.

The scan at open only finds where each value lies; arrays are decoded when somebody asks. A
vocabulary of 262,144 strings is walked once at open and once at use, natively (2 and 20 ms).

Layout: https://github.com/ggerganov/ggml/blob/9c2adc4962a3a5d259f10db2171e0df5c83e4b05/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from invar import _native

U32 = struct.Struct("<I")
U64 = struct.Struct("<Q")

MAX_NESTING = 4
"""Depth of arrays in arrays. No known key nests at all; the bound keeps recursion short."""

MAX_WALKED_ELEMENTS = 1 << 22
"""Strings and inner arrays in one file: they are walked one by one, 4 million in under a second.
The largest vocabularies known have some 800,000 (tokens and merges together)."""

LONGEST_MESSAGE = 700
"""Characters; a hostile file may name a key with 65,535 bytes. The list of types takes 250."""


class GGUFError(ValueError):
    """Anything wrong with a GGUF file. The message starts with the name of the file."""


class ValueKind(IntEnum):
    """Type numbers of metadata values."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


SCALAR_DTYPES: dict[ValueKind, np.dtype[Any]] = {
    ValueKind.UINT8: np.dtype("u1"),
    ValueKind.INT8: np.dtype("i1"),
    ValueKind.UINT16: np.dtype("<u2"),
    ValueKind.INT16: np.dtype("<i2"),
    ValueKind.UINT32: np.dtype("<u4"),
    ValueKind.INT32: np.dtype("<i4"),
    ValueKind.FLOAT32: np.dtype("<f4"),
    ValueKind.BOOL: np.dtype("u1"),
    ValueKind.UINT64: np.dtype("<u8"),
    ValueKind.INT64: np.dtype("<i8"),
    ValueKind.FLOAT64: np.dtype("<f8"),
}

INTEGER_KINDS = frozenset(
    {
        ValueKind.UINT8,
        ValueKind.INT8,
        ValueKind.UINT16,
        ValueKind.INT16,
        ValueKind.UINT32,
        ValueKind.INT32,
        ValueKind.UINT64,
        ValueKind.INT64,
    }
)
FLOAT_KINDS = frozenset({ValueKind.FLOAT32, ValueKind.FLOAT64})

# Fewest bytes that one element takes: lengths are checked against this before anything is walked.
ARRAY_HEAD_BYTES = U32.size + U64.size
SMALLEST_BYTES = {kind: dtype.itemsize for kind, dtype in SCALAR_DTYPES.items()} | {
    ValueKind.STRING: U64.size,
    ValueKind.ARRAY: ARRAY_HEAD_BYTES,
}


@dataclass(frozen=True)
class Entry:
    """Where a metadata value lies: bytes `[start, end)`, for an array without its head."""

    kind: ValueKind
    start: int
    end: int
    element: ValueKind | None = None
    count: int = 0

    def describe(self) -> str:
        if self.element is None:
            return self.kind.name.lower()
        return f"array of {self.element.name.lower()} ({self.count} entries)"


class Cursor:
    """Reads forward through the mapped header; nothing is read before its length is checked."""

    def __init__(self, buffer: mmap.mmap, file_name: str) -> None:
        self.buffer = buffer
        self.file_name = file_name
        self.size = len(buffer)
        self.position = 0
        self.walks_left = MAX_WALKED_ELEMENTS

    def error(self, text: str) -> GGUFError:
        if len(text) > LONGEST_MESSAGE:
            text = f"{text[: LONGEST_MESSAGE // 2]} … {text[-LONGEST_MESSAGE // 2 :]}"
        return GGUFError(f"{self.file_name}: {text}")

    def cut(self, what: str) -> GGUFError:
        return self.error(
            f"the file ends at byte {self.size}, inside {what}; it is cut short or damaged, "
            "download it again"
        )

    def advance(self, count: int, what: str) -> int:
        """Step over `count` bytes and return where they start."""
        start = self.position
        if count > self.size - start:
            raise self.cut(what)
        self.position = start + count
        return start

    def u32(self, what: str) -> int:
        value: int = U32.unpack_from(self.buffer, self.advance(4, what))[0]
        return value

    def u64(self, what: str) -> int:
        value: int = U64.unpack_from(self.buffer, self.advance(8, what))[0]
        return value

    def name(self, what: str, longest: int) -> str:
        """A key or tensor name: UTF-8, 1 to `longest` bytes."""
        length = self.u64(what)
        if not 1 <= length <= longest:
            raise self.error(f"{what} is {length} bytes long (1 to {longest}); the file is damaged")
        start = self.advance(length, what)
        try:
            return self.buffer[start : start + length].decode("utf-8")
        except UnicodeDecodeError:
            raise self.error(f"{what} is not UTF-8; the file is damaged") from None

    def spend_walks(self, count: int, what: str) -> None:
        self.walks_left -= count
        if self.walks_left < 0:
            raise self.error(
                f"{what}: more than {MAX_WALKED_ELEMENTS} strings and inner arrays in one file; "
                "no known model has that many, the file is damaged"
            )


def read_kind(cursor: Cursor, what: str) -> ValueKind:
    number = cursor.u32(what)
    try:
        return ValueKind(number)
    except ValueError:
        known = ", ".join(f"{kind.value} {kind.name.lower()}" for kind in ValueKind)
        raise cursor.error(f"{what}: value type {number} is not known (known: {known})") from None


def scan_value(cursor: Cursor, kind: ValueKind, key: str) -> Entry:
    """Step over one value, checking that all of it is there."""
    what = f"key {key}"
    if kind is ValueKind.ARRAY:
        return scan_array(cursor, what, depth=1)
    length = cursor.u64(what) if kind is ValueKind.STRING else SCALAR_DTYPES[kind].itemsize
    start = cursor.advance(length, what)
    return Entry(kind, start, cursor.position)


def scan_array(cursor: Cursor, what: str, depth: int) -> Entry:
    if depth > MAX_NESTING:
        raise cursor.error(f"{what}: arrays are nested deeper than {MAX_NESTING}")
    element = read_kind(cursor, what)
    count = cursor.u64(what)
    left = cursor.size - cursor.position
    if count > left // SMALLEST_BYTES[element]:
        raise cursor.error(
            f"{what}: an array of {count} {element.name.lower()} does not fit into the {left} "
            "bytes that follow; the file is cut short or damaged, download it again"
        )
    start = cursor.position
    if element is ValueKind.STRING:
        cursor.spend_walks(count, what)
        skip_strings(cursor, count, what)
    elif element is ValueKind.ARRAY:
        cursor.spend_walks(count, what)
        for _ in range(count):
            scan_array(cursor, what, depth + 1)
    else:
        cursor.advance(count * SCALAR_DTYPES[element].itemsize, what)
    return Entry(ValueKind.ARRAY, start, cursor.position, element, count)


def skip_strings(cursor: Cursor, count: int, what: str) -> None:
    end = _native.skip_strings(cursor.buffer, cursor.position, count)
    if end is None:
        raise cursor.cut(what)
    cursor.position = end


def decode_value(buffer: mmap.mmap, entry: Entry, file_name: str, key: str) -> Any:
    """A scanned value as a Python scalar, str, list of str, or read-only numpy array."""
    try:
        if entry.kind is ValueKind.ARRAY:
            value, _ = decode_array(buffer, entry.element, entry.count, entry.start)
            return value
        if entry.kind is ValueKind.STRING:
            return buffer[entry.start : entry.end].decode("utf-8")
        return decode_numbers(buffer, entry.kind, 1, entry.start)[0].item()
    except UnicodeDecodeError as error:
        text = bytes(error.object[:40])
        raise GGUFError(f"{file_name}: key {key}: {text!r} is not UTF-8, convert again") from None
    except InvalidBool as error:
        raise GGUFError(f"{file_name}: key {key}: {error}; the file is damaged") from None


class InvalidBool(ValueError):
    """A bool byte other than 0 and 1."""


def decode_numbers(buffer: mmap.mmap, kind: ValueKind, count: int, start: int) -> np.ndarray:
    dtype = SCALAR_DTYPES[kind]
    # Copied: values in the file are not aligned, and a view would keep the mapping open.
    numbers = np.frombuffer(buffer[start : start + count * dtype.itemsize], dtype=dtype)
    if kind is not ValueKind.BOOL:
        return numbers
    if (numbers > 1).any():
        raise InvalidBool(f"bool is stored as {numbers.max()}, not 0 or 1")
    return numbers.astype(np.bool_)


def decode_array(
    buffer: mmap.mmap, element: ValueKind | None, count: int, start: int
) -> tuple[Any, int]:
    """The array and the position after it."""
    if element is ValueKind.STRING:
        return _native.decode_strings(buffer, start, count)
    if element is ValueKind.ARRAY:
        inner = []
        for _ in range(count):
            kind = ValueKind(U32.unpack_from(buffer, start)[0])
            length = U64.unpack_from(buffer, start + U32.size)[0]
            value, start = decode_array(buffer, kind, length, start + ARRAY_HEAD_BYTES)
            inner.append(value)
        return inner, start
    assert element is not None
    numbers = decode_numbers(buffer, element, count, start)
    return numbers, start + count * SCALAR_DTYPES[element].itemsize
