"""Number formats of tensors: type numbers, sizes, and conversion to and from float32."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from invar.weights import block_decode, block_encode, codebook_formats, row_formats

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

GROUP_BYTES = 1 << 22
"""Blocks are converted in groups of this many float32 bytes, so that intermediates stay small."""


class FormatError(ValueError):
    """Data, shape and number format do not fit together."""


class QuantType(IntEnum):
    """Number format of a tensor, with the number that GGUF files use for it, if they have it.

    `enum ggml_type` in
    https://github.com/ggml-org/llama.cpp/blob/aca2e6ce7909064dbfbf3bd168e9ad3db1826e6c/ggml/include/ggml.h
    """

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40

    # Layouts in `row_formats`
    INT4_ZP = 1000
    INT8_ZP = 1001
    INT8 = 1002
    FP8 = 1003
    NVFP4_ROWS = 1004

    @property
    def in_gguf(self) -> bool:
        return self < 1000

    @property
    def block_size(self) -> int:
        """Weights in one block; a row must hold a whole number of blocks. 1 where it is one."""
        return BLOCK_SIZES[self][0]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, without what a row has besides."""
        return BLOCK_SIZES[self][1]

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of `columns` weights; `FormatError` if that is not whole blocks."""
        block_size, block_bytes = BLOCK_SIZES[self]
        if columns % block_size:
            raise FormatError(
                f"a row of {columns} weights is not a whole number of {self.name} blocks "
                f"of {block_size}; store this tensor in another type"
            )
        if self in ROW_BYTES:
            return ROW_BYTES[self](columns)
        return columns // block_size * block_bytes

    def tensor_bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a whole tensor of this shape (numpy order: the last dimension is a row)."""
        columns = shape[-1] if shape else 1
        return math.prod(shape[:-1]) * self.row_bytes(columns)


# (weights in a block, bytes of a block). K-quants add up as in the comments of `block_decode`.
BLOCK_SIZES: dict[QuantType, tuple[int, int]] = {
    QuantType.F32: (1, 4),
    QuantType.F16: (1, 2),
    QuantType.Q4_0: (32, 18),
    QuantType.Q4_1: (32, 20),
    QuantType.Q5_0: (32, 22),
    QuantType.Q5_1: (32, 24),
    QuantType.Q8_0: (32, 34),
    QuantType.Q8_1: (32, 40),
    QuantType.Q2_K: (256, 84),
    QuantType.Q3_K: (256, 110),
    QuantType.Q4_K: (256, 144),
    QuantType.Q5_K: (256, 176),
    QuantType.Q6_K: (256, 210),
    QuantType.Q8_K: (256, 292),
    QuantType.IQ2_XXS: (256, 66),
    QuantType.IQ2_XS: (256, 74),
    QuantType.IQ3_XXS: (256, 98),
    QuantType.IQ1_S: (256, 50),
    QuantType.IQ4_NL: (32, 18),
    QuantType.IQ3_S: (256, 110),
    QuantType.IQ2_S: (256, 82),
    QuantType.IQ4_XS: (256, 136),
    QuantType.I8: (1, 1),
    QuantType.I16: (1, 2),
    QuantType.I32: (1, 4),
    QuantType.I64: (1, 8),
    QuantType.F64: (1, 8),
    QuantType.IQ1_M: (256, 56),
    QuantType.BF16: (1, 2),
    QuantType.TQ1_0: (256, 54),
    QuantType.TQ2_0: (256, 66),
    QuantType.MXFP4: (32, 17),
    QuantType.NVFP4: (64, 36),
    QuantType.INT4_ZP: (32, 19),
    QuantType.INT8_ZP: (32, 36),
    QuantType.INT8: (1, 1),
    QuantType.FP8: (1, 1),
    QuantType.NVFP4_ROWS: (64, 36),
}

# Of formats whose one block is the row.
ROW_BYTES: dict[QuantType, Callable[[int], int]] = {
    QuantType.INT8: row_formats.int8_row_bytes,
    QuantType.FP8: row_formats.fp8_row_bytes,
    QuantType.NVFP4_ROWS: row_formats.nvfp4_row_bytes,
}

