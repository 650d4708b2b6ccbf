"""Blocks of quantised weights to float32, one function per number format.

Every function takes `[blocks, bytes_per_block]` uint8 and returns `[blocks, block_size]` float32.
The order of the float operations is part of the format: each result equals the reference to the
bit.

Layouts: https://github.com/ggml-org/llama.cpp/blob/aca2e6ce7909064dbfbf3bd168e9ad3db1826e6c/ggml/src/ggml-common.h
Order of operations: `dequantize_row_*` in
https://github.com/ggml-org/llama.cpp/blob/aca2e6ce7909064dbfbf3bd168e9ad3db1826e6c/ggml/src/ggml-quants.c
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

K_BLOCK = 256
"""Weights in one block of the K-quants."""

# Non-uniform 4-bit codes of IQ4_NL and IQ4_XS (`kvalues_iq4nl` in ggml-common.h).
IQ4_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32
)

# FP4 (E2M1) values, doubled so that they are integers; the shared exponent is halved to match.
# OCP Microscaling Formats (MX) v1.0, section 5.3.3; `kvalues_mxfp4` in ggml-common.h.
MXFP4_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.float32)


def half_column(blocks: Bytes, start: int) -> Floats:
    """The fp16 number at byte `start` of every block, as `[blocks, 1]` float32."""
    halves = np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2")
    return halves.astype(np.float32)


def bit_fields(data: Bytes, bits: int) -> Bytes:
    """Bytes to fields of `bits` bits: `[..., n]` to `[..., 8 // bits, n]`, low field first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(-1, 1)
    fields: Bytes = (data[..., None, :] >> shifts) & np.uint8((1 << bits) - 1)
    return fields


def nibbles(data: Bytes) -> Bytes:
    """`[blocks, n]` bytes to `[blocks, 2n]` codes: all low nibbles, then all high ones."""
    return bit_fields(data, 4).reshape(len(data), -1)


def fifth_bits(blocks: Bytes, start: int) -> Bytes:
    """The 32 bits at byte `start`, least significant first, as `[blocks, 32]` of 0 or 16."""
    bits = np.unpackbits(blocks[:, start : start + 4], axis=1, bitorder="little")
    return bits << np.uint8(4)


def decode_f32(blocks: Bytes) -> Floats:
    return np.ascontiguousarray(blocks).view("<f4").astype(np.float32)


def decode_f16(blocks: Bytes) -> Floats:
    return np.ascontiguousarray(blocks).view("<f2").astype(np.float32)


def decode_bf16(blocks: Bytes) -> Floats:
    high = np.ascontiguousarray(blocks).view("<u2").astype(np.uint32)
    return (high << np.uint32(16)).view(np.float32)


def decode_q4_0(blocks: Bytes) -> Floats:
    codes = nibbles(blocks[:, 2:]).astype(np.float32) - np.float32(8)
    return half_column(blocks, 0) * codes


def decode_q4_1(blocks: Bytes) -> Floats:
    codes = nibbles(blocks[:, 4:]).astype(np.float32)
    return half_column(blocks, 0) * codes + half_column(blocks, 2)


def decode_q5_0(blocks: Bytes) -> Floats:
    codes = (nibbles(blocks[:, 6:]) | fifth_bits(blocks, 2)).astype(np.float32) - np.float32(16)
    return half_column(blocks, 0) * codes


def decode_q5_1(blocks: Bytes) -> Floats:
    codes = (nibbles(blocks[:, 8:]) | fifth_bits(blocks, 4)).astype(np.float32)
    return half_column(blocks, 0) * codes + half_column(blocks, 2)


def decode_q8_0(blocks: Bytes) -> Floats:
    codes = np.ascontiguousarray(blocks[:, 2:]).view(np.int8).astype(np.float32)
    return half_column(blocks, 0) * codes


def decode_q2_k(blocks: Bytes) -> Floats:
    """16 sub-blocks of 16. Bytes: 16 (scale, min) nibble pairs, 64 of codes, d, dmin."""
    pairs = blocks[:, :16]
    scales = half_column(blocks, 80) * (pairs & np.uint8(15)).astype(np.float32)
    minimums = half_column(blocks, 82) * (pairs >> np.uint8(4)).astype(np.float32)
    codes = bit_fields(blocks[:, 16:80].reshape(-1, 2, 32), 2).reshape(-1, 16, 16)
    return (scales[..., None] * codes.astype(np.float32) - minimums[..., None]).reshape(-1, K_BLOCK)


