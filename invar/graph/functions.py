"""What the operations of ``operations.py`` compute, as functions of arrays in double precision."""

from __future__ import annotations

import math
from typing import assert_never

import numpy as np
import numpy.typing as npt

from invar.graph.graph import GraphError
from invar.graph.operations import Activation, Rope, RopeStyle
from invar.graph.routing import Doubles, sigmoid


def rms_norm(x: Doubles, weight: Doubles | float, eps: float, heads: int) -> Doubles:
    """x `[tokens, heads * width]`, weight `[width]`."""
    parts = x.reshape(len(x), heads, -1)
    mean_square: Doubles = np.mean(parts * parts, axis=-1, keepdims=True)
    return (parts / np.sqrt(mean_square + eps) * weight).reshape(x.shape)


def layer_norm(x: Doubles, weight: Doubles, bias: Doubles, eps: float) -> Doubles:
    """x `[tokens, width]`, weight and bias `[width]`."""
    centred = x - np.mean(x, axis=-1, keepdims=True)
    variance: Doubles = np.mean(centred * centred, axis=-1, keepdims=True)
    normed: Doubles = centred / np.sqrt(variance + eps) * weight + bias
    return normed


def apply_rope(x: Doubles, positions: npt.NDArray[np.int64], heads: int, rope: Rope) -> Doubles:
    """x `[tokens, heads * head_dim]`; the first `2 * pairs` dimensions of each head rotate."""
    pairs = len(rope.inv_freq)
    cos, sin = rope_table(positions, rope)
    result = x.reshape(len(x), heads, -1).copy()
    rotated = result[..., : 2 * pairs]
    if rope.style is RopeStyle.INTERLEAVED:
        first, second = rotated[..., 0::2].copy(), rotated[..., 1::2].copy()
        rotated[..., 0::2], rotated[..., 1::2] = rotate(first, second, cos, sin)
    else:
        first, second = rotated[..., :pairs].copy(), rotated[..., pairs:].copy()
        rotated[..., :pairs], rotated[..., pairs:] = rotate(first, second, cos, sin)
    return result.reshape(x.shape)


def rope_table(positions: npt.NDArray[np.int64], rope: Rope) -> tuple[Doubles, Doubles]:
    """cos and sin, each `[tokens, 1, pairs]`, times the magnitude."""
    angles = positions[:, None, None] * np.array(rope.inv_freq, np.float64)
    return np.cos(angles) * rope.magnitude, np.sin(angles) * rope.magnitude


def rotate(first: Doubles, second: Doubles, cos: Doubles, sin: Doubles) -> tuple[Doubles, Doubles]:
    return first * cos - second * sin, second * cos + first * sin


def visible_keys(
    positions: npt.NDArray[np.int64], keys: int, window: int | None, chunked: bool = False
) -> npt.NDArray[np.bool_]:
    """`[tokens, keys]`: a token sees itself and what is before it, at most `window` in all; in
    chunks, what is before it in its own run of `window`."""
    distance = positions[:, None] - np.arange(keys)
    most = positions[:, None] % window + 1 if window and chunked else window or np.inf
    return (distance >= 0) & (distance < most)


def attend(
    scores: Doubles, visible: npt.NDArray[np.bool_], v: Doubles, sink: float = -np.inf
) -> Doubles:
    """softmax(scores and the sink) @ v for one head: scores `[tokens, keys]`, v `[keys, dim]`."""
    scores = np.where(visible, scores, -np.inf)
    most = np.maximum(scores.max(axis=-1, keepdims=True), sink)
    weights: Doubles = np.exp(scores - most)
    total: Doubles = weights.sum(axis=-1, keepdims=True) + np.exp(sink - most)
    return weights / total @ v


def activate(x: Doubles, activation: Activation) -> Doubles:
    match activation:
        case Activation.SILU:
            return x * sigmoid(x)
        case Activation.GELU_TANH:
            tanh: Doubles = np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
            return 0.5 * x * (1 + tanh)
        case Activation.GELU:
            tail: Doubles = np.vectorize(math.erfc, otypes=[np.float64])(-x / math.sqrt(2))
            return 0.5 * x * tail
        case Activation.SWIGLU_OAI:
            raise GraphError(f"{activation} needs a second factor")
    assert_never(activation)


def gated(gate: Doubles, up: Doubles, activation: Activation) -> Doubles:
    if activation is Activation.SWIGLU_OAI:
        gate, up = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0)
        return gate * sigmoid(1.702 * gate) * (up + 1)
    return activate(gate, activation) * up


def soft_cap(x: Doubles, cap: float) -> Doubles:
    tanh: Doubles = np.tanh(x / cap)
    return cap * tanh