DECODERS: dict[QuantType, Callable[[Bytes], Floats]] = {
    QuantType.F32: block_decode.decode_f32,
    QuantType.F16: block_decode.decode_f16,
    QuantType.BF16: block_decode.decode_bf16,
    QuantType.Q4_0: block_decode.decode_q4_0,
    QuantType.Q4_1: block_decode.decode_q4_1,
    QuantType.Q5_0: block_decode.decode_q5_0,
    QuantType.Q5_1: block_decode.decode_q5_1,
    QuantType.Q8_0: block_decode.decode_q8_0,
    QuantType.Q2_K: block_decode.decode_q2_k,
    QuantType.Q3_K: block_decode.decode_q3_k,
    QuantType.Q4_K: block_decode.decode_q4_k,
    QuantType.Q5_K: block_decode.decode_q5_k,
    QuantType.Q6_K: block_decode.decode_q6_k,
    QuantType.IQ4_NL: block_decode.decode_iq4_nl,
    QuantType.IQ4_XS: block_decode.decode_iq4_xs,
    QuantType.MXFP4: block_decode.decode_mxfp4,
    QuantType.IQ1_S: codebook_formats.decode_iq1_s,
    QuantType.IQ1_M: codebook_formats.decode_iq1_m,
    QuantType.IQ2_XXS: codebook_formats.decode_iq2_xxs,
    QuantType.IQ2_XS: codebook_formats.decode_iq2_xs,
    QuantType.IQ2_S: codebook_formats.decode_iq2_s,
    QuantType.IQ3_XXS: codebook_formats.decode_iq3_xxs,
    QuantType.IQ3_S: codebook_formats.decode_iq3_s,
    QuantType.TQ1_0: block_decode.decode_tq1_0,
    QuantType.TQ2_0: block_decode.decode_tq2_0,
    QuantType.INT4_ZP: row_formats.decode_int4_zp,
    QuantType.INT8_ZP: row_formats.decode_int8_zp,
    QuantType.INT8: row_formats.decode_int8,
    QuantType.FP8: row_formats.decode_fp8,
    QuantType.NVFP4: block_decode.decode_nvfp4,
    QuantType.NVFP4_ROWS: row_formats.decode_nvfp4_rows,
}

ENCODERS: dict[QuantType, Callable[[Floats], Bytes]] = {
    QuantType.F32: block_encode.encode_f32,
    QuantType.F16: block_encode.encode_f16,
    QuantType.BF16: block_encode.encode_bf16,
    QuantType.Q4_0: block_encode.encode_q4_0,
    QuantType.Q4_1: block_encode.encode_q4_1,
    QuantType.Q5_0: block_encode.encode_q5_0,
    QuantType.Q5_1: block_encode.encode_q5_1,
    QuantType.Q8_0: block_encode.encode_q8_0,
    QuantType.Q2_K: block_encode.encode_q2_k,
    QuantType.Q3_K: block_encode.encode_q3_k,
    QuantType.Q4_K: block_encode.encode_q4_k,
    QuantType.Q5_K: block_encode.encode_q5_k,
    QuantType.Q6_K: block_encode.encode_q6_k,
    QuantType.IQ4_NL: block_encode.encode_iq4_nl,
    QuantType.IQ4_XS: block_encode.encode_iq4_xs,
    QuantType.MXFP4: block_encode.encode_mxfp4,
    QuantType.IQ1_S: codebook_formats.encode_iq1_s,
    QuantType.IQ1_M: codebook_formats.encode_iq1_m,
    QuantType.IQ2_XXS: codebook_formats.encode_iq2_xxs,
    QuantType.IQ2_XS: codebook_formats.encode_iq2_xs,
    QuantType.IQ2_S: codebook_formats.encode_iq2_s,
    QuantType.IQ3_XXS: codebook_formats.encode_iq3_xxs,
    QuantType.IQ3_S: codebook_formats.encode_iq3_s,
    QuantType.TQ1_0: block_encode.encode_tq1_0,
    QuantType.TQ2_0: block_encode.encode_tq2_0,
    QuantType.INT4_ZP: row_formats.encode_int4_zp,
    QuantType.INT8_ZP: row_formats.encode_int8_zp,
    QuantType.INT8: row_formats.encode_int8,
    QuantType.FP8: row_formats.encode_fp8,
    QuantType.NVFP4: block_encode.encode_nvfp4,
    QuantType.NVFP4_ROWS: row_formats.encode_nvfp4_rows,
}

