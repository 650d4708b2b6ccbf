"""Float32 to blocks of quantised weights, for test models and synthetic files.

Every function takes `[blocks, block_size]` float32 and returns `[blocks, bytes_per_block]` uint8.
The 32-blocks round as llama.cpp's reference quantisers do; Q4_K and Q6_K take the plain minimum and
maximum of each sub-block, valid but of lower quality than llama.cpp's searched scales.

Reference: `quantize_row_*_ref` in
https://github.com/ggml-org/llama.cpp/blob/aca2e6ce7909064dbfbf3bd168e9ad3db1826e6c/ggml/src/ggml-quants.c
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

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


def encode_q8_0(blocks: Floats) -> Bytes:
    scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    scaled = blocks * reciprocal(scale)
    # Half away from zero, as C's roundf; numpy rounds half to even.
    magnitude = np.floor(np.abs(scaled))
    magnitude += np.abs(scaled) - magnitude >= np.float32(0.5)
    codes = np.copysign(magnitude, scaled).astype(np.int8).view(np.uint8)
    return np.concatenate([half_bytes(scale), codes], axis=1)


def packed_six_bit_scales(scales: Bytes, minimums: Bytes) -> Bytes:
    """8 scales and 8 minimums below 64 to the 12 bytes of Q4_K (see `six_bit_scales`)."""
    top_two, fifteen = np.uint8(0xC0), np.uint8(15)
    first = scales[:, :4] | (scales[:, 4:] << np.uint8(2) & top_two)
    second = minimums[:, :4] | (minimums[:, 4:] << np.uint8(2) & top_two)
    third = (scales[:, 4:] & fifteen) | (minimums[:, 4:] << np.uint8(4))
    return np.concatenate([first, second, third], axis=1)


def encode_q4_k(blocks: Floats) -> Bytes:
    parts = blocks.reshape(-1, 8, 32)
    # The format subtracts its minimum, so what it can store is a lowest value of zero or less.
    depth = -np.minimum(parts.min(axis=2), 0)
    step = (parts.max(axis=2) + depth).clip(0) / np.float32(15)
    scale = rounded_to_half(step.max(axis=1, keepdims=True) / np.float32(63))
    minimum = rounded_to_half(depth.max(axis=1, keepdims=True) / np.float32(63))
    scale_codes = np.rint(step * reciprocal(scale)).clip(0, 63).astype(np.uint8)
    minimum_codes = np.rint(depth * reciprocal(minimum)).clip(0, 63).astype(np.uint8)
    steps = scale * scale_codes
    depths = minimum * minimum_codes
    codes = np.rint((parts + depths[..., None]) * reciprocal(steps)[..., None]).clip(0, 15)
    packed = packed_nibbles(codes.astype(np.uint8).reshape(-1, 4, 64)).reshape(-1, 128)
    scales = packed_six_bit_scales(scale_codes, minimum_codes)
    return np.concatenate([half_bytes(scale), half_bytes(minimum), scales, packed], axis=1)


def encode_q6_k(blocks: Floats) -> Bytes:
    parts = blocks.reshape(-1, 16)
    steps = (extreme(parts) / np.float32(-32)).reshape(-1, 16)
    scale = rounded_to_half(np.abs(steps).max(axis=1, keepdims=True) / np.float32(127))
    scale_codes = np.rint(steps * reciprocal(scale)).clip(-128, 127)
    inverse = reciprocal((scale * scale_codes).astype(np.float32))
    values = np.rint(parts.reshape(-1, 16, 16) * inverse[..., None]).clip(-32, 31)
    codes = (values + np.float32(32)).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = packed_nibbles(codes.reshape(-1, 2, 128)).reshape(-1, 128)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8).reshape(1, 1, 4, 1)
    high = np.bitwise_or.reduce(codes >> np.uint8(4) << shifts, axis=2).reshape(-1, 64)
    signed = scale_codes.astype(np.int8).view(np.uint8)
    return np.concatenate([low, high, signed, half_bytes(scale)], axis=1)
