"""Float32 to blocks of quantised weights, for test models and synthetic files.

Every function takes `[blocks, block_size]` float32 and returns `[blocks, bytes_per_block]` uint8.
The 32-blocks round as llama.cpp's reference quantisers do, IQ4_NL apart; that one and the K-quants
take the plain minimum and maximum of each (sub-)block, valid but of lower quality than llama.cpp's
searched scales.

Reference: `quantize_row_*_ref` in
https://github.com/ggml-org/llama.cpp/blob/aca2e6ce7909064dbfbf3bd168e9ad3db1826e6c/ggml/src/ggml-quants.c
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from invar.weights.block_decode import IQ4_VALUES, MXFP4_VALUES, TQ1_RUNS, UNSIGNED_E4M3

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


def half_bytes(column: Floats) -> Bytes:
    """`[blocks, 1]` float32 to the two bytes of its fp16, `[blocks, 2]`."""
    return column.astype("<f2").view(np.uint8)


def rounded_to_half(column: Floats) -> Floats:
    return column.astype(np.float16).astype(np.float32)


def reciprocal(column: Floats) -> Floats:
    """1 / x, and 0 for 0: a block of zeros gets the code of zero."""
    result: Floats = np.zeros_like(column)
    np.divide(np.float32(1), column, out=result, where=column != 0)
    return result


def truncated_codes(values: Floats, highest: int) -> Bytes:
    return np.clip(np.trunc(values), 0, highest).astype(np.uint8)


def packed_nibbles(codes: Bytes) -> Bytes:
    """`[..., 2n]` codes to `[..., n]` bytes: first half in low nibbles, second in high ones."""
    half = codes.shape[-1] // 2
    packed: Bytes = (codes[..., :half] & np.uint8(15)) | (codes[..., half:] << np.uint8(4))
    return packed


def extreme(blocks: Floats) -> Floats:
    """The value of greatest magnitude of each block, with its sign, `[blocks, 1]`."""
    index = np.abs(blocks).argmax(axis=1, keepdims=True)
    return np.take_along_axis(blocks, index, axis=1)


def encode_f32(blocks: Floats) -> Bytes:
    return blocks.astype("<f4").view(np.uint8)


def encode_f16(blocks: Floats) -> Bytes:
    with np.errstate(over="ignore"):
        return blocks.astype("<f2").view(np.uint8)


def encode_bf16(blocks: Floats) -> Bytes:
    """Round to nearest, ties to even; a NaN stays a NaN, made quiet."""
    bits = blocks.view(np.uint32)
    odd = bits >> np.uint32(16) & np.uint32(1)
    rounded = bits.astype(np.uint64) + np.uint64(0x7FFF) + odd
    quiet = bits.astype(np.uint64) | np.uint64(0x0040_0000)
    chosen = np.where(np.isnan(blocks), quiet, rounded)
    return (chosen >> np.uint64(16)).astype("<u2").view(np.uint8)


def encode_q4_0(blocks: Floats) -> Bytes:
    scale = extreme(blocks) / np.float32(-8)
    codes = truncated_codes(blocks * reciprocal(scale) + np.float32(8.5), 15)
    return np.concatenate([half_bytes(scale), packed_nibbles(codes)], axis=1)


def encode_q4_1(blocks: Floats) -> Bytes:
    lowest = blocks.min(axis=1, keepdims=True)
    scale = (blocks.max(axis=1, keepdims=True) - lowest) / np.float32(15)
    codes = truncated_codes((blocks - lowest) * reciprocal(scale) + np.float32(0.5), 15)
    return np.concatenate([half_bytes(scale), half_bytes(lowest), packed_nibbles(codes)], axis=1)


def encode_q5_0(blocks: Floats) -> Bytes:
    scale = extreme(blocks) / np.float32(-16)
    codes = truncated_codes(blocks * reciprocal(scale) + np.float32(16.5), 31)
    fifth = np.packbits(codes >> np.uint8(4), axis=1, bitorder="little")
    return np.concatenate([half_bytes(scale), fifth, packed_nibbles(codes)], axis=1)


def encode_q5_1(blocks: Floats) -> Bytes:
    lowest = blocks.min(axis=1, keepdims=True)
    scale = (blocks.max(axis=1, keepdims=True) - lowest) / np.float32(31)
    codes = truncated_codes((blocks - lowest) * reciprocal(scale) + np.float32(0.5), 31)
    fifth = np.packbits(codes >> np.uint8(4), axis=1, bitorder="little")
    halves = [half_bytes(scale), half_bytes(lowest)]
    return np.concatenate([*halves, fifth, packed_nibbles(codes)], axis=1)


def rounded_away(values: Floats) -> Floats:
    """Half away from zero, as C's roundf; numpy rounds half to even."""
    magnitude = np.floor(np.abs(values))
    magnitude += np.abs(values) - magnitude >= np.float32(0.5)
    return np.copysign(magnitude, values)


