"""The name of a build: everything that may change a bit of an answer, and nothing else.

Instruction set and thread count are not in it, because they change nothing (law 1). Hashing all
weight bytes would cost seconds at every start, so the content enters as samples: of every tensor
the first, the middle and the last ``SAMPLE_BYTES``. Two files that differ in a weight somewhere
else alone share a fingerprint; files that went through another quantiser, fine-tune or conversion
do not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from invar import _native
from invar.backends.cpu.packing import made_from
from invar.graph.graph import Graph, WeightSource

SAMPLE_BYTES = 1024


def fingerprint(kv: str, *, max_model_len: int, vocab_size: int) -> str:
    """16 hexadecimal digits. kv: `kv_fingerprint`"""
    build = repr((kv, max_model_len, vocab_size)).encode()
    return hashlib.blake2b(build, digest_size=8).hexdigest()


def kv_fingerprint(graph: Graph, source: WeightSource) -> str:
    """Of everything that may change a byte of K or V: 32 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(repr(("cpu", _native.NUMERIC_VERSION)).encode())
    # KV formats, ropes, scales, window sizes, the order of operations
    digest.update(repr(graph).encode())
    metadata: Mapping[str, Any] = getattr(source, "metadata", {})
    for key in sorted(metadata):
        if not key.startswith("tokenizer."):  # the graph counts ids, it does not read their text
            digest.update(f"{key}={metadata[key]!r};".encode())
    for name in sorted(source.tensors):
        tensor = source.tensors[name]
        digest.update(f"{name}:{tuple(tensor.shape)}:{int(tensor.type)};".encode())
        for stored in made_from(source, name) or (source.raw(name),):
            content = stored.reshape(-1)
            middle = content.size // 2
            for sample in (
                content[:SAMPLE_BYTES],
                content[middle : middle + SAMPLE_BYTES],
                content[-SAMPLE_BYTES:],
            ):
                digest.update(np.ascontiguousarray(sample).tobytes())
    return digest.hexdigest()
