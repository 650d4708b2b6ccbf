"""Number formats: hand-made bytes, then equality with the `gguf` package to the bit."""

from __future__ import annotations

import struct

import gguf
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from invar.weights.codebook_formats import codebook
from invar.weights.formats import (
    DECODERS,
    ENCODERS,
    FormatError,
    QuantType,
    dequantize,
    quantize,
)

Q = QuantType
GGUF_TYPES = [quant_type for quant_type in QuantType if quant_type.in_gguf]
SAME_AS_REFERENCE = [
    *(Q.F32, Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.MXFP4),
    *(Q.TQ1_0, Q.TQ2_0),
]
CODEBOOKS = [Q.IQ1_S, Q.IQ1_M, Q.IQ2_XXS, Q.IQ2_XS, Q.IQ2_S, Q.IQ3_XXS, Q.IQ3_S]
# Relative error of normal weights, by norms: a step is the range of a sub-block over its codes,
# rounding errs by step / sqrt(12). 32 normals span about 4.1 sigma, 16 span 3.5; the largest of 16
# is about 1.8 sigma. That gives 34 % for 3 steps of 16 weights, 13 % for 4 (one side), 7.9 % for
# 15, 3.8 % for 31, 1.6 % for 32 (one side). A quarter more for scales that are quantised as well.
# The unequal steps of IQ4 average 16, at a largest of 32 that is about 2.1 sigma for 127: 7.6 %.
STEP_ERRORS = {
    Q.Q2_K: 0.43,
    Q.Q3_K: 0.17,
    Q.Q4_K: 0.10,
    Q.Q5_K: 0.048,
    Q.Q6_K: 0.02,
    Q.IQ4_NL: 0.095,
    Q.IQ4_XS: 0.095,
    # As Q4_1; 256 codes: 0.5 %. One scale for a row, whose largest of 512 is 3.1 sigma: 0.7 %;
    # three bits behind the leading one: 2^-4 / sqrt(3) of a value at most, 2.6 % on average.
    Q.INT4_ZP: 0.1,
    Q.INT8_ZP: 0.006,
    Q.INT8: 0.01,
    Q.FP8: 0.03,
    # Steps of 0.5, 1 and 2 below 6, the largest of 16 being about 1.8 sigma: 9.6 %.
    Q.NVFP4: 0.12,
    Q.NVFP4_ROWS: 0.12,
    # No code of b bits a weight brings the error of normals below 2^-b (Shannon); the nearest row
    # of a codebook under a plain scale is about half as far off again.
    **{kind: 1.7 * 2 ** (-8 * kind.block_bytes / kind.block_size) for kind in CODEBOOKS},
}


def half(value: float) -> bytes:
    return struct.pack("<e", value)


def decoded(quant_type: QuantType, block: bytes) -> list[float]:
    raw = np.frombuffer(block, np.uint8)
    assert len(raw) == quant_type.block_bytes
    return dequantize(raw, quant_type, (quant_type.block_size,)).tolist()


def test_numbers_and_sizes_are_those_of_the_gguf_package() -> None:
    for quant_type in GGUF_TYPES:
        theirs = GGMLQuantizationType(quant_type.value)
        assert theirs.name == quant_type.name
        assert GGML_QUANT_SIZES[theirs] == (quant_type.block_size, quant_type.block_bytes)


# Tier 1: bytes by hand. Every format once with values that can be followed on paper.


def test_bytes_plain_formats() -> None:
    assert decoded(Q.F32, struct.pack("<f", -1.5)) == [-1.5]
    assert decoded(Q.F16, half(0.25)) == [0.25]
    assert decoded(Q.BF16, bytes([0x80, 0x3F])) == [1.0]


def test_bytes_q4_0() -> None:
    # Byte j holds weight j in its low and weight j + 16 in its high nibble; zero is code 8.
    values = decoded(Q.Q4_0, half(2) + bytes([0xF0] + [0x88] * 15))
    assert values == [-16.0] + [0.0] * 15 + [14.0] + [0.0] * 15


