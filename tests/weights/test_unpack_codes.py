"""Codes in 32-bit words to blocks: every layout, tails of rows, an order, nothing beside them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from invar import _native

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
GUARD = 0xA5


def words_of(codes: np.ndarray, layout: str, bits: int) -> np.ndarray:
    """codes `[n, k]` as the layout stores them, int32."""
    per = 32 // bits
    along = np.ascontiguousarray(codes if layout == "rows" else codes.T)
    if layout == "gptq":
        return words_of(codes, "rows", bits).T.copy()
    groups = along.reshape(len(along), -1, per).astype(np.uint64)
    places = AWQ_ORDER if layout == "awq" else range(per)
    packed = sum(groups[..., column] << np.uint64(bits * at) for at, column in enumerate(places))
    return np.asarray(packed).astype(np.uint32).view(np.int32)


def blocks_of(codes: np.ndarray, bits: int) -> np.ndarray:
    """codes `[n, k]` as bytes of blocks, `[n, k / 32, bytes]`."""
    blocks = codes.reshape(len(codes), -1, 32)
    if bits == 8:
        return blocks ^ 0x80
    return blocks[..., :16] | blocks[..., 16:] << 4


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("header", [2, 4])
@pytest.mark.parametrize("n", [1, 8, 31, 40, 64, 129, 264])
@pytest.mark.parametrize(("layout", "bits"), [("gptq", 4), ("gptq", 8), ("rows", 4), ("rows", 8)])
def test_blocks_are_those_of_the_codes(
    layout: str, bits: int, n: int, header: int, ordered: bool
) -> None:
    check(layout, bits, n, header, ordered)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("n", [8, 40, 64, 136, 264])
def test_blocks_of_awq(n: int, ordered: bool) -> None:
    check("awq", 4, n, 3, ordered)


def check(layout: str, bits: int, n: int, header: int, ordered: bool) -> None:
    random, k = np.random.default_rng(n), 96
    codes = random.integers(0, 1 << bits, (n, k), dtype=np.uint8)
    order = random.permutation(k).astype(np.int32) if ordered else None
    words = words_of(codes, layout, bits)
    block_bytes = header + 4 * bits + 1  # a byte behind the codes is not theirs either
    for threads in (1, 2):
        out = np.full((n, k // 32 * block_bytes), GUARD, np.uint8)
        _native.unpack_codes(words, layout, bits, k, order, out, header, block_bytes, threads)
        blocks = out.reshape(n, -1, block_bytes)
        expected = blocks_of(codes if order is None else codes[:, order], bits)
        np.testing.assert_array_equal(blocks[..., header:-1], expected)
        assert (blocks[..., :header] == GUARD).all()
        assert (blocks[..., -1] == GUARD).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 3}, "do not fit together"),
        ({"k": 33}, "do not fit together"),
        ({"header": 3}, "do not fit together"),
        ({"layout": "awq"}, "words of another shape"),
        ({"words": np.zeros((8, 7), np.int32)}, "words of another shape"),
        ({"order": np.arange(63, dtype=np.int32)}, "an order of other columns"),
        ({"order": np.arange(1, 65, dtype=np.int32)}, "an order of other columns"),
        ({"layout": "marlin"}, "'marlin' is not known"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "words": np.zeros((8, 8), np.int32),
        "layout": "gptq",
        "bits": 4,
        "k": 64,
        "order": None,
        "out": np.zeros((8, 36), np.uint8),
        "header": 2,
        "block_bytes": 18,
        "threads": 1,
    }
    _native.unpack_codes(**given)
    with pytest.raises(ValueError, match=message):
        _native.unpack_codes(**(given | change))
