"""Where the CPU backend rounds, imitated in numpy (numeric version 1 of native/kernels/kernels.h).

Only the roundings that the contract names are here: codes of activations, K and V as they are
stored, and bf16 of the scaled q and the probabilities where these meet bf16. What lies between them
is computed in double precision, so that the whole difference from a backend is the fp32 noise of
that backend (and a code that this noise flips).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, assert_never

import numpy as np
import numpy.typing as npt

from invar.graph.operations import KVFormat
from invar.weights.formats import QuantType

Array = npt.NDArray[np.floating[Any]]

TILE_TOKENS = 64  # kTileTokens: the running maximum advances once a tile, at absolute positions
SPLIT_TOKENS = 1024  # kSplitTokens: every split starts from identity; merged in ascending order
LOG2_E = np.float32(1.4426950408889634)


class ActivationFormat(StrEnum):
    """The form in which the input of a linear layer is read; the weight's format decides."""

    F32 = "f32"
    BF16 = "bf16"
    Q8_16 = "q8_16"  # s8 codes, a scale per 16 values
    Q8_32 = "q8_32"  # s8 codes, a scale per 32 values
    Q8_256 = "q8_256"  # s8 codes, a scale per 256 values
    Q8_ROW = "q8_row"  # s8 codes, a scale per token


ACTIVATION_FORMATS: dict[QuantType, ActivationFormat] = {
    QuantType.F32: ActivationFormat.F32,
    QuantType.F16: ActivationFormat.F32,
    QuantType.BF16: ActivationFormat.BF16,
    QuantType.Q4_0: ActivationFormat.Q8_32,
    QuantType.Q4_1: ActivationFormat.Q8_32,
    QuantType.Q5_0: ActivationFormat.Q8_32,
    QuantType.Q5_1: ActivationFormat.Q8_32,
    QuantType.Q8_0: ActivationFormat.Q8_32,
    QuantType.Q2_K: ActivationFormat.Q8_256,
    QuantType.Q3_K: ActivationFormat.Q8_256,
    QuantType.Q4_K: ActivationFormat.Q8_256,
    QuantType.Q5_K: ActivationFormat.Q8_256,
    QuantType.Q6_K: ActivationFormat.Q8_256,
    QuantType.IQ4_NL: ActivationFormat.Q8_32,
    QuantType.IQ4_XS: ActivationFormat.Q8_256,
    QuantType.MXFP4: ActivationFormat.Q8_32,
    QuantType.IQ1_S: ActivationFormat.Q8_256,
    QuantType.IQ1_M: ActivationFormat.Q8_256,
    QuantType.IQ2_XXS: ActivationFormat.Q8_256,
    QuantType.IQ2_XS: ActivationFormat.Q8_256,
    QuantType.IQ2_S: ActivationFormat.Q8_256,
    QuantType.IQ3_XXS: ActivationFormat.Q8_256,
    QuantType.IQ3_S: ActivationFormat.Q8_256,
    QuantType.TQ1_0: ActivationFormat.Q8_256,
    QuantType.TQ2_0: ActivationFormat.Q8_256,
    QuantType.INT4_ZP: ActivationFormat.Q8_32,
    QuantType.INT8_ZP: ActivationFormat.Q8_32,
    QuantType.INT8: ActivationFormat.Q8_ROW,
    QuantType.FP8: ActivationFormat.F32,
    QuantType.NVFP4_ROWS: ActivationFormat.Q8_16,
}


ACTIVATION_BLOCKS = {
    ActivationFormat.Q8_16: 16,
    ActivationFormat.Q8_32: 32,
    ActivationFormat.Q8_256: 256,
}


def round_to_bf16(x: Array) -> npt.NDArray[np.float32]:
    """To the nearest bf16, ties to even; the values as float32. Infinities stay, NaN is not met."""
    bits = x.astype(np.float32).view(np.uint32)
    half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return ((bits + half) & np.uint32(0xFFFF0000)).view(np.float32)


