"""Formats that GGUF has not: what the layouts of Hugging Face checkpoints are brought to.

    int4_zp  32 weights  f16 d | u8 z | u8 qs[16]: d * (q - z), nibbles as those of Q4_0
    int8_zp  32 weights  f16 d | f16 z - 128 | s8 q - 128 [32]
    int8     a row       f32 d | s8 q[k]
    fp8      a row       f32 d[ceil(k / 128)] | e4m3fn q[k]
    nvfp4    a row       f32 d | blocks of NVFP4

Blocks are decoded and encoded like those of `block_decode` and `block_encode`; rows are
`[rows, row_bytes]` uint8 and `[rows, k]` float32.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from invar.weights.block_decode import decode_nvfp4, half_column, nibbles
from invar.weights.block_encode import (
    encode_nvfp4,
    half_bytes,
    packed_nibbles,
    reciprocal,
    rounded_to_half,
)

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

FP8_K = 128
"""Weights that share a scale, at least: the blocks of DeepSeek's and Qwen's checkpoints."""

FP8_LARGEST = np.float32(448)

NVFP4_K, NVFP4_BYTES, NVFP4_GROUP = 64, 36, 16
"""Weights and bytes of a block of NVFP4, and weights that share a scale."""


def e4m3_values() -> Floats:
    """What each byte stands for. OCP 8-bit floating point (OFP8) 1.0, section 5.2: E4M3."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    values = np.where(
        exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0)
    )
    values[(codes & 127) == 127] = np.nan
    return np.where(codes < 128, values, -values).astype(np.float32)


E4M3 = e4m3_values()


def int8_row_bytes(columns: int) -> int:
    return 4 + columns


def fp8_row_bytes(columns: int) -> int:
    return fp8_scales(columns) * 4 + columns


def nvfp4_row_bytes(columns: int) -> int:
    return 4 + columns // NVFP4_K * NVFP4_BYTES


def fp8_scales(columns: int) -> int:
    """Scales of a row."""
    return -(-columns // FP8_K)


def decode_int4_zp(blocks: Bytes) -> Floats:
    codes = nibbles(blocks[:, 3:]).astype(np.float32) - blocks[:, 2:3].astype(np.float32)
    return half_column(blocks, 0) * codes


def decode_int8_zp(blocks: Bytes) -> Floats:
    codes = np.ascontiguousarray(blocks[:, 4:]).view(np.int8).astype(np.float32)
    return half_column(blocks, 0) * (codes - half_column(blocks, 2))


def decode_int8(rows: Bytes) -> Floats:
    scales = np.ascontiguousarray(rows[:, :4]).view("<f4")
    return scales * np.ascontiguousarray(rows[:, 4:]).view(np.int8).astype(np.float32)


def decode_fp8(rows: Bytes) -> Floats:
    count = -(-rows.shape[1] // (FP8_K + 4))
    scales = np.ascontiguousarray(rows[:, : 4 * count]).view("<f4")
    codes = E4M3[rows[:, 4 * count :]]
    return np.repeat(scales, FP8_K, axis=1)[:, : codes.shape[1]] * codes


def decode_nvfp4_rows(rows: Bytes) -> Floats:
    scales = np.ascontiguousarray(rows[:, :4]).view("<f4")
    blocks = np.ascontiguousarray(rows[:, 4:]).reshape(-1, NVFP4_BYTES)
    values: Floats = decode_nvfp4(blocks).reshape(len(rows), -1) * scales
    return values


def encode_int4_zp(blocks: Floats) -> Bytes:
    scale, zero = scale_and_zero(blocks, 15)
    codes = np.clip(np.rint(blocks * reciprocal(scale) + zero), 0, 15).astype(np.uint8)
    return np.concatenate([half_bytes(scale), zero.astype(np.uint8), packed_nibbles(codes)], axis=1)


def encode_int8_zp(blocks: Floats) -> Bytes:
    scale, zero = scale_and_zero(blocks, 255)
    codes = np.clip(np.rint(blocks * reciprocal(scale) + zero), 0, 255) - 128
    signed = codes.astype(np.int8).view(np.uint8)
    return np.concatenate([half_bytes(scale), half_bytes(zero - 128), signed], axis=1)


def scale_and_zero(blocks: Floats, highest: int) -> tuple[Floats, Floats]:
    """Of codes 0 to `highest`, `[blocks, 1]` each: zero and every value are in their range."""
    lowest = np.minimum(blocks.min(axis=1, keepdims=True), np.float32(0))
    largest = np.maximum(blocks.max(axis=1, keepdims=True), np.float32(0))
    scale = rounded_to_half((largest - lowest) / np.float32(highest))
    zero: Floats = np.clip(np.rint(-lowest * reciprocal(scale)), 0, highest)
    return scale, zero


def encode_int8(rows: Floats) -> Bytes:
    scale = np.abs(rows).max(axis=1, keepdims=True) / np.float32(127)
    codes = np.rint(rows * reciprocal(scale)).astype(np.int8)
    return np.concatenate([scale.astype("<f4").view(np.uint8), codes.view(np.uint8)], axis=1)


def encode_fp8(rows: Floats) -> Bytes:
    """One scale for the row, repeated."""
    scale = np.abs(rows).max(axis=1, keepdims=True) / FP8_LARGEST
    scales = np.repeat(scale, fp8_scales(rows.shape[1]), axis=1)
    codes = nearest_e4m3(rows * reciprocal(scale))
    return np.concatenate([scales.astype("<f4").view(np.uint8), codes], axis=1)


def encode_nvfp4_rows(rows: Floats) -> Bytes:
    """The row's scale puts the largest of its scales of 16 at the largest there is."""
    scale = np.abs(rows).max(axis=1, keepdims=True) / (np.float32(6) * FP8_LARGEST)
    blocks = encode_nvfp4((rows * reciprocal(scale)).reshape(-1, NVFP4_K))
    return np.concatenate(
        [scale.astype("<f4").view(np.uint8), blocks.reshape(len(rows), -1)], axis=1
    )


def nearest_e4m3(values: Floats) -> Bytes:
    """Codes of the nearest values, ties to the even one; beyond the largest: the largest."""
    magnitudes = E4M3[:127]
    above = np.searchsorted(magnitudes, np.abs(values)).clip(1, 126)
    middle = (magnitudes[above - 1] + magnitudes[above]) / np.float32(2)
    lower = (np.abs(values) < middle) | ((np.abs(values) == middle) & (above % 2 == 1))
    codes: Bytes = (above - lower).astype(np.uint8)
    codes |= np.signbit(values).astype(np.uint8) << np.uint8(7)
    return codes