def test_bytes_q4_1() -> None:
    values = decoded(Q.Q4_1, half(2) + half(-1) + bytes([0x21] + [0] * 15))
    assert values == [1.0] + [-1.0] * 15 + [3.0] + [-1.0] * 15


def test_bytes_q5_0() -> None:
    # Fifth bits of weights 0 and 16 set; code 16 is zero.
    fifths = (1 << 0 | 1 << 16).to_bytes(4, "little")
    values = decoded(Q.Q5_0, half(1) + fifths + bytes([0x31] + [0] * 15))
    assert values == [1.0] + [-16.0] * 15 + [3.0] + [-16.0] * 15


def test_bytes_q5_1() -> None:
    fifths = (1 << 31).to_bytes(4, "little")
    values = decoded(Q.Q5_1, half(1) + half(10) + fifths + bytes(15) + bytes([0x50]))
    assert values == [10.0] * 31 + [31.0]


def test_bytes_q8_0() -> None:
    assert decoded(Q.Q8_0, half(0.5) + bytes([0x80, 1] + [0] * 30)) == [-64.0, 0.5] + [0.0] * 30


def test_bytes_q2_k() -> None:
    # Sub-block 0: scale 3, minimum 1. Byte 0 of the codes holds weights 0, 32, 64 and 96.
    block = bytes([0x13] + [0] * 15) + bytes([0b10] + [0] * 63) + half(2) + half(1)
    assert decoded(Q.Q2_K, block) == [11.0] + [-1.0] * 15 + [0.0] * 240


def test_bytes_q3_k() -> None:
    # Scale 0 is 33 (low nibble 1, high pair 2), less 32; all high bits set but that of weight 1.
    high = bytes([0xFF, 0xFE] + [0xFF] * 30)
    scales = bytes([0x01] + [0] * 7) + bytes([0b10] + [0] * 3)
    values = decoded(Q.Q3_K, high + bytes([3] + [0] * 63) + scales + half(1))
    assert values[:16] == [3.0, -4.0] + [0.0] * 14


def test_bytes_q4_k() -> None:
    # Scale 4 is 0x21: low nibble in byte 8, top two bits in those of byte 0. Minimum 4 likewise.
    scales = bytes([0x80, 0, 0, 0, 0x40, 0, 0, 0, 0x21, 0, 0, 0])
    codes = bytes([0] * 64 + [0x05] + [0] * 63)
    values = decoded(Q.Q4_K, half(1) + half(1) + scales + codes)
    assert values == [0.0] * 128 + [5 * 33.0 - 18] + [-18.0] * 31 + [0.0] * 96


def test_bytes_q5_k() -> None:
    # Bit 1 of byte 0 of the fifth bits belongs to weight 0 of sub-block 1.
    scales = bytes([0, 2, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0])
    values = decoded(Q.Q5_K, half(1) + half(1) + scales + bytes([2] + [0] * 31) + bytes(128))
    assert values == [0.0] * 32 + [29.0] + [-3.0] * 31 + [0.0] * 192


def test_bytes_q6_k() -> None:
    # Weight 0: low nibble 1, high pair 2: 33, less 32. The scale of its sub-block is -2.
    block = bytes([1] + [0] * 127) + bytes([2] + [0] * 63) + bytes([0xFE] + [0] * 15) + half(4)
    assert decoded(Q.Q6_K, block)[:16] == [-8.0] + [256.0] * 15


def test_bytes_iq4_nl() -> None:
    values = decoded(Q.IQ4_NL, half(1) + bytes([0xF0] + [0x88] * 15))
    assert values == [-127.0] + [1.0] * 15 + [113.0] + [1.0] * 15


def test_bytes_iq4_xs() -> None:
    # Scale 1: low nibble in the high half of byte 4, high pair in bits 2-3: 35, less 32.
    block = (
        half(1)
        + bytes([0b1000, 0])
        + bytes([0x30, 0, 0, 0])
        + bytes(16)
        + bytes([0x8F] + [0x88] * 15)
    )
    values = decoded(Q.IQ4_XS, block + bytes(96))
    assert values[32:64] == [3 * 113.0] + [3.0] * 31


