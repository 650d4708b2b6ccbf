"""What quantised checkpoints in Hugging Face layout store for a weight, brought to rows of ours.

| layout                   | codes                        | element order                        |
|--------------------------|------------------------------|--------------------------------------|
| GPTQ                     | int32 `[k / per, n]`         | along k, low bits first              |
| AWQ                      | int32 `[k, n / 8]`           | along n, nibbles 0 2 4 6 1 3 5 7     |
| compressed-tensors, int  | int32 `[n, k / per]`         | along k, low bits first              |
| MXFP4                    | uint8 `[…, n, k / 32, 16]`   | along k, low nibble first            |
| NVFP4                    | uint8 `[n, k / 2]`           | along k, low nibble first            |
| FP8, int8                | a byte each `[n, k]`         |                                      |

per: codes in 32 bits. Nothing here rounds a weight; a scale that is no fp16 number does
(`half_scales`). Sources:
https://github.com/AutoGPTQ/AutoGPTQ/blob/c80855e25b165006688a642beaf0ee4f8400f27f/auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py
https://github.com/casper-hansen/AutoAWQ/blob/7ee28736ab85f95724eeab2598bf49b13b86439f/awq/utils/packing_utils.py
https://github.com/vllm-project/compressed-tensors/blob/4432f13ef9bf6d600c792b597d7d4b4b1c63f479/src/compressed_tensors/compressors/quantized_compressors/pack_quantized.py
https://github.com/vllm-project/compressed-tensors/blob/d34b8fdcdb26b285a8a0520bdbaa765239e3bf9e/src/compressed_tensors/compressors/nvfp4/base.py
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from invar import _native
from invar.weights.formats import FormatError, QuantType
from invar.weights.row_formats import FP8_K, fp8_scales

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]

BLOCK = 32  # weights
AWQ_LOW, AWQ_HIGH = (0, 4, 1, 5), (2, 6, 3, 7)
"""Columns, of eight, in the low and the high nibbles of an int32's bytes."""


def unpacked(words: Words, bits: int) -> Bytes:
    """int32 `[…, m]` to codes `[…, m * 32 / bits]`, low bits first."""
    data = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return data
    codes = np.empty((*data.shape, 2), np.uint8)
    codes[..., 0] = data & np.uint8(15)
    codes[..., 1] = data >> np.uint8(4)
    return codes.reshape(*data.shape[:-1], -1)


def awq_unpacked(words: Words) -> Bytes:
    """int32 `[m, n / 8]` to codes `[m, n]`."""
    data = np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, 4)
    codes = np.empty((*words.shape, 8), np.uint8)
    codes[..., AWQ_LOW] = data & np.uint8(15)
    codes[..., AWQ_HIGH] = data >> np.uint8(4)
    return codes.reshape(len(words), -1)


