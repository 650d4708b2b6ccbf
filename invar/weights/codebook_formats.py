"""Blocks of weights whose values a codebook knows by an index: IQ1, IQ2 and IQ3.

A row of the codebook holds eight (IQ1, IQ2) or four (IQ3) values. IQ2 and IQ3 have a sign for each
weight besides, IQ1 one sign for an eighth that is added to all values of a row or of several.
Blocks have 256 weights; decoders take `[blocks, block_bytes]` uint8 and return `[blocks, 256]`
float32, to the bit what the reference makes of them (every product is exact); encoders go the other
way, with the nearest row under a plain scale.

Layouts: https://github.com/ggml-org/llama.cpp/blob/aca2e6ce7909064dbfbf3bd168e9ad3db1826e6c/ggml/src/ggml-common.h
Order of bits: `dequantize_row_iq*` in
https://github.com/ggml-org/llama.cpp/blob/aca2e6ce7909064dbfbf3bd168e9ad3db1826e6c/ggml/src/ggml-quants.c
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from invar import _native
from invar.weights.block_decode import K_BLOCK, bit_fields, half_column
from invar.weights.block_encode import half_bytes, reciprocal, rounded_to_half

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Numbers = npt.NDArray[np.int64]

# The values that occur in a codebook, by their places in its packed form.
VALUES: dict[str, tuple[int, ...]] = {
    "iq1": (-1, 0, 1),
    "iq2_xxs": (8, 25, 43),
    "iq2_xs": (8, 25, 43),
    "iq2_s": (8, 25, 43),
    "iq3_xxs": (4, 12, 20, 28, 36, 44, 52, 62),
    "iq3_s": (1, 3, 5, 7, 9, 11, 13, 15),
}
EIGHTH = np.float32(0.125)
HIGHEST_SCALE = {3: 7, 4: 15}  # of so many bits

IQ1_LARGEST = 1.7
"""Steps for the largest weight: of 32 normals that is 2.1 sigma, and the best three levels for
normals lie 1.22 sigma apart."""


@cache
def codebook(name: str) -> Floats:
    """`[rows, 8]`, of IQ3 `[rows, 4]`."""
    packed = np.asarray(_native.codebook(name), np.uint16)
    width = 4 if name.startswith("iq3") else 8
    bits = 16 // width
    places = packed[:, None] >> np.arange(0, 16, bits, dtype=np.uint16) & np.uint16((1 << bits) - 1)
    rows: Floats = np.array(VALUES[name], np.float32)[places]
    return rows


def words(blocks: Bytes, start: int, stop: int, dtype: str) -> Numbers:
    """Little-endian integers in bytes `start` to `stop`, `[blocks, count]`."""
    return np.ascontiguousarray(blocks[:, start:stop]).view(dtype).astype(np.int64)


def sign_bits(stored: Numbers) -> Numbers:
    """Seven signs to eight: an even number of them is negative."""
    odd = stored ^ stored >> 4
    odd = odd ^ odd >> 2
    odd = (odd ^ odd >> 1) & 1
    return stored | odd << 7


def signs_of(bits: Numbers) -> Floats:
    """`[…]` bytes to `[…, 8]` of 1 and -1, low bit first."""
    return np.where(bits[..., None] >> np.arange(8) & 1, np.float32(-1), np.float32(1))


def nibble_scales(data: Bytes) -> Floats:
    """Bytes of two scales each, low nibble first, as 2 s + 1: `[blocks, 2 n]`."""
    scales = bit_fields(data, 4).swapaxes(1, 2).reshape(len(data), -1)
    return 2 * scales.astype(np.float32) + 1


def signed_rows(name: str, index: Numbers, signs: Floats, steps: Floats) -> Floats:
    """index: `[blocks, rows]` of the codebook; signs: of 256 weights, any shape; steps: `[blocks,
    parts]`, what the scale of each part comes to. Returns `[blocks, 256]`."""
    values = codebook(name)[index].reshape(len(index), -1) * signs.reshape(len(index), -1)
    parts = values.reshape(len(index), steps.shape[1], -1)
    return (steps[..., None] * parts).reshape(-1, K_BLOCK)


# ---------------------------------------------------------------- IQ2


def decode_iq2_xxs(blocks: Bytes) -> Floats:
    """d, then for each 32: four indices; four times seven signs and on top a scale in a word."""
    groups = np.ascontiguousarray(blocks[:, 2:]).reshape(len(blocks), 8, 8)
    word = words(groups.reshape(-1, 8), 4, 8, "<u4").reshape(-1, 8)
    signs = signs_of(sign_bits(word[..., None] >> np.arange(0, 28, 7) & 127))
    steps = half_column(blocks, 0) * (2 * (word >> 28) + 1).astype(np.float32) * EIGHTH
    index = groups[..., :4].reshape(-1, 32).astype(np.int64)
    return signed_rows("iq2_xxs", index, signs, steps)


def decode_iq2_xs(blocks: Bytes) -> Floats:
    """d, 32 words of nine bits of index and seven signs, 8 of scales of 16."""
    word = words(blocks, 2, 66, "<u2")
    steps = half_column(blocks, 0) * nibble_scales(blocks[:, 66:74]) * EIGHTH
    return signed_rows("iq2_xs", word & 511, signs_of(sign_bits(word >> 9)), steps)


def decode_iq2_s(blocks: Bytes) -> Floats:
    """d, 32 low bytes of indices, 32 of signs, 8 of the indices' high pairs, 8 of scales of 16."""
    high = bit_fields(blocks[:, 66:74], 2).swapaxes(1, 2).reshape(-1, 32)
    index = blocks[:, 2:34].astype(np.int64) | high.astype(np.int64) << 8
    steps = half_column(blocks, 0) * nibble_scales(blocks[:, 74:82]) * EIGHTH
    return signed_rows("iq2_s", index, signs_of(blocks[:, 34:66].astype(np.int64)), steps)