def test_bytes_mxfp4() -> None:
    values = decoded(Q.MXFP4, bytes([127, 0x72] + [0xF9] * 15))
    assert values == [1.0] + [-0.5] * 15 + [6.0] + [-6.0] * 15
    assert decoded(Q.MXFP4, bytes([0, 0x02] + [0] * 15))[0] == 2.0**-127
    assert decoded(Q.MXFP4, bytes([1, 0x02] + [0] * 15))[0] == 2.0**-126


def test_bytes_int4_zp() -> None:
    values = decoded(Q.INT4_ZP, half(2) + bytes([8, 0xF0] + [0x88] * 15))
    assert values == [-16.0] + [0.0] * 15 + [14.0] + [0.0] * 15
    # The zero point of GPTQ's first layout goes up to 16.
    assert decoded(Q.INT4_ZP, half(1) + bytes([16] + [0] * 16)) == [-16.0] * 32


def test_bytes_int8_zp() -> None:
    values = decoded(Q.INT8_ZP, half(0.5) + half(-128) + bytes([0x80, 0x7F] + [0] * 30))
    assert values == [0.0, 127.5] + [64.0] * 30


def test_bytes_int8() -> None:
    row = np.frombuffer(struct.pack("<f", 0.25) + bytes([1, 0xFF, 0x80]), np.uint8)
    assert dequantize(row, Q.INT8, (1, 3)).tolist() == [[0.25, -0.25, -32.0]]


def test_bytes_fp8() -> None:
    # A scale for 128 weights, another one for the two behind them.
    codes = [0x38, 0xB8, 0x7E, 0x01, 0x08, 0x80] + [0] * 122 + [0x40, 0x39]
    row = np.frombuffer(struct.pack("<ff", 2, 0.5) + bytes(codes), np.uint8)
    values = dequantize(row, Q.FP8, (1, 130))[0].tolist()
    assert values[:6] == [2.0, -2.0, 896.0, 2.0**-8, 2.0**-5, 0.0]
    assert values[128:] == [1.0, 0.5625]


def test_bytes_iq2_xxs() -> None:
    # Index 1 is 43 and seven times 8. Seven signs are stored, the eighth makes their number even;
    # the scale 1 on top counts as 3 eighths.
    word = (1 << 0 | 1 << 28).to_bytes(4, "little")
    values = decoded(Q.IQ2_XXS, half(8) + bytes([1, 0, 0, 0]) + word + bytes(56))
    assert values[:8] == [-129.0] + [24.0] * 6 + [-24.0]
    assert values[8:] == [24.0] * 24 + [8.0] * 224


def test_bytes_iq2_xs() -> None:
    # Sign 1 of the first row, scales 3 and 5 of the first two 16s.
    first = (2 << 9).to_bytes(2, "little")
    values = decoded(Q.IQ2_XS, half(8) + first + bytes(62) + bytes([0x21] + [0] * 7))
    assert values[:8] == [24.0, -24.0] + [24.0] * 5 + [-24.0]
    assert values[8:] == [24.0] * 8 + [40.0] * 16 + [8.0] * 224


def test_bytes_iq2_s() -> None:
    # Bits 2 and 3 of the high byte belong to the second row: index 257.
    block = half(8) + bytes([0, 1] + [0] * 30) + bytes([0x81] + [0] * 31)
    values = decoded(Q.IQ2_S, block + bytes([0b0100] + [0] * 7) + bytes([0x10] + [0] * 7))
    assert values[:8] == [-8.0] + [8.0] * 6 + [-8.0]
    assert values[8:16] == codebook("iq2_s")[257].tolist()
    assert values[16:] == [24.0] * 16 + [8.0] * 224


def test_bytes_iq3_xxs() -> None:
    word = (1 << 7 | 2 << 28).to_bytes(4, "little")
    values = decoded(Q.IQ3_XXS, half(4) + bytes(64) + word + bytes(28))
    assert values[:32] == [20.0] * 8 + [-20.0] + [20.0] * 6 + [-20.0] + [20.0] * 16
    assert values[32:] == [4.0] * 224