def encode_q8_0(blocks: Floats) -> Bytes:
    scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    scaled = blocks * reciprocal(scale)
    codes = rounded_away(scaled).astype(np.int8).view(np.uint8)
    return np.concatenate([half_bytes(scale), codes], axis=1)


def packed_six_bit_scales(scales: Bytes, minimums: Bytes) -> Bytes:
    """8 scales and 8 minimums below 64 to the 12 bytes of Q4_K (see `six_bit_scales`)."""
    top_two, fifteen = np.uint8(0xC0), np.uint8(15)
    first = scales[:, :4] | (scales[:, 4:] << np.uint8(2) & top_two)
    second = minimums[:, :4] | (minimums[:, 4:] << np.uint8(2) & top_two)
    third = (scales[:, 4:] & fifteen) | (minimums[:, 4:] << np.uint8(4))
    return np.concatenate([first, second, third], axis=1)


def packed_fields(codes: Bytes, bits: int) -> Bytes:
    """`[..., 8 // bits, n]` codes to `[..., n]` bytes, the first in the low bits."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(-1, 1)
    packed: Bytes = np.bitwise_or.reduce(codes << shifts, axis=-2)
    return packed


@dataclass(frozen=True)
class ShiftedCodes:
    """Weights as `scale * scale_codes * codes - minimum * minimum_codes`."""

    scale: Floats  # [blocks, 1], as fp16 holds it
    minimum: Floats
    scale_codes: Bytes  # [blocks, parts]
    minimum_codes: Bytes
    codes: Bytes  # [blocks, parts, weights of a part]


def shifted_codes(parts: Floats, highest_code: int, highest_scale: int) -> ShiftedCodes:
    """parts: `[blocks, parts, weights of a part]`."""
    # The format subtracts its minimum, so what it can store is a lowest value of zero or less.
    depth = -np.minimum(parts.min(axis=2), 0)
    step = (parts.max(axis=2) + depth).clip(0) / np.float32(highest_code)
    scale = rounded_to_half(step.max(axis=1, keepdims=True) / np.float32(highest_scale))
    minimum = rounded_to_half(depth.max(axis=1, keepdims=True) / np.float32(highest_scale))
    scale_codes = np.rint(step * reciprocal(scale)).clip(0, highest_scale).astype(np.uint8)
    minimum_codes = np.rint(depth * reciprocal(minimum)).clip(0, highest_scale).astype(np.uint8)
    inverse = reciprocal(scale * scale_codes)[..., None]
    depths = (minimum * minimum_codes)[..., None]
    codes = np.rint((parts + depths) * inverse).clip(0, highest_code).astype(np.uint8)
    return ShiftedCodes(scale, minimum, scale_codes, minimum_codes, codes)


def encode_q2_k(blocks: Floats) -> Bytes:
    part = shifted_codes(blocks.reshape(-1, 16, 16), 3, 15)
    scales = part.scale_codes | part.minimum_codes << np.uint8(4)
    codes = packed_fields(part.codes.reshape(-1, 2, 4, 32), 2).reshape(-1, 64)
    halves = [half_bytes(part.scale), half_bytes(part.minimum)]
    return np.concatenate([scales, codes, *halves], axis=1)


def signed_scales(steps: Floats, lowest: int, highest: int) -> tuple[Floats, Floats]:
    """Steps `[blocks, parts]` as a scale `[blocks, 1]` that fp16 holds, times integers."""
    largest = np.abs(steps).max(axis=1, keepdims=True)
    scale = rounded_to_half(largest / np.float32(highest))
    return scale, np.rint(steps * reciprocal(scale)).clip(lowest, highest)


def encode_q3_k(blocks: Floats) -> Bytes:
    parts = blocks.reshape(-1, 16)
    scale, scale_codes = signed_scales((extreme(parts) / np.float32(-4)).reshape(-1, 16), -32, 31)
    inverse = reciprocal((scale * scale_codes).astype(np.float32))
    values = np.rint(parts.reshape(-1, 16, 16) * inverse[..., None]).clip(-4, 3)
    codes = (values + np.float32(4)).astype(np.uint8)
    kept = packed_fields(codes.reshape(-1, 8, 32) >> np.uint8(2), 1)
    low = packed_fields((codes & np.uint8(3)).reshape(-1, 2, 4, 32), 2).reshape(-1, 64)
    six_bits = (scale_codes + 32).astype(np.uint8)
    low_scales = packed_nibbles(six_bits)
    high_scales = packed_fields((six_bits >> np.uint8(4)).reshape(-1, 4, 4), 2)
    return np.concatenate([kept, low, low_scales, high_scales, half_bytes(scale)], axis=1)


def opening_k4(part: ShiftedCodes) -> list[Bytes]:
    """d, dmin and scales as they open a Q4_K or Q5_K block."""
    scales = packed_six_bit_scales(part.scale_codes, part.minimum_codes)
    return [half_bytes(part.scale), half_bytes(part.minimum), scales]


def packed_code_pairs(codes: Bytes) -> Bytes:
    """`[blocks, 8, 32]` codes below 16 to 128 bytes, neighbouring sub-blocks in one byte."""
    return packed_nibbles(codes.reshape(-1, 4, 64)).reshape(-1, 128)


def encode_q4_k(blocks: Floats) -> Bytes:
    part = shifted_codes(blocks.reshape(-1, 8, 32), 15, 63)
    return np.concatenate([*opening_k4(part), packed_code_pairs(part.codes)], axis=1)


def encode_q5_k(blocks: Floats) -> Bytes:
    part = shifted_codes(blocks.reshape(-1, 8, 32), 31, 63)
    fifth = packed_fields(part.codes >> np.uint8(4), 1)
    low = packed_code_pairs(part.codes & np.uint8(15))
    return np.concatenate([*opening_k4(part), fifth, low], axis=1)


def encode_q6_k(blocks: Floats) -> Bytes:
    parts = blocks.reshape(-1, 16)
    steps = (extreme(parts) / np.float32(-32)).reshape(-1, 16)
    scale, scale_codes = signed_scales(steps, -128, 127)
    inverse = reciprocal((scale * scale_codes).astype(np.float32))
    values = np.rint(parts.reshape(-1, 16, 16) * inverse[..., None]).clip(-32, 31)
    codes = (values + np.float32(32)).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = packed_nibbles(codes.reshape(-1, 2, 128)).reshape(-1, 128)
    high = packed_fields(codes >> np.uint8(4), 2).reshape(-1, 64)
    signed = scale_codes.astype(np.int8).view(np.uint8)
    return np.concatenate([low, high, signed, half_bytes(scale)], axis=1)


def nearest(values: Floats, table: Floats) -> Bytes:
    """Index of the closest entry, the first of two."""
    index: Bytes = np.abs(values[..., None] - table).argmin(axis=-1).astype(np.uint8)
    return index


def encode_iq4_nl(blocks: Floats) -> Bytes:
    scale = rounded_to_half(extreme(blocks) / IQ4_VALUES[0])
    codes = nearest(blocks * reciprocal(scale), IQ4_VALUES)
    return np.concatenate([half_bytes(scale), packed_nibbles(codes)], axis=1)


def encode_iq4_xs(blocks: Floats) -> Bytes:
    parts = blocks.reshape(-1, 32)
    scale, scale_codes = signed_scales((extreme(parts) / IQ4_VALUES[0]).reshape(-1, 8), -32, 31)
    inverse = reciprocal((scale * scale_codes).astype(np.float32))
    codes = nearest(parts.reshape(-1, 8, 32) * inverse[..., None], IQ4_VALUES)
    six_bits = (scale_codes + 32).astype(np.uint8)
    high = packed_fields((six_bits >> np.uint8(4)).reshape(-1, 2, 4).swapaxes(1, 2), 2)
    low = packed_fields((six_bits & np.uint8(15)).reshape(-1, 4, 2).swapaxes(1, 2), 4)
    packed = packed_nibbles(codes).reshape(-1, 128)
    return np.concatenate([half_bytes(scale), high, low, packed], axis=1)


def encode_mxfp4(blocks: Floats) -> Bytes:
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    # The largest magnitude lies in [4, 8) units of 2^(e - 127), the values count half units.
    _, exponents = np.frexp(largest)
    biased = np.where(largest > 0, exponents - 3 + 127, 0).clip(0, 255)
    codes = nearest(np.ldexp(blocks, 128 - biased), MXFP4_VALUES)
    return np.concatenate([biased.astype(np.uint8), packed_nibbles(codes)], axis=1)


def three_valued(blocks: Floats) -> tuple[Floats, Bytes]:
    """The largest magnitude, and codes 0, 1, 2 of the weights over it."""
    scale = np.abs(blocks).max(axis=1, keepdims=True)
    rounded = rounded_away(blocks * reciprocal(scale))
    return scale, (rounded + np.float32(1)).astype(np.uint8)


def encode_tq1_0(blocks: Floats) -> Bytes:
    scale, codes = three_valued(blocks)
    parts, at = [], 0
    for start, stop, count in TQ1_RUNS:
        size = count * (stop - start)
        digits = codes[:, at : at + size].reshape(len(blocks), count, -1).astype(np.uint16)
        powers = (3 ** np.arange(4, 4 - count, -1)).astype(np.uint16).reshape(-1, 1)
        # As a fraction of 243 rounded up to 256ths.
        number = (digits * powers).sum(axis=1)
        parts.append(((number * 256 + 242) // 243).astype(np.uint8))
        at += size
    return np.concatenate([*parts, half_bytes(scale)], axis=1)


def encode_tq2_0(blocks: Floats) -> Bytes:
    scale, codes = three_valued(blocks)
    packed = packed_fields(codes.reshape(-1, 2, 4, 32), 2).reshape(-1, 64)
    return np.concatenate([packed, half_bytes(scale)], axis=1)


def encode_nvfp4(blocks: Floats) -> Bytes:
    """The largest of 16 becomes about 6, the largest value, under the nearest scale."""
    parts = blocks.reshape(-1, 4, 16)
    wanted = np.abs(parts).max(axis=2) / np.float32(6)
    middles = (UNSIGNED_E4M3[:126] + UNSIGNED_E4M3[1:127]) / np.float32(2)
    codes = np.searchsorted(middles, wanted).astype(np.uint8)
    inverse = reciprocal(UNSIGNED_E4M3[codes] * np.float32(0.5))
    packed = packed_nibbles(nearest(parts * inverse[..., None], MXFP4_VALUES))
    return np.concatenate([codes, packed.reshape(-1, 32)], axis=1)