# ---------------------------------------------------------------- IQ3


def decode_iq3_xxs(blocks: Bytes) -> Floats:
    """d, 64 indices, and for each 32 a word as in IQ2_XXS."""
    word = words(blocks, 66, 98, "<u4")
    signs = signs_of(sign_bits(word[..., None] >> np.arange(0, 28, 7) & 127))
    scales = (2 * (word >> 28) + 1).astype(np.float32)
    steps = half_column(blocks, 0) * scales * np.float32(0.25)
    return signed_rows("iq3_xxs", blocks[:, 2:66].astype(np.int64), signs, steps)


def decode_iq3_s(blocks: Bytes) -> Floats:
    """d, 64 low bytes of indices, 8 of their high bits, 32 of signs, 4 of scales of 32."""
    high = bit_fields(blocks[:, 66:74], 1).swapaxes(1, 2).reshape(-1, 64)
    index = blocks[:, 2:66].astype(np.int64) | high.astype(np.int64) << 8
    steps = half_column(blocks, 0) * nibble_scales(blocks[:, 106:110])
    return signed_rows("iq3_s", index, signs_of(blocks[:, 74:106].astype(np.int64)), steps)


# ---------------------------------------------------------------- IQ1


def shifted_rows(index: Numbers, down: npt.NDArray[np.bool_], steps: Floats) -> Floats:
    """index: `[blocks, 32]`; down: the same, or one for several; steps: `[blocks, parts]`."""
    shift = np.repeat(np.where(down, -EIGHTH, EIGHTH), 32 // down.shape[1], axis=1)
    values = (codebook("iq1")[index] + shift[..., None]).reshape(len(index), steps.shape[1], -1)
    result: Floats = (steps[..., None] * values).reshape(-1, K_BLOCK)
    return result


def decode_iq1_s(blocks: Bytes) -> Floats:
    """d, 32 low bytes of indices; for each 32 a word: high bits of four, a scale, the sign."""
    word = words(blocks, 34, 50, "<u2")
    high = word[..., None] >> np.arange(0, 12, 3) & 7
    index = blocks[:, 2:34].astype(np.int64) | high.reshape(-1, 32) << 8
    steps = half_column(blocks, 0) * (2 * (word >> 12 & 7) + 1).astype(np.float32)
    return shifted_rows(index, word >> 15 == 1, steps)


def decode_iq1_m(blocks: Bytes) -> Floats:
    """32 low bytes of indices, 32 nibbles of three high bits and a sign, four words that hold
    scales of 16 in three bits each and, in their high nibbles, d."""
    nibble = bit_fields(blocks[:, 32:48], 4).swapaxes(1, 2).reshape(-1, 32).astype(np.int64)
    index = blocks[:, :32].astype(np.int64) | (nibble & 7) << 8
    word = words(blocks, 48, 56, "<u2")
    scales = (word[..., None] >> np.arange(0, 12, 3) & 7).reshape(-1, 16)
    halves = ((word >> 12) << np.arange(0, 16, 4)).sum(axis=1, keepdims=True).astype("<u2")
    d = halves.view("<f2").astype(np.float32)
    return shifted_rows(index, nibble >> 3 == 1, d * (2 * scales + 1).astype(np.float32))


# ---------------------------------------------------------------- to blocks


def nearest_rows(vectors: Floats, rows: Floats) -> Numbers:
    """Index of the row that is closest to each vector, `[vectors]`."""
    lengths = (rows * rows).sum(axis=1)
    found = np.empty(len(vectors), np.int64)
    for at in range(0, len(vectors), 4096):
        part = vectors[at : at + 4096]
        found[at : at + 4096] = (lengths - 2 * part @ rows.T).argmin(axis=1)
    return found


def scale_codes(parts: Floats, largest: float, bits: int) -> tuple[Floats, Numbers, Floats]:
    """d `[blocks, 1]`, codes s and d (2 s + 1) `[blocks, parts]` with `parts` `[blocks, parts, n]`.
    The largest weight becomes about `largest` of these steps."""
    highest = HIGHEST_SCALE[bits]
    wanted = np.abs(parts).max(axis=2) / np.float32(largest)
    d = rounded_to_half(wanted.max(axis=1, keepdims=True) / np.float32(2 * highest + 1))
    codes = np.rint((wanted * reciprocal(d) - 1) / 2).clip(0, highest)
    return d, codes.astype(np.int64), (d * (2 * codes + 1)).astype(np.float32)


def signs_and_rows(name: str, blocks: Floats, steps: Floats, even: bool) -> tuple[Numbers, Numbers]:
    """Bytes of signs `[blocks, 32]` and indices of magnitudes `[blocks, rows]`.

    steps: what a value of one stands for, `[blocks, parts]`. even: of eight signs seven are stored,
    and the weakest weight gives way.
    """
    negative = np.signbit(blocks).reshape(-1, 8)
    vectors = np.abs(blocks).reshape(-1, 8)
    if even:
        odd = negative.sum(axis=1) % 2 == 1
        weakest = vectors[odd].argmin(axis=1)
        negative[np.flatnonzero(odd), weakest] ^= True
        vectors[np.flatnonzero(odd), weakest] = 0
    signs = np.packbits(negative, axis=1, bitorder="little").reshape(-1, 32).astype(np.int64)
    parts = vectors.reshape(*steps.shape, -1) * reciprocal(steps)[..., None]
    rows = codebook(name)
    index = nearest_rows(parts.reshape(-1, rows.shape[1]).astype(np.float32), rows)
    return signs, index.reshape(len(blocks), -1)


def low_bytes(index: Numbers) -> Bytes:
    return (index & 255).astype(np.uint8)


def joined(numbers: Numbers, bits: int, dtype: str = "u1") -> Bytes:
    """`[blocks, n, m]` fields, the first in the low bits, to `[blocks, bytes]`."""
    shifts = np.arange(numbers.shape[-1]) * bits
    return np.ascontiguousarray((numbers << shifts).sum(axis=-1).astype(f"<{dtype}")).view(np.uint8)


def encode_iq2_xxs(blocks: Floats) -> Bytes:
    d, codes, steps = scale_codes(blocks.reshape(-1, 8, 32), 43 / 8, 4)
    signs, index = signs_and_rows("iq2_xxs", blocks, steps * EIGHTH, even=True)
    word = joined(np.dstack([signs.reshape(-1, 8, 4) & 127, codes]), 7, "u4")
    groups = [low_bytes(index).reshape(-1, 8, 4), word.reshape(-1, 8, 4)]
    return np.concatenate([half_bytes(d), np.dstack(groups).reshape(-1, 64)], axis=1)


def encode_iq2_xs(blocks: Floats) -> Bytes:
    d, codes, steps = scale_codes(blocks.reshape(-1, 16, 16), 43 / 8, 4)
    signs, index = signs_and_rows("iq2_xs", blocks, steps * EIGHTH, even=True)
    word = (index | (signs & 127) << 9).astype("<u2").view(np.uint8)
    return np.concatenate([half_bytes(d), word, joined(codes.reshape(-1, 8, 2), 4)], axis=1)


def encode_iq2_s(blocks: Floats) -> Bytes:
    d, codes, steps = scale_codes(blocks.reshape(-1, 16, 16), 43 / 8, 4)
    signs, index = signs_and_rows("iq2_s", blocks, steps * EIGHTH, even=False)
    high, scales = joined((index >> 8).reshape(-1, 8, 4), 2), joined(codes.reshape(-1, 8, 2), 4)
    return np.concatenate([half_bytes(d), low_bytes(index), low_bytes(signs), high, scales], axis=1)


def encode_iq3_xxs(blocks: Floats) -> Bytes:
    d, codes, steps = scale_codes(blocks.reshape(-1, 8, 32), 62 / 4, 4)
    signs, index = signs_and_rows("iq3_xxs", blocks, steps * np.float32(0.25), even=True)
    word = joined(np.dstack([signs.reshape(-1, 8, 4) & 127, codes]), 7, "u4")
    return np.concatenate([half_bytes(d), low_bytes(index), word], axis=1)


def encode_iq3_s(blocks: Floats) -> Bytes:
    d, codes, steps = scale_codes(blocks.reshape(-1, 8, 32), 15, 4)
    signs, index = signs_and_rows("iq3_s", blocks, steps, even=False)
    high, scales = joined((index >> 8).reshape(-1, 8, 8), 1), joined(codes.reshape(-1, 4, 2), 4)
    return np.concatenate([half_bytes(d), low_bytes(index), high, low_bytes(signs), scales], axis=1)


def shifted_index(blocks: Floats, steps: Floats) -> Numbers:
    """Rows of IQ1 `[blocks, 32]`, all shifted up by an eighth."""
    parts = blocks.reshape(*steps.shape, -1) * reciprocal(steps)[..., None] - EIGHTH
    return nearest_rows(parts.reshape(-1, 8).astype(np.float32), codebook("iq1")).reshape(-1, 32)


def encode_iq1_s(blocks: Floats) -> Bytes:
    d, codes, steps = scale_codes(blocks.reshape(-1, 8, 32), IQ1_LARGEST, 3)
    index = shifted_index(blocks, steps)
    word = joined(np.dstack([(index >> 8).reshape(-1, 8, 4), codes]), 3, "u2")
    return np.concatenate([half_bytes(d), low_bytes(index), word], axis=1)


def encode_iq1_m(blocks: Floats) -> Bytes:
    d, codes, steps = scale_codes(blocks.reshape(-1, 16, 16), IQ1_LARGEST, 3)
    index = shifted_index(blocks, steps)
    high = joined((index >> 8).reshape(-1, 16, 2), 4)
    halves = half_bytes(d).view("<u2").astype(np.int64)
    nibbles = halves >> np.arange(0, 16, 4) & 15
    word = joined(np.dstack([codes.reshape(-1, 4, 4), nibbles]), 3, "u2")
    return np.concatenate([low_bytes(index), high, word], axis=1)