def decode_q3_k(blocks: Bytes) -> Floats:
    """16 sub-blocks of 16. Bytes: 32 of high bits, 64 of low codes, 12 of scales, d."""
    low = nibbles(blocks[:, 96:104])
    high = bit_fields(blocks[:, 104:108], 2).reshape(-1, 16)
    scales = (low | high << np.uint8(4)).astype(np.float32) - np.float32(32)
    codes = bit_fields(blocks[:, 32:96].reshape(-1, 2, 32), 2).reshape(-1, 16, 16)
    # A set high bit means "subtract nothing", a clear one "subtract four".
    kept = bit_fields(blocks[:, :32], 1).reshape(-1, 16, 16)
    values = (codes | kept << np.uint8(2)).astype(np.float32) - np.float32(4)
    steps = half_column(blocks, 108) * scales
    result: Floats = (steps[..., None] * values).reshape(-1, K_BLOCK)
    return result


def six_bit_scales(packed: Bytes) -> tuple[Bytes, Bytes]:
    """The 12 bytes of Q4_K and Q5_K to 8 scales and 8 minimums of six bits, `[blocks, 8]` each.

    Bytes 0-3 hold scales 0-3 and bytes 4-7 minimums 0-3 in their low six bits; bytes 8-11 hold the
    low nibbles of scales 4-7 (low half) and of minimums 4-7 (high half), whose upper two bits are
    the upper two bits of bytes 0-3 and 4-7.
    """
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    top_two = np.uint8(0x30)
    late_scales = (third & np.uint8(15)) | (first >> np.uint8(2) & top_two)
    late_minimums = (third >> np.uint8(4)) | (second >> np.uint8(2) & top_two)
    six = np.uint8(63)
    return (
        np.concatenate([first & six, late_scales], axis=1),
        np.concatenate([second & six, late_minimums], axis=1),
    )


def scale_and_shift(blocks: Bytes, codes: Bytes) -> Floats:
    """Apply the d, dmin and scales that open a Q4_K or Q5_K block to codes `[blocks, 8, 32]`."""
    scale_codes, minimum_codes = six_bit_scales(blocks[:, 4:16])
    scales = half_column(blocks, 0) * scale_codes.astype(np.float32)
    minimums = half_column(blocks, 2) * minimum_codes.astype(np.float32)
    return (scales[..., None] * codes.astype(np.float32) - minimums[..., None]).reshape(-1, K_BLOCK)


def decode_q4_k(blocks: Bytes) -> Floats:
    """8 sub-blocks of 32. Bytes: d, dmin, 12 of scales, 128 of codes (32 hold two sub-blocks)."""
    codes = bit_fields(blocks[:, 16:].reshape(-1, 4, 32), 4).reshape(-1, 8, 32)
    return scale_and_shift(blocks, codes)


def decode_q5_k(blocks: Bytes) -> Floats:
    """As Q4_K, with 32 bytes of fifth bits before the codes: bit j of a byte is for sub-block j."""
    low = bit_fields(blocks[:, 48:].reshape(-1, 4, 32), 4).reshape(-1, 8, 32)
    high = bit_fields(blocks[:, 16:48], 1)
    return scale_and_shift(blocks, low | high << np.uint8(4))


def decode_q6_k(blocks: Bytes) -> Floats:
    """16 sub-blocks of 16. Bytes: 128 of low nibbles, 64 of high pairs, 16 signed scales, d."""
    low = bit_fields(blocks[:, :128].reshape(-1, 2, 64), 4).reshape(-1, 16, 16)
    high = bit_fields(blocks[:, 128:192].reshape(-1, 2, 32), 2).reshape(-1, 16, 16)
    values = (low | high << np.uint8(4)).astype(np.float32) - np.float32(32)
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    steps = half_column(blocks, 208) * scales
    return (steps[..., None] * values).reshape(-1, K_BLOCK)


