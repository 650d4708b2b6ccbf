"""The rope of a model, from what its files say: config.json's words, or the keys of GGUF."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from invar.graph.operations import Rope, RopeStyle, ShorterRope
from invar.models.metadata import (
    LARGEST_REAL,
    SMALLEST_REAL,
    ArchitectureKeys,
    ConfigError,
    ModelSource,
)
from invar.models.rope_scaling import (
    Frequencies,
    ScaledRope,
    default_frequencies,
    divide_by_factors,
    scaled_rope,
)

__all__ = ["Frequencies", "default_frequencies", "rope_of", "rotated_dimensions"]

DEFAULT_BASE = 10000.0
LEAST_BASE = 1.0  # below it the later pairs would turn faster than the first, without a limit
GGUF_SCALING = ("type", "factor", "original_context_length", "finetuned", "attn_factor")
YARN_KEYS = (
    *("yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow"),
    "yarn_log_multiplier",  # read by the family (deepseek2.py)
)
FACTORS_TENSOR = "rope_freqs.weight"  # float32 [pairs]; every frequency is divided by its factor
LONG_TENSOR, SHORT_TENSOR = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = frozenset((FACTORS_TENSOR, LONG_TENSOR, SHORT_TENSOR))


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


def rope_of(
    source: ModelSource,
    keys: ArchitectureKeys,
    dim: int,
    style: RopeStyle,
    yarn: Mapping[str, Any] = MappingProxyType({}),
) -> Rope:
    """yarn: what a family adds to the yarn of its GGUF files, in the words of config.json."""
    base = keys.optional_real("rope.freq_base", LEAST_BASE) or DEFAULT_BASE
    scaling = keys.optional_mapping("rope.scaling")
    if scaling is None:
        scaled = scaled_from_gguf(source, keys, base, dim, yarn)
    else:
        scaled = scaled_rope(base, dim, scaling)
    shorter = None
    if scaled.short_positions is not None:
        shorter = ShorterRope(scaled.short_positions, scaled.short_inv_freq)
    return Rope(scaled.inv_freq, style, scaled.magnitude, shorter)


# ---------------------------------------------------------------- GGUF


def scaled_from_gguf(
    source: ModelSource,
    keys: ArchitectureKeys,
    base: float,
    dim: int,
    yarn: Mapping[str, Any],
) -> ScaledRope:
    """From keys and factor tensors, as llama.cpp reads them.

    A missing type with a factor means linear (`load_hparams` in
    https://github.com/ggml-org/llama.cpp/blob/a5410f046c01d01330c8a42f13b64a211fedf2c3/src/llama-model.cpp).
    """
    if LONG_TENSOR in source.tensors or SHORT_TENSOR in source.tensors:
        return scaled_rope(base, dim, longrope_from_gguf(source, keys))
    kind = keys.optional_text("rope.scaling.type") or "linear"
    factor = linear_factor(keys)
    if kind == "yarn":
        return scaled_rope(base, dim, {**yarn_from_gguf(keys, factor), **yarn})
    if kind not in ("none", "linear"):
        raise ConfigError(
            f"{keys.full('rope.scaling.type')} is {kind!r}; supported are none, linear, yarn, "
            f"longrope with {LONG_TENSOR}, and the factors of Llama 3 in {FACTORS_TENSOR}"
        )
    refuse_unknown_scaling(keys, GGUF_SCALING)
    magnitude = keys.optional_real("rope.scaling.attn_factor")
    if magnitude not in (None, 1.0):
        raise ConfigError(
            f"{keys.full('rope.scaling.attn_factor')} is {magnitude}; with this type it must be 1"
        )
    linear = {"rope_type": "linear", "factor": factor} if kind == "linear" and factor else None
    scaled = scaled_rope(base, dim, linear)
    if FACTORS_TENSOR in source.tensors:
        factors = factors_from_gguf(source, FACTORS_TENSOR)
        return ScaledRope(divide_by_factors(scaled.inv_freq, factors))
    return scaled


def linear_factor(keys: ArchitectureKeys) -> float | None:
    factor = keys.optional_real("rope.scaling.factor")
    older = keys.optional_real("rope.scale_linear")
    if factor and older and factor != older:
        raise ConfigError(
            f"{keys.full('rope.scaling.factor')} is {factor} and {keys.full('rope.scale_linear')} "
            f"is {older}; they say the same thing, so one of them is wrong"
        )
    return factor or older


def yarn_from_gguf(keys: ArchitectureKeys, factor: float | None) -> dict[str, Any]:
    """GGUF's magnitude is a factor on what the paper gives, config.json's is the whole."""
    refuse_unknown_scaling(keys, GGUF_SCALING + YARN_KEYS)
    if factor is None:
        raise ConfigError(f"{keys.full('rope.scaling.factor')} is missing, which yarn needs")
    mixed = keys.optional_real("rope.scaling.yarn_ext_factor")
    if mixed not in (None, 1.0):
        raise ConfigError(f"{keys.full('rope.scaling.yarn_ext_factor')} is {mixed}, must be 1")
    found: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": keys.integer("rope.scaling.original_context_length"),
        "beta_fast": keys.optional_real("rope.scaling.yarn_beta_fast"),
        "beta_slow": keys.optional_real("rope.scaling.yarn_beta_slow"),
    }
    given = [
        keys.optional_real(f"rope.scaling.{name}") for name in ("attn_factor", "yarn_attn_factor")
    ]
    by = next((value for value in given if value is not None), None)
    if by is not None:
        found["attention_factor"] = by * (1 + 0.1 * math.log(factor) if factor > 1 else 1.0)
    return found


def longrope_from_gguf(source: ModelSource, keys: ArchitectureKeys) -> dict[str, Any]:
    refuse_unknown_scaling(keys, GGUF_SCALING)
    for tensor in (LONG_TENSOR, SHORT_TENSOR):
        if tensor not in source.tensors:
            raise ConfigError(f"{tensor} is missing; longrope needs both lists of factors")
    return {
        "rope_type": "longrope",
        "long_factor": factors_from_gguf(source, LONG_TENSOR),
        "short_factor": factors_from_gguf(source, SHORT_TENSOR),
        "original_max_position_embeddings": keys.integer("rope.scaling.original_context_length"),
        "max_position_embeddings": keys.integer("context_length"),
        "attention_factor": keys.optional_real("rope.scaling.attn_factor"),
    }


def factors_from_gguf(source: ModelSource, tensor: str) -> list[float]:
    values: list[float] = source.dequantize(tensor).reshape(-1).tolist()
    wrong = [value for value in values if not SMALLEST_REAL <= value <= LARGEST_REAL]
    if wrong:
        raise ConfigError(
            f"{tensor} holds {wrong[0]}; frequencies are divided by its factors, so all must be "
            "finite and above 0"
        )
    return values


def refuse_unknown_scaling(keys: ArchitectureKeys, names: tuple[str, ...]) -> None:
    """Scaling by other keys (alpha, yarn_…) would else be left out without a word."""
    prefix = keys.full("rope.scaling.")
    known = {prefix + name for name in names}
    unknown = sorted(key for key in keys.metadata if key.startswith(prefix) and key not in known)
    if unknown:
        raise ConfigError(
            f"{unknown[0]} is {keys.metadata[unknown[0]]}, which is not supported with this type "
            f"(known: {', '.join(sorted(known))})"
        )