def block_nibbles(pairs: Bytes, size: int = BLOCK) -> Bytes:
    """Bytes with neighbours of k, low nibble first, `[…, k / 2]`, to blocks as GGML has them,
    `[…, k / size, size / 2]`: code i of a block low, code i + size / 2 high."""
    blocks = pairs.reshape(*pairs.shape[:-1], -1, size // 2)
    first, second = blocks[..., : size // 4], blocks[..., size // 4 :]
    codes = np.empty_like(blocks)
    codes[..., ::2] = (first & np.uint8(15)) | (second << np.uint8(4))
    codes[..., 1::2] = (first >> np.uint8(4)) | (second & np.uint8(0xF0))
    return codes


def half_scales(scales: Floats) -> tuple[npt.NDArray[np.float16], bool]:
    """fp16 of scales, and whether that rounded any. Raises `FormatError` for what does not fit."""
    with np.errstate(over="ignore"):
        halves = scales.astype(np.float16)
    if not np.isfinite(halves).all():
        raise FormatError("a scale is NaN, infinite or beyond 65,504")
    return halves, bool((halves.astype(np.float32) != scales).any())


def group_kind(bits: int, zeros: npt.NDArray[np.int32] | None) -> QuantType:
    """The format of groups with these zero points; None: all are the middle of the codes."""
    if bits == 4:
        return QuantType.Q4_0 if zeros is None else QuantType.INT4_ZP
    return QuantType.Q8_0 if zeros is None else QuantType.INT8_ZP


def group_rows(
    words: Words,
    layout: str,
    bits: int,
    halves: npt.NDArray[np.float16],
    zeros: npt.NDArray[np.int32] | None,
    order: npt.NDArray[np.int32] | None = None,
) -> Bytes:
    """Rows of `group_kind(bits, zeros)`, `[n, row_bytes]`.

    words: as the layout "awq", "gptq" or "rows" (of compressed-tensors) has them. halves and
    zeros: `[n, groups]`, a group being a whole number of blocks. order: the place in k of each
    column of the rows, `[k]`; None: its own.
    """
    kind = group_kind(bits, zeros)
    n = len(halves)
    k = words.size * 32 // bits // n
    blocks = k // BLOCK
    per_group = blocks // halves.shape[1]
    rows = np.empty((n, blocks, kind.block_bytes), np.uint8)
    scales = np.repeat(halves, per_group, axis=1)
    rows[..., :2] = scales[..., None].view(np.uint8)
    header = 2
    if kind is QuantType.INT4_ZP and zeros is not None:
        rows[..., 2] = np.repeat(zeros, per_group, axis=1)
        header = 3
    elif kind is QuantType.INT8_ZP and zeros is not None:
        middles = np.repeat((zeros - 128).astype(np.float16), per_group, axis=1)
        rows[..., 2:4] = middles[..., None].view(np.uint8)
        header = 4
    flat = rows.reshape(n, -1)
    threads = _native.cpu_info()["usable_cores"]
    words = np.ascontiguousarray(words)
    _native.unpack_codes(words, layout, bits, k, order, flat, header, kind.block_bytes, threads)
    return flat


def fp8_rows(codes: Bytes, scales: Floats, block_rows: int, block_columns: int) -> Bytes:
    """Rows of FP8, `[n, row_bytes]`. codes: e4m3fn `[n, k]`; scales: one for every block of so
    many rows and columns, the columns being whole `FP8_K` or all of k."""
    if ((codes & np.uint8(127)) == 127).any():
        raise FormatError("NaN among the weights")
    n, k = codes.shape
    count = fp8_scales(k)
    wide = np.repeat(scales, block_rows, axis=0)[:n]
    wide = np.repeat(wide, -(-block_columns // FP8_K), axis=1)[:, :count]
    rows = np.empty((n, 4 * count + k), np.uint8)
    rows[:, : 4 * count] = np.ascontiguousarray(wide, "<f4").view(np.uint8)
    rows[:, 4 * count :] = codes
    return rows


def scaled_rows(codes: Bytes, scales: Floats) -> Bytes:
    """Rows of INT8 or NVFP4_ROWS. codes: `[n, bytes]`, of int8 the s8; scales: `[n]`."""
    opening = np.ascontiguousarray(scales, "<f4").reshape(-1, 1).view(np.uint8)
    return np.concatenate([opening, codes], axis=1)


def mxfp4_rows(blocks: Bytes, exponents: Bytes) -> Bytes:
    """Rows of MXFP4. blocks: `[…, k / 32, 16]`; exponents: `[…, k / 32]`."""
    pairs = blocks.reshape(*blocks.shape[:-2], -1)
    rows = np.concatenate([exponents[..., None], block_nibbles(pairs)], axis=-1)
    return rows.reshape(*rows.shape[:-2], -1)


def nvfp4_rows(pairs: Bytes, scales: Bytes, scale: np.float32) -> Bytes:
    """Rows of NVFP4_ROWS. pairs: `[n, k / 2]`; scales: e4m3fn as bytes, `[n, k / 16]`; scale: of
    all. k is a multiple of 64."""
    if ((scales & np.uint8(127)) == 127).any() or (scales > 128).any():
        raise FormatError("a scale is NaN or below zero")
    n = len(pairs)
    codes = block_nibbles(pairs, 16).reshape(n, -1, 32)
    blocks = np.concatenate([scales.reshape(n, -1, 4), codes], axis=-1)
    return scaled_rows(blocks.reshape(n, -1), np.broadcast_to(scale, (n,)))