# Formats whose every bit pattern is a number on its own: they can also hold NaN and infinity.
PLAIN_TYPES = (QuantType.F32, QuantType.F16, QuantType.BF16)


def type_names(types: Iterable[QuantType]) -> str:
    return ", ".join(quant_type.name for quant_type in types)


def block_shape(quant_type: QuantType, columns: int) -> tuple[int, int]:
    """Weights and bytes of what is converted as one: a block, or a row that is one."""
    if quant_type in ROW_BYTES:
        return columns, quant_type.row_bytes(columns)
    return BLOCK_SIZES[quant_type]


def dequantize(raw: Bytes, quant_type: QuantType, shape: tuple[int, ...]) -> Floats:
    """Weights as float32 of `shape`, to the bit what llama.cpp's reference makes of them.

    raw: uint8, any shape, the bytes of the whole tensor in order.
    Raises `FormatError` for a type without a decoder, or when bytes and shape disagree.
    """
    decoder = DECODERS.get(quant_type)
    if decoder is None:
        raise FormatError(
            f"type {quant_type.name} cannot be dequantised (known: {type_names(DECODERS)})"
        )
    expected = quant_type.tensor_bytes(shape)
    if raw.dtype != np.uint8 or raw.size != expected:
        raise FormatError(
            f"{quant_type.name} of shape {shape} takes {expected} uint8 bytes, "
            f"got {raw.size} of {raw.dtype}"
        )
    block_size, block_bytes = block_shape(quant_type, shape[-1] if shape else 1)
    blocks = raw.reshape(-1, block_bytes)
    result = np.empty((len(blocks), block_size), dtype=np.float32)
    step = max(1, GROUP_BYTES // (4 * block_size))
    # NaN scales are legal bytes, and dequantising them is not worth a warning per block.
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, len(blocks), step):
            result[start : start + step] = decoder(blocks[start : start + step])
    return result.reshape(shape)


def quantize(values: Floats, quant_type: QuantType) -> Bytes:
    """`[rows, columns]` float32 to `[rows, row_bytes]` uint8.

    Raises `FormatError` for a type without an encoder, for a row that is not whole blocks, and for
    values that a block format cannot hold (NaN, infinity).
    """
    encoder = ENCODERS.get(quant_type)
    if encoder is None:
        raise FormatError(
            f"there is no quantiser for {quant_type.name} (known: {type_names(ENCODERS)})"
        )
    if values.ndim != 2 or values.dtype != np.float32:
        raise FormatError(
            f"quantize takes float32 [rows, columns], got {values.dtype} of shape {values.shape}"
        )
    rows, columns = values.shape
    row_bytes = quant_type.row_bytes(columns)
    if quant_type not in PLAIN_TYPES and not np.isfinite(values).all():
        raise FormatError(f"{quant_type.name} cannot hold NaN or infinity; clean the weights first")
    block_size, block_bytes = block_shape(quant_type, columns)
    blocks = np.ascontiguousarray(values).reshape(-1, block_size)
    result = np.empty((len(blocks), block_bytes), dtype=np.uint8)
    step = max(1, GROUP_BYTES // (4 * block_size))
    with np.errstate(over="ignore"):
        for start in range(0, len(blocks), step):
            result[start : start + step] = encoder(blocks[start : start + step])
    return result.reshape(rows, row_bytes)