def test_bytes_iq3_s() -> None:
    # The second row of four is number 256; scales are nibbles, 32 weights each.
    block = half(1) + bytes(64) + bytes([0b10] + [0] * 7) + bytes([2] + [0] * 31)
    values = decoded(Q.IQ3_S, block + bytes([0x10, 0, 0, 0]))
    assert values[:8] == [1.0, -1.0, 1.0, 1.0, *codebook("iq3_s")[256].tolist()]
    assert values[32:] == [3.0] * 32 + [1.0] * 192


def test_bytes_iq1_s() -> None:
    # Row 0 is eight times -1, an eighth is added or, by the top bit, subtracted.
    words = (1 << 12).to_bytes(2, "little") + (1 << 15 | 1).to_bytes(2, "little") + bytes(12)
    values = decoded(Q.IQ1_S, half(8) + bytes(32) + words)
    assert values[:32] == [-21.0] * 32
    assert values[32:40] == (8 * codebook("iq1")[256] - 1).tolist()
    assert values[40:] == [-9.0] * 24 + [-7.0] * 192


def test_bytes_iq1_m() -> None:
    # d is 8, 0x4800, in the high nibbles of the scales; the second row subtracts.
    scales = bytes([0b001_000, 0, 0, 0, 0, 0x80, 0, 0x40])
    values = decoded(Q.IQ1_M, bytes(32) + bytes([0x80] + [0] * 15) + scales)
    assert values == [-7.0] * 8 + [-9.0] * 8 + [-21.0] * 16 + [-7.0] * 224


def test_bytes_tq1_0() -> None:
    # A byte of 128 is five digits 1, which stand for 0; one of 255 five digits 2.
    values = decoded(Q.TQ1_0, bytes([255] + [128] * 51) + half(2))
    assert [i for i, value in enumerate(values) if value == 2] == [0, 32, 64, 96, 128]
    assert sorted(set(values)) == [0.0, 2.0]
    assert decoded(Q.TQ1_0, bytes([128] * 51 + [0]) + half(2))[243::4] == [-2.0] * 4


def test_bytes_tq2_0() -> None:
    values = decoded(Q.TQ2_0, bytes([0b11_10_01_00] + [0x55] * 63) + half(2))
    assert values[::32] == [-2.0, 0.0, 2.0, 4.0, 0.0, 0.0, 0.0, 0.0]
    assert values.count(0.0) == 253


def test_bytes_nvfp4() -> None:
    # Scales 1, 2^-9, 0 (written as what would be NaN) and 2 without regard to their signs.
    block = bytes([0x38, 0x81, 0x7F, 0xC0]) + bytes([0x72] + [0xF9] * 7) + bytes([0x22] * 24)
    values = decoded(Q.NVFP4, block)
    assert values[:16] == [1.0] + [-0.5] * 7 + [6.0] + [-6.0] * 7
    assert values[16:] == [2.0**-9] * 16 + [0.0] * 16 + [2.0] * 16


def test_bytes_nvfp4_rows() -> None:
    row = struct.pack("<f", 0.25) + bytes([0x38] * 4) + bytes([0x72] * 32)
    assert (
        dequantize(np.frombuffer(row, np.uint8), Q.NVFP4_ROWS, (1, 64))[0, ::8].tolist()
        == [
            0.25,
            1.5,
        ]
        * 4
    )


# Tier 2: the `gguf` package judges.


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize(
    "quant_type", sorted(set(DECODERS) & set(GGUF_TYPES)), ids=lambda quant_type: quant_type.name
)
def test_dequantize_equals_the_gguf_package(quant_type: QuantType) -> None:
    shape = (37, 512)
    rng = np.random.default_rng(quant_type)
    # Random bytes reach every code, NaN and infinite scales included.
    raw = rng.integers(0, 256, (shape[0], quant_type.row_bytes(shape[1])), dtype=np.uint8)
    theirs = gguf.quants.dequantize(raw, GGMLQuantizationType(quant_type.value))
    ours = dequantize(raw, quant_type, shape)
    assert ours.dtype == np.float32
    assert ours.shape == shape
    np.testing.assert_array_equal(ours.view(np.uint32), theirs.reshape(shape).view(np.uint32))


