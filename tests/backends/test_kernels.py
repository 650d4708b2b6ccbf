"""Single kernels against a few lines of numpy, on every instruction set of this machine."""

from __future__ import annotations

import math

import gguf
import numpy as np
import pytest

from invar import _native
from invar.backends.cpu.formats import WEIGHT_FORMATS
from invar.graph.contract import round_activation
from invar.graph.operations import KVFormat
from invar.weights.formats import QuantType, dequantize, quantize

ISAS = _native.cpu_info()["available_isas"]
FORMATS = sorted(WEIGHT_FORMATS)
FOLD_NOISE = 2e-6
"""Of the largest output: fp32 folds over at most 2,048 columns, rounding errors of 6e-8 each that
mostly cancel. Products of codes are exact."""


def weights(kind: QuantType, rows: int, columns: int) -> np.ndarray:
    values = np.random.default_rng(rows).standard_normal((rows, columns)).astype(np.float32)
    return np.ascontiguousarray(quantize(values, kind))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)
@pytest.mark.parametrize(
    ("rows", "n", "columns"), [(1, 70, 512), (5, 33, 768), (40, 31, 256), (3, 64, 2048)]
)
def test_linear(kind: QuantType, rows: int, n: int, columns: int, isa: str) -> None:
    raw = weights(kind, n, columns)
    x = np.random.default_rng(rows).standard_normal((rows, columns)).astype(np.float32)
    found = _native.kernels.gemm(WEIGHT_FORMATS[kind], raw, x, isa)
    exact = dequantize(raw, kind, (n, columns)).astype(np.float64)
    expected = round_activation(x, kind).astype(np.float64) @ exact.T
    scale = np.abs(expected).max()
    assert np.abs(found - expected).max() < FOLD_NOISE * scale
    for wrong in (np.zeros_like(found), 2 * found, np.roll(found, 1, axis=1)):
        assert np.abs(wrong - expected).max() > 100 * FOLD_NOISE * scale
    assert found.tobytes() == _native.kernels.gemm(WEIGHT_FORMATS[kind], raw, x, ISAS[-1]).tobytes()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)
def test_dequantized_rows_equal_the_gguf_package(kind: QuantType, isa: str) -> None:
    raw = weights(kind, 9, 1024)
    if kind.in_gguf:
        official = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(int(kind)))
    else:  # then our numpy decoder judges, which has hand-made bytes to answer to
        official = dequantize(raw, kind, (9, 1024))
    for row, expected in zip(raw, official.reshape(9, 1024), strict=True):
        found = _native.kernels.dequantize_row(WEIGHT_FORMATS[kind], row, 1024, isa)
        assert found.tobytes() == expected.astype(np.float32).tobytes()


def attention_of(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    window: int,
    scale: float,
    kv_format: KVFormat,
    isa: str,
) -> np.ndarray:
    return _native.kernels.attention(q, k, v, window, scale, kv_format=kv_format, isa=isa)


# Of the largest value. bf16: q, K, V and the probabilities have eight bits; fp16: K and V have
# eleven; int8: K and V are within half of 1 / 127 of the largest of their head.
KV_STEPS = {KVFormat.BF16: 2**-8, KVFormat.FP16: 2**-11, KVFormat.INT8: 1 / 127}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 64), (3, 3, 16), (8, 1, 128)])
@pytest.mark.parametrize(("tokens", "kv_len", "window"), [(1, 1, 0), (5, 70, 0), (33, 1100, 40)])
@pytest.mark.parametrize("kv_format", KVFormat)
def test_attention(
    heads: int,
    kv_heads: int,
    head_dim: int,
    tokens: int,
    kv_len: int,
    window: int,
    kv_format: KVFormat,
    isa: str,
) -> None:
    rng = np.random.default_rng(tokens)
    q = rng.standard_normal((tokens, heads, head_dim)).astype(np.float32)
    k, v = rng.standard_normal((2, kv_len, kv_heads, head_dim)).astype(np.float32)
    scale = head_dim**-0.5
    found = attention_of(q, k, v, window, scale, kv_format, isa)
    group = heads // kv_heads
    scores = np.einsum("thd,khd->htk", q * scale, np.repeat(k, group, axis=1))
    distance = np.arange(kv_len - tokens, kv_len)[:, None] - np.arange(kv_len)
    scores[:, (distance < 0) | (distance >= (window or np.inf))] = -np.inf
    weight = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weight /= weight.sum(axis=-1, keepdims=True)
    expected = np.einsum("htk,khd->thd", weight, np.repeat(v, group, axis=1))
    assert np.abs(found - expected).max() < KV_STEPS[kv_format] * np.abs(v).max()
    same = attention_of(q, k, v, window, scale, kv_format, ISAS[-1])
    assert found.tobytes() == same.tobytes()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("width", [1, 15, 16, 33, 576])
def test_row_operations(width: int, isa: str) -> None:
    rng = np.random.default_rng(width)
    x, y = rng.standard_normal((2, width)).astype(np.float32)
    wide = x.astype(np.float64)
    norm = wide / np.sqrt(np.mean(wide * wide) + 1e-5) * y
    np.testing.assert_allclose(_native.kernels.rms_norm(x, y, 1e-5, isa), norm, rtol=1e-6)
    centred = wide - wide.mean()
    norm = centred / np.sqrt(np.mean(centred * centred) + 1e-5) * y + x
    found = _native.kernels.layer_norm(x, y, x, 1e-5, isa)
    np.testing.assert_allclose(found, norm, rtol=1e-6, atol=1e-6)
    gated = wide / (1 + np.exp(-wide)) * y
    np.testing.assert_allclose(
        _native.kernels.gated("silu", x, y, isa), gated, rtol=1e-6, atol=1e-7
    )
    share = np.array([math.erfc(-value / math.sqrt(2)) / 2 for value in wide])
    found = _native.kernels.gated("gelu", x, y, isa)
    np.testing.assert_allclose(found, wide * share * y, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_rope(style: str, isa: str) -> None:
    head = np.random.default_rng(0).standard_normal(64).astype(np.float32)
    frequencies = 10000.0 ** (-np.arange(24) / 24)
    angle = 77 * frequencies
    first, second = (head[:24], head[24:48]) if style == "half" else (head[:48:2], head[1:48:2])
    expected = head.astype(np.float64)
    rotated = (
        first * np.cos(angle) - second * np.sin(angle),
        second * np.cos(angle) + first * np.sin(angle),
    )
    if style == "half":
        expected[:24], expected[24:48] = rotated
    else:
        expected[:48:2], expected[1:48:2] = rotated
    found = _native.kernels.rope(head, frequencies, 77, 1.0, style, isa)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert found[48:].tobytes() == head[48:].tobytes()
