"""Weights in the layouts of quantised checkpoints, written down from the formats' descriptions.

Each function takes a stem ("model.layers.0.mlp.up_proj") and values `[n, k]`, and returns the
tensors of a checkpoint with the values that they stand for. Nothing is calibrated: scales are those
of the plain minimum and maximum. Codes are put into words bit by bit, in no clever way.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from golden.safetensors_writer import Tensor

Floats = npt.NDArray[np.float32]
Codes = npt.NDArray[np.int64]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column, of eight, in each nibble of a word


@dataclass
class Written:
    tensors: dict[str, Tensor]
    values: Floats  # float32 `[n, k]`, exactly


def words(codes: Codes, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Codes `[rows, m]` to int32 `[rows, m * bits / 32]`, along the row."""
    per = 32 // bits
    grouped = codes.reshape(len(codes), -1, per)
    packed = np.zeros(grouped.shape[:2], np.uint64)
    for place, column in enumerate(order or range(per)):
        packed |= grouped[:, :, column].astype(np.uint64) << np.uint64(bits * place)
    return "I32", packed.shape, packed.astype("<u4").tobytes()


def words_down(codes: Codes, bits: int) -> Tensor:
    """Codes `[m, columns]` to int32 `[m * bits / 32, columns]`, along the column."""
    dtype, (columns, rows), data = words(np.ascontiguousarray(codes.T), bits)
    down = np.frombuffer(data, "<u4").reshape(columns, rows).T
    return dtype, (rows, columns), np.ascontiguousarray(down).tobytes()


def half(values: npt.NDArray[Any]) -> Tensor:
    return "F16", values.shape, values.astype("<f2").tobytes()


def single(values: npt.NDArray[Any]) -> Tensor:
    return "F32", values.shape, values.astype("<f4").tobytes()


def groups_of(
    values: Floats, group: int, bits: int, symmetric: bool
) -> tuple[Codes, Floats, Codes, Floats]:
    """Codes `[n, k]`, scales and zero points `[n, groups]`, and the values they stand for."""
    n, k = values.shape
    parts = values.reshape(n, -1, group if group > 0 else k)
    highest = (1 << bits) - 1
    low, high = np.minimum(parts.min(-1), 0), np.maximum(parts.max(-1), 0)
    scale = np.abs(parts).max(-1) / (highest / 2) if symmetric else (high - low) / highest
    scale = np.maximum(scale, 1e-4).astype(np.float16).astype(np.float32)
    zero = np.full(scale.shape, 1 << (bits - 1)) if symmetric else np.rint(-low / scale)
    zero = np.clip(zero, 1, highest).astype(np.int64)  # GPTQ's first layout has no zero
    codes = np.clip(np.rint(parts / scale[..., None]) + zero[..., None], 0, highest)
    meant = (codes - zero[..., None]) * scale[..., None].astype(np.float64)
    return (
        codes.astype(np.int64).reshape(n, k),
        scale,
        zero,
        meant.astype(np.float32).reshape(n, k),
    )


def awq(stem: str, values: Floats, group: int) -> Written:
    codes, scale, zero, meant = groups_of(values, group, 4, False)
    tensors = {
        f"{stem}.qweight": words(np.ascontiguousarray(codes.T), 4, AWQ_ORDER),
        f"{stem}.qzeros": words(np.ascontiguousarray(zero.T), 4, AWQ_ORDER),
        f"{stem}.scales": half(np.ascontiguousarray(scale.T)),
    }
    return Written(tensors, meant)


Order = Callable[[str, int], npt.NDArray[np.int64]]  # columns of a stem, as they are put in groups


def order_of_input(_: str, k: int) -> npt.NDArray[np.int64]:
    """As act-order makes it: all weights that read one input have it in common."""
    return np.random.default_rng(k).permutation(k)


