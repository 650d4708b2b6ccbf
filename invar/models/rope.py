"""Frequencies of rotary position embeddings, in double precision.

Every angle is `position * inv_freq[i]`; the kinds of scaling differ in inv_freq alone. The formulas
are those of
https://github.com/huggingface/transformers/blob/0044e3b3facff1a1ad60b235c69d5b45beae75a4/src/transformers/modeling_rope_utils.py
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from invar.graph.graph import Rope, RopeStyle
from invar.models.metadata import (
    LARGEST_REAL,
    SMALLEST_REAL,
    ArchitectureKeys,
    ConfigError,
    ModelSource,
)

Frequencies = tuple[float, ...]

DEFAULT_BASE = 10000.0
LEAST_BASE = 1.0  # below it the later pairs would turn faster than the first, without a limit
GGUF_SCALING = ("type", "factor", "original_context_length", "finetuned", "attn_factor")
FACTORS_TENSOR = "rope_freqs.weight"  # float32 [pairs]; every frequency is divided by its factor


def default_frequencies(base: float, dim: int) -> Frequencies:
    """RoFormer, section 3.2.2 (arXiv 2104.09864): base^(-2i / dim) for the dim / 2 pairs."""
    return tuple(base ** (-2 * pair / dim) for pair in range(dim // 2))


def linear_frequencies(base: float, dim: int, scaling: Mapping[str, Any]) -> Frequencies:
    """Position interpolation (arXiv 2306.15595): positions, here frequencies, over a factor."""
    return tuple(f / scaling["factor"] for f in default_frequencies(base, dim))


def llama3_frequencies(base: float, dim: int, scaling: Mapping[str, Any]) -> Frequencies:
    """Llama 3.1: long wavelengths divided by the factor, short ones kept, a blend between."""
    context = scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    result = []
    for frequency in default_frequencies(base, dim):
        turns = context * frequency / (2 * math.pi)  # over the context the model was trained on
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        result.append(kept * frequency + (1 - kept) * frequency / scaling["factor"])
    return tuple(result)


SCALINGS: dict[str, tuple[Callable[[float, int, Mapping[str, Any]], Frequencies], set[str]]] = {
    "default": (lambda base, dim, scaling: default_frequencies(base, dim), set()),
    "linear": (linear_frequencies, {"factor"}),
    "llama3": (
        llama3_frequencies,
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    ),
}


def scaled_frequencies(base: float, dim: int, scaling: Mapping[str, Any] | None) -> Frequencies:
    """inv_freq `[dim / 2]` from a `rope_scaling` entry of a config.json (`None`: not scaled).

    The kind stands under `rope_type`, in older files under `type`. An unknown kind is an error:
    a model run with plain rope answers well at first and worse with every thousand tokens.
    """
    if scaling is None:
        return default_frequencies(base, dim)
    kinds = {scaling[key] for key in ("rope_type", "type") if scaling.get(key) is not None}
    if len(kinds) != 1:
        found = " and ".join(sorted(kinds)) or "none"
        raise ConfigError(f"rope_scaling must name one kind under rope_type, found {found}")
    kind = kinds.pop()
    if kind not in SCALINGS:
        raise ConfigError(f"rope type {kind!r} is not known (known: {', '.join(SCALINGS)})")
    frequencies, required = SCALINGS[kind]
    missing = sorted(required - scaling.keys())
    if missing:
        raise ConfigError(f"rope_scaling of type {kind!r} has no {', '.join(missing)}")
    return frequencies(base, dim, scaling)


def divide_by_factors(frequencies: Frequencies, factors: Sequence[float]) -> Frequencies:
    """inv_freq from the factors that a GGUF file carries, one per pair."""
    if len(factors) != len(frequencies):
        raise ConfigError(
            f"{FACTORS_TENSOR} holds {len(factors)} factors, expected {len(frequencies)}, "
            "one for each pair of rotated dimensions"
        )
    return tuple(f / float(factor) for f, factor in zip(frequencies, factors, strict=True))


def rotated_dimensions(keys: ArchitectureKeys, head_dim: int) -> int:
    """How many of a head's dimensions are rotated, in pairs; all of them if the file has no key."""
    name = "rope.dimension_count"
    rotated = keys.optional_integer(name) or head_dim
    if rotated % 2 or rotated > head_dim:
        raise ConfigError(
            f"{keys.full(name)} is {rotated} (by default the head size), expected an even number "
            f"up to the head size of {head_dim}"
        )
    return rotated