def test_dequantize_in_groups_equals_dequantize_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = np.random.default_rng(1).integers(0, 256, 18 * 70, dtype=np.uint8)
    whole = dequantize(raw, Q.Q4_0, (70, 32))
    monkeypatch.setattr("invar.weights.formats.GROUP_BYTES", 4 * 32 * 16)
    np.testing.assert_array_equal(dequantize(raw, Q.Q4_0, (70, 32)), whole)


def awkward_weights() -> np.ndarray:
    values = np.random.default_rng(2).standard_normal((24, 512)).astype(np.float32)
    values[0] = 0
    values[1] = 1.5
    values[2] = -2
    values[3] = np.abs(values[3])
    values[4] = -np.abs(values[4])
    values[5] *= 1e-6
    values[6, ::2] = 0
    values[7] = np.round(values[7] * 4) / 8  # ties of the rounding
    return values


@pytest.mark.parametrize("quant_type", SAME_AS_REFERENCE, ids=lambda quant_type: quant_type.name)
def test_quantize_equals_the_gguf_package(quant_type: QuantType) -> None:
    values = awkward_weights()
    theirs = gguf.quants.quantize(values, GGMLQuantizationType(quant_type.value))
    ours = quantize(values, quant_type)
    np.testing.assert_array_equal(ours, theirs.view(np.uint8).reshape(ours.shape))


def test_bf16_keeps_nan_and_infinity() -> None:
    special = np.array([[0x7F800001, 0x7FFFFFFF, 0xFF800000, 0x7F7FFFFF]], np.uint32)
    back = dequantize(quantize(special.view(np.float32), Q.BF16), Q.BF16, (4,))
    assert np.isnan(back[:2]).all()
    assert back[2:].tolist() == [-np.inf, np.inf]


@pytest.mark.parametrize(("quant_type", "bound"), STEP_ERRORS.items())
def test_k_quantisers_err_by_their_step(quant_type: QuantType, bound: float) -> None:
    values = np.random.default_rng(3).standard_normal((16, 512)).astype(np.float32)
    back = dequantize(quantize(values, quant_type), quant_type, values.shape)

    def error(candidate: np.ndarray) -> float:
        return float(np.linalg.norm(candidate - values) / np.linalg.norm(values))

    assert error(back) <= bound
    for wrong in (np.zeros_like(back), np.roll(back, 1, axis=1), 2 * back):
        assert error(wrong) > bound


@pytest.mark.parametrize("quant_type", STEP_ERRORS, ids=lambda quant_type: quant_type.name)
def test_k_quantisers_take_awkward_rows(quant_type: QuantType) -> None:
    values = awkward_weights()
    back = dequantize(quantize(values, quant_type), quant_type, values.shape)
    assert not back[0].any()
    if quant_type not in CODEBOOKS:  # these do not have every row of equals
        # A scale of NVFP4 has three bits behind the leading one.
        rounding = 2**-4 if quant_type in (Q.NVFP4, Q.NVFP4_ROWS) else 0.02
        np.testing.assert_allclose(back[1:3], values[1:3], rtol=rounding)
    assert np.isfinite(back).all()


# Errors.


def test_errors_say_what_fits() -> None:
    with pytest.raises(FormatError, match=r"33 weights .* Q4_0 blocks of 32"):
        Q.Q4_0.row_bytes(33)
    with pytest.raises(FormatError, match=r"Q8_K cannot be dequantised \(known: F32, F16"):
        dequantize(np.zeros(292, np.uint8), Q.Q8_K, (256,))
    with pytest.raises(FormatError, match=r"Q4_0 of shape \(2, 32\) takes 36 uint8 bytes, got 18"):
        dequantize(np.zeros(18, np.uint8), Q.Q4_0, (2, 32))
    with pytest.raises(FormatError, match="no quantiser for Q8_K"):
        quantize(np.zeros((1, 256), np.float32), Q.Q8_K)
    with pytest.raises(FormatError, match="cannot hold NaN"):
        quantize(np.full((1, 32), np.nan, np.float32), Q.Q8_0)
    assert {*SAME_AS_REFERENCE, *STEP_ERRORS} == set(ENCODERS) == set(DECODERS)
