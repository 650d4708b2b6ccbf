"""GGUF files put together byte by byte, so that tests can lie in any field."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

U32, F32, STRING, ARRAY = 4, 6, 8, 9
U8, U16, I32, BOOL = 0, 2, 5, 7


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key(name: str | bytes, kind: int, payload: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + payload


def u32(name: str, value: int) -> bytes:
    return key(name, U32, struct.pack("<I", value))


def array(kind: int, count: int, payload: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + payload


def strings(*values: str | bytes) -> bytes:
    return array(STRING, len(values), b"".join(text(value) for value in values))


def tensor(
    name: str | bytes,
    dims: tuple[int, ...] = (4,),
    kind: int = 0,
    offset: int = 0,
    n_dims: int | None = None,
) -> bytes:
    """A tensor record. `dims` in the order of the file: the row length first."""
    count = len(dims) if n_dims is None else n_dims
    return (
        text(name)
        + struct.pack("<I", count)
        + struct.pack(f"<{len(dims)}Q", *dims)
        + struct.pack("<IQ", kind, offset)
    )


def gguf(
    keys: list[bytes],
    tensors: list[bytes],
    data: bytes = b"",
    *,
    alignment: int = 32,
    version: int = 3,
    key_count: int | None = None,
    tensor_count: int | None = None,
) -> bytes:
    head = b"GGUF" + struct.pack(
        "<IQQ",
        version,
        len(tensors) if tensor_count is None else tensor_count,
        len(keys) if key_count is None else key_count,
    )
    body = head + b"".join(keys) + b"".join(tensors)
    if not data:
        return body
    return body + bytes(-len(body) % alignment) + data


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def small_file(**options: Any) -> bytes:
    """Two keys, an array and two tensors: all kinds of field, in 300 bytes."""
    keys = [
        key("general.architecture", STRING, text("llama")),
        u32("llama.block_count", 2),
        key("tokenizer.ggml.tokens", ARRAY, strings("a", "bc", "")),
        key("tokenizer.ggml.scores", ARRAY, array(F32, 3, struct.pack("<3f", 0, -1, -2))),
    ]
    tensors = [tensor("a", (4, 2)), tensor("b", (3,), offset=32)]
    data = struct.pack("<8f", *range(8)) + struct.pack("<3f", 8, 9, 10)
    return gguf(keys, tensors, data, **options)