def round_to_codes(x: Array, block: int) -> npt.NDArray[np.float64]:
    """s8 codes per `block` columns, times their scale: what a code stands for, in double."""
    blocks = x.astype(np.float32).reshape(len(x), -1, block)
    largest = np.abs(blocks).max(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        inverse = np.where(largest > 0, np.float32(127) / largest, np.float32(0))
    codes = np.rint(blocks * inverse)
    scale = largest * np.float32(1 / 127)
    values: npt.NDArray[np.float64] = codes.astype(np.float64) * scale
    return values.reshape(x.shape)


def round_activation(x: Array, weight_type: QuantType) -> Array:
    """`x` `[tokens, columns]` as a linear layer with weights of this type reads it."""
    form = ACTIVATION_FORMATS.get(weight_type)
    if form is None:
        known = ", ".join(quant_type.name for quant_type in ACTIVATION_FORMATS)
        raise ValueError(
            f"the numeric contract has no activation form for {weight_type.name} weights "
            f"(known: {known}); interpret the graph in exact mode"
        )
    if form is ActivationFormat.F32:
        return x.astype(np.float32)
    if form is ActivationFormat.BF16:
        return round_to_bf16(x)
    return round_to_codes(x, ACTIVATION_BLOCKS.get(form) or x.shape[1])


def round_kv(x: Array, kv_format: KVFormat) -> Array:
    """K or V `[tokens, kv_heads, head_dim]` as it is read again: what a stored value stands for.

    | format | rounding                                                                    |
    |--------|-----------------------------------------------------------------------------|
    | bf16   | nearest, ties to even                                                       |
    | fp16   | nearest, ties to even; from 65,520 on an infinity, as the peers have it too |
    | int8   | s8 codes with a scale per token and head, made as those of activations are  |

    A code's scale multiplies the finished logit (K) or the probability (V), in fp32: noise, which
    is not imitated.
    """
    match kv_format:
        case KVFormat.BF16:
            return round_to_bf16(x)
        case KVFormat.FP16:
            with np.errstate(over="ignore"):
                return x.astype(np.float16).astype(np.float32)
        case KVFormat.INT8:
            return round_to_codes(x.reshape(-1, x.shape[-1]), x.shape[-1]).reshape(x.shape)
    assert_never(kv_format)


def round_operand(x: Array, kv_format: KVFormat) -> npt.NDArray[np.float32]:
    """q or probabilities where they meet stored K and V: bf16 by bf16, fp32 by the others."""
    return round_to_bf16(x) if kv_format is KVFormat.BF16 else x.astype(np.float32)


def scaled_query(q: Array, scale: float, soft_cap: float | None, kv_format: KVFormat) -> Array:
    """q in units of log2 as it meets K; with a soft cap, which comes first, in plain units."""
    factor = np.float32(scale) if soft_cap is not None else np.float32(scale) * LOG2_E
    return round_operand(q.astype(np.float32) * factor, kv_format)


def tiled_attention(
    scores: Array,
    visible: npt.NDArray[np.bool_],
    v: Array,
    kv_format: KVFormat = KVFormat.BF16,
    sink: float = -np.inf,
) -> npt.NDArray[np.float32]:
    """Softmax in tiles and splits; a sink joins last.

    scores: `[rows, keys]` in units of log2, visible: `[rows, keys]`, v: `[keys, head_dim]`, as it
    was stored; key 0 is position 0. Returns `[rows, head_dim]`.
    """
    rows, keys = scores.shape
    total = _identity(rows, v.shape[1])
    for split in range(0, keys, SPLIT_TOKENS):
        part = _identity(rows, v.shape[1])
        for tile in range(split, min(split + SPLIT_TOKENS, keys), TILE_TOKENS):
            stop = min(tile + TILE_TOKENS, split + SPLIT_TOKENS)
            seen = np.where(visible[:, tile:stop], scores[:, tile:stop], -np.inf)
            part = _add_tile(part, seen.astype(np.float32), v[tile:stop], kv_format)
        total = _merge(total, part)
    if sink > -np.inf:
        origin = np.full(rows, np.float32(sink) * LOG2_E, np.float32)
        total = _merge(total, (origin, np.ones(rows, np.float32), np.zeros_like(total[2])))
    return (total[2] / total[1][:, None]).astype(np.float32)


Partial = tuple[Array, Array, Array]  # maximum [rows], sum [rows], output [rows, head_dim]


def _identity(rows: int, head_dim: int) -> Partial:
    return (
        np.full(rows, -np.inf, np.float32),
        np.zeros(rows, np.float32),
        np.zeros((rows, head_dim), np.float32),
    )


def _add_tile(part: Partial, seen: Array, v: Array, kv_format: KVFormat) -> Partial:
    maximum, total, out = part
    larger = np.maximum(maximum, seen.max(axis=1))
    keep = _power_of_two(maximum, larger)
    weights = _power_of_two(seen, larger[:, None])
    total = (total * keep + weights.sum(axis=1, dtype=np.float64)).astype(np.float32)
    added = round_operand(weights, kv_format).astype(np.float64) @ v.astype(np.float64)
    return larger, total, (out * keep[:, None] + added).astype(np.float32)


def _merge(left: Partial, right: Partial) -> Partial:
    larger = np.maximum(left[0], right[0])
    a, b = _power_of_two(left[0], larger), _power_of_two(right[0], larger)
    out = left[2] * a[:, None] + right[2] * b[:, None]
    return larger, left[1] * a + right[1] * b, out


def _power_of_two(x: Array, origin: Array) -> npt.NDArray[np.float32]:
    """2^(x - origin) in fp32; minus infinity gives 0 from any origin, also its own."""
    difference = np.where(np.isneginf(x), -np.inf, x - np.where(np.isneginf(x), 0, origin))
    difference = difference.astype(np.float32).astype(np.float64)
    return np.where(difference < -126, 0.0, np.exp2(difference)).astype(np.float32)