def decode_iq4_nl(blocks: Bytes) -> Floats:
    return half_column(blocks, 0) * IQ4_VALUES[nibbles(blocks[:, 2:])]


def decode_iq4_xs(blocks: Bytes) -> Floats:
    """8 sub-blocks of 32. Bytes: d, 2 of high scale pairs, 4 of low scale nibbles, 128 of codes."""
    # Scale j is nibble j of its four bytes, in reading order, so low and high nibbles alternate.
    low = bit_fields(blocks[:, 4:8], 4).swapaxes(1, 2).reshape(-1, 8)
    high = bit_fields(blocks[:, 2:4], 2).swapaxes(1, 2).reshape(-1, 8)
    scales = (low | high << np.uint8(4)).astype(np.float32) - np.float32(32)
    steps = half_column(blocks, 0) * scales
    codes = bit_fields(blocks[:, 8:].reshape(-1, 8, 16), 4).reshape(-1, 8, 32)
    return (steps[..., None] * IQ4_VALUES[codes]).reshape(-1, K_BLOCK)


def decode_mxfp4(blocks: Bytes) -> Floats:
    exponents = blocks[:, :1].astype(np.uint32)
    # 2^(e - 128); the two smallest are denormal and have no exponent field to shift into.
    normal = (np.maximum(exponents, 1) - np.uint32(1)) << np.uint32(23)
    denormal = np.uint32(0x0020_0000) << np.minimum(exponents, 1)
    scales = np.where(exponents < 2, denormal, normal).view(np.float32)
    return scales * MXFP4_VALUES[nibbles(blocks[:, 1:])]


# Powers of three, by the place of a digit; a byte of TQ1_0 has five, the last ones four.
TQ1_RUNS = ((0, 32, 5), (32, 48, 5), (48, 52, 4))


def decode_tq1_0(blocks: Bytes) -> Floats:
    """Three-valued digits. Bytes: 32 and 16 of five digits each, 4 of four, d.

    A byte is a fraction of 1 in 256ths: times a power of three, modulo 1, times three, its whole
    part is a digit. All first digits of a run of bytes come before all second ones.
    """
    runs = []
    for start, stop, count in TQ1_RUNS:
        powers = (3 ** np.arange(count)).astype(np.uint8).reshape(-1, 1)
        rest = (blocks[:, None, start:stop] * powers).astype(np.uint16)
        runs.append((rest * np.uint16(3) >> np.uint16(8)).reshape(len(blocks), -1))
    digits = np.concatenate(runs, axis=1).astype(np.float32)
    return half_column(blocks, 52) * (digits - np.float32(1))


def decode_tq2_0(blocks: Bytes) -> Floats:
    """Codes of two bits, less one. Bytes: 64 of codes as those of Q2_K, d."""
    codes = bit_fields(blocks[:, :64].reshape(-1, 2, 32), 2).reshape(-1, K_BLOCK)
    return half_column(blocks, 64) * (codes.astype(np.float32) - np.float32(1))


def unsigned_e4m3() -> Floats:
    """What each byte stands for as a scale of NVFP4: the sign does not count, 0x7F is 0 and 0xFF
    not a number less but 480 (`ggml_ue4m3_to_fp32`,
    https://github.com/ggml-org/llama.cpp/blob/aca2e6ce7909064dbfbf3bd168e9ad3db1826e6c/ggml/src/ggml-impl.h).
    """
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    subnormal, normal = mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0)
    values = np.where(exponent == 0, subnormal, normal)
    values[0x7F] = 0
    return values.astype(np.float32)


UNSIGNED_E4M3 = unsigned_e4m3()


def decode_nvfp4(blocks: Bytes) -> Floats:
    """4 sub-blocks of 16. Bytes: a scale each (half of it counts), 8 of codes each."""
    scales = UNSIGNED_E4M3[blocks[:, :4]] * np.float32(0.5)
    codes = bit_fields(blocks[:, 4:].reshape(-1, 4, 8), 4).reshape(-1, 4, 16)
    values: Floats = (scales[..., None] * MXFP4_VALUES[codes]).reshape(-1, 64)
    return values