def order_of_its_own(stem: str, k: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng(zlib.crc32(stem.encode())).permutation(k)


def ordered_groups(
    stem: str, values: Floats, group: int, bits: int, symmetric: bool, order: Order | None
) -> tuple[Codes, Floats, Codes, Floats, Tensor]:
    """`groups_of` with columns put into groups in an order, and the group of each column."""
    k = values.shape[1]
    places = np.arange(k) if order is None else order(stem, k)
    codes, scale, zero, meant = groups_of(values[:, places], group, bits, symmetric)
    back = np.argsort(places)
    index = (np.arange(k) // (group if group > 0 else k))[back]
    stored = ("I32", index.shape, index.astype("<i4").tobytes())
    return codes[:, back], scale, zero, meant[:, back], stored


def gptq(
    stem: str,
    values: Floats,
    group: int,
    bits: int,
    symmetric: bool,
    order: Order | None = None,
    less: int = 1,
) -> Written:
    """less: what zero points are stored less by; the second layout: nothing."""
    codes, scale, zero, meant, index = ordered_groups(stem, values, group, bits, symmetric, order)
    tensors = {
        f"{stem}.qweight": words_down(np.ascontiguousarray(codes.T), bits),
        f"{stem}.qzeros": words(np.ascontiguousarray(zero.T) - less, bits),
        f"{stem}.scales": half(np.ascontiguousarray(scale.T)),
        f"{stem}.g_idx": index,
    }
    return Written(tensors, meant)


def packed(
    stem: str, values: Floats, group: int, bits: int, symmetric: bool, order: Order | None = None
) -> Written:
    codes, scale, zero, meant, index = ordered_groups(stem, values, group, bits, symmetric, order)
    tensors = {
        f"{stem}.weight_packed": words(codes, bits),
        f"{stem}.weight_scale": half(scale),
        f"{stem}.weight_shape": ("I64", (2,), np.array(values.shape, "<i8").tobytes()),
    }
    if not symmetric:
        tensors[f"{stem}.weight_zero_point"] = words_down(zero, bits)
    if order is not None:
        tensors[f"{stem}.weight_g_idx"] = index
    return Written(tensors, meant)


def int8(stem: str, values: Floats) -> Written:
    scale = (np.abs(values).max(1, keepdims=True) / 127).astype(np.float32)
    codes = np.rint(values / scale).astype(np.int8)
    tensors: dict[str, Tensor] = {
        f"{stem}.weight": ("I8", codes.shape, codes.tobytes()),
        f"{stem}.weight_scale": single(scale),
    }
    return Written(tensors, codes.astype(np.float32) * scale)


def e4m3_of(code: int) -> float:
    exponent, mantissa = code >> 3 & 15, code & 7
    magnitude = mantissa / 512 if exponent == 0 else (8 + mantissa) / 8 * 2.0 ** (exponent - 7)
    return -magnitude if code & 128 else magnitude


E4M3 = np.array([e4m3_of(code) if code & 127 != 127 else np.inf for code in range(256)])


def fp8(stem: str, values: Floats, block: tuple[int, ...] | None, ending: str = "_inv") -> Written:
    """block: rows and columns that share a scale, with DeepSeek's names; None: one for a row."""
    n, k = values.shape
    rows, columns = block or (1, k)
    scale = np.zeros((-(-n // rows), -(-k // columns)), np.float32)
    for i, j in np.ndindex(scale.shape):
        part = values[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
        scale[i, j] = np.abs(part).max() / 448
    wide = np.kron(scale, np.ones((rows, columns), np.float32))[:n, :k]
    table = np.sort(E4M3[:127])
    scaled = np.abs(values / wide)
    codes = (
        np.abs(scaled[..., None] - table).argmin(-1)
        if values.size < 1 << 16
        else np.clip(np.searchsorted((table[1:] + table[:-1]) / 2, scaled), 0, 126)
    )
    codes = codes.astype(np.uint8) | (np.signbit(values).astype(np.uint8) << 7)
    tensors: dict[str, Tensor] = {
        f"{stem}.weight": ("F8_E4M3", codes.shape, codes.tobytes()),
        f"{stem}.weight_scale{ending if block else ''}": single(scale),
    }
    return Written(tensors, E4M3[codes].astype(np.float32) * wide)


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def nvfp4(stem: str, values: Floats, optimizer: bool) -> Written:
    """A scale of e4m3 for 16, and one for all, which divides or, with Model Optimizer, multiplies:
    a power of two, so that its inverse is exact."""
    n, k = values.shape
    parts = values.reshape(n, -1, 16)
    whole = 2.0 ** np.floor(np.log2(np.abs(values).max() / (6 * 448)) + 1)
    table = np.sort(E4M3[:127])
    wanted = np.abs(parts).max(-1) / 6 / whole
    scales = np.abs(wanted[..., None] - table).argmin(-1).astype(np.uint8)
    wide = np.maximum(E4M3[scales], 2.0**-9)[..., None] * whole
    codes = np.abs((parts / wide)[..., None] - E2M1).argmin(-1)
    meant = E2M1[codes] * E4M3[scales][..., None] * whole
    pairs = codes.reshape(n, -1, 2)
    packed = (pairs[..., 0] | pairs[..., 1] << 4).astype(np.uint8)
    names = ("weight", "weight_scale_2") if optimizer else ("weight_packed", "weight_global_scale")
    scale = np.array(whole if optimizer else [1 / whole], np.float32)
    tensors: dict[str, Tensor] = {
        f"{stem}.{names[0]}": ("U8", packed.shape, packed.tobytes()),
        f"{stem}.weight_scale": ("F8_E4M3", scales.shape, scales.tobytes()),
        f"{stem}.{names[1]}": single(scale),
    }
    return Written(tensors, meant.astype(np.float32).reshape(n, k))


@dataclass(frozen=True)
class Form:
    settings: Mapping[str, Any]  # quantization_config
    write: Callable[[str, Floats], Written]


def group_form(
    method: str,
    group: int,
    bits: int = 4,
    symmetric: bool = False,
    order: Order | None = None,
    version: int = 1,
) -> Form:
    settings = {"quant_method": method, "bits": bits, "group_size": group, "sym": symmetric}
    if method == "awq":
        return Form(settings | {"version": "gemm"}, lambda stem, v: awq(stem, v, group))
    if method == "gptq":
        settings |= {"desc_act": order is not None}
        settings |= {"checkpoint_format": "gptq_v2"} if version == 2 else {}
        return Form(
            settings, lambda stem, v: gptq(stem, v, group, bits, symmetric, order, 2 - version)
        )
    settings = {"quant_method": method, "format": "pack-quantized"}
    return Form(settings, lambda stem, v: packed(stem, v, group, bits, symmetric, order))


FORMS: dict[str, Form] = {
    "awq 32": group_form("awq", 32),
    "awq 64": group_form("awq", 64),
    "awq all": group_form("awq", -1),
    "gptq 4 32": group_form("gptq", 32),
    "gptq 4 64 sym": group_form("gptq", 64, symmetric=True),
    "gptq 8 32": group_form("gptq", 32, 8),
    "gptq 8 all sym": group_form("gptq", -1, 8, True),
    "gptq 4 32 act": group_form("gptq", 32, order=order_of_input),
    "gptq 4 64": group_form("gptq", 64),
    "gptq 4 64 act": group_form("gptq", 64, order=order_of_input),
    "gptq 8 32 act": group_form("gptq", 32, 8, order=order_of_input),
    "gptq 4 all act": group_form("gptq", -1, order=order_of_input),
    "gptq 4 32 sym act apart": group_form("gptq", 32, 4, True, order_of_its_own),
    "gptq 4 32 v2": group_form("gptq", 32, version=2),
    "gptq 8 64 sym v2": group_form("gptq", 64, 8, True, version=2),
    "packed 4 32 act": group_form("compressed-tensors", 32, 4, order=order_of_input),
    "packed 4 32 sym": group_form("compressed-tensors", 32, 4, True),
    "packed 4 64": group_form("compressed-tensors", 64, 4),
    "packed 8 32": group_form("compressed-tensors", 32, 8),
    "int8": Form({"quant_method": "compressed-tensors", "format": "int-quantized"}, int8),
    "fp8 all": Form({"quant_method": "fp8"}, lambda stem, v: fp8(stem, v, v.shape, "")),
    "fp8 rows": Form(
        {"quant_method": "compressed-tensors", "format": "float-quantized"},
        lambda stem, v: fp8(stem, v, None),
    ),
    "fp8 blocks": Form(
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        lambda stem, v: fp8(stem, v, (128, 128)),
    ),
    "nvfp4": Form(
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
        lambda stem, v: nvfp4(stem, v, False),
    ),
    "nvfp4 of Model Optimizer": Form(
        {"quant_method": "modelopt", "quant_algo": "NVFP4"}, lambda stem, v: nvfp4(stem, v, True)
    ),
}