def factors_from_gguf(source: ModelSource) -> list[float]:
    values = source.dequantize(FACTORS_TENSOR).reshape(-1).tolist()
    wrong = [value for value in values if not SMALLEST_REAL <= value <= LARGEST_REAL]
    if wrong:
        raise ConfigError(
            f"{FACTORS_TENSOR} holds {wrong[0]}; frequencies are divided by its factors, so all "
            "must be finite and above 0"
        )
    return values


def rope_of(source: ModelSource, keys: ArchitectureKeys, dim: int, style: RopeStyle) -> Rope:
    """The rope of a model, from the `rope_scaling` of a config.json or from what GGUF says."""
    scaling = keys.optional_mapping("rope.scaling")
    if scaling is None:
        return rope_from_gguf(source, keys, dim, style)
    base = keys.optional_real("rope.freq_base", LEAST_BASE) or DEFAULT_BASE
    return Rope(scaled_frequencies(base, dim, scaling), style)


def rope_from_gguf(source: ModelSource, keys: ArchitectureKeys, dim: int, style: RopeStyle) -> Rope:
    """The rope of a GGUF model: base, linear factor, factor tensor.

    A missing type with a factor means linear, as in llama.cpp (`load_hparams` in
    https://github.com/ggml-org/llama.cpp/blob/a5410f046c01d01330c8a42f13b64a211fedf2c3/src/llama-model.cpp).
    """
    base = keys.optional_real("rope.freq_base", LEAST_BASE) or DEFAULT_BASE
    kind = keys.optional_text("rope.scaling.type") or "linear"
    if kind not in ("none", "linear"):
        raise ConfigError(
            f"{keys.full('rope.scaling.type')} is {kind!r}; supported are none and linear, "
            f"and the factors of Llama 3 in {FACTORS_TENSOR}"
        )
    _refuse_unknown_scaling(keys)
    factor = keys.optional_real("rope.scaling.factor")
    older = keys.optional_real("rope.scale_linear")
    if factor and older and factor != older:
        raise ConfigError(
            f"{keys.full('rope.scaling.factor')} is {factor} and {keys.full('rope.scale_linear')} "
            f"is {older}; they say the same thing, so one of them is wrong"
        )
    factor = factor or older
    linear = {"rope_type": "linear", "factor": factor} if kind == "linear" and factor else None
    frequencies = scaled_frequencies(base, dim, linear)
    if FACTORS_TENSOR in source.tensors:
        frequencies = divide_by_factors(frequencies, factors_from_gguf(source))
    return Rope(frequencies, style)


def _refuse_unknown_scaling(keys: ArchitectureKeys) -> None:
    """Scaling by other keys (alpha, yarn_…) would else be left out without a word."""
    prefix = keys.full("rope.scaling.")
    known = {prefix + name for name in GGUF_SCALING}
    unknown = sorted(key for key in keys.metadata if key.startswith(prefix) and key not in known)
    if unknown:
        raise ConfigError(f"{unknown[0]} is not supported (known: {', '.join(sorted(known))})")
    magnitude = keys.optional_real("rope.scaling.attn_factor")
    if magnitude not in (None, 1.0):
        raise ConfigError(
            f"{keys.full('rope.scaling.attn_factor')} is {magnitude}; supported is 1 alone"
        )
