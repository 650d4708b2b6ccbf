"""Frequencies of rotary position embeddings, in double precision.

Every angle is `position * inv_freq[i]`; the kinds of scaling differ in inv_freq and in a factor on
cosines and sines. The formulas are those of
https://github.com/huggingface/transformers/blob/0044e3b3facff1a1ad60b235c69d5b45beae75a4/src/transformers/modeling_rope_utils.py
Where they depend on a request's length, the longest that is served decides for all (design, 4).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from invar.models.metadata import LARGEST_REAL, SMALLEST_REAL, ConfigError, brief

Frequencies = tuple[float, ...]
Scaling = Mapping[str, Any]  # `rope_scaling` of a config.json, and its max_position_embeddings

ORIGINAL = "original_max_position_embeddings"
LONGEST = "max_position_embeddings"
YARN_BETA_FAST, YARN_BETA_SLOW = 32.0, 1.0  # arXiv 2309.00071, section 3.2
SMALLEST_RAMP = 0.001  # the reference's guard against a ramp of no width


@dataclass(frozen=True)
class ScaledRope:
    inv_freq: Frequencies
    magnitude: float = 1.0  # factor on cosines and sines
    short_positions: int | None = None  # if no more are served, `short_inv_freq` holds instead
    short_inv_freq: Frequencies = ()


def default_frequencies(base: float, dim: int) -> Frequencies:
    """RoFormer, section 3.2.2 (arXiv 2104.09864): base^(-2i / dim) for the dim / 2 pairs."""
    return tuple(base ** (-2 * pair / dim) for pair in range(dim // 2))


def default_rope(base: float, dim: int, scaling: Scaling) -> ScaledRope:
    return ScaledRope(default_frequencies(base, dim))


def linear_rope(base: float, dim: int, scaling: Scaling) -> ScaledRope:
    """Position interpolation (arXiv 2306.15595): positions, here frequencies, over a factor."""
    factor = positive(scaling, "factor")
    return ScaledRope(tuple(f / factor for f in default_frequencies(base, dim)))


def dynamic_rope(base: float, dim: int, scaling: Scaling) -> ScaledRope:
    """NTK-aware, for `factor` times the trained length; up to that length frequencies are plain."""
    factor, trained = positive(scaling, "factor"), positions(scaling, LONGEST)
    if dim <= 2:
        raise ConfigError(f"rope_scaling of type 'dynamic' needs more than {dim} dimensions")
    stretched = base * (factor * factor - (factor - 1)) ** (dim / (dim - 2))
    plain = default_frequencies(base, dim)
    return ScaledRope(default_frequencies(stretched, dim), 1.0, trained, plain)


def yarn_rope(base: float, dim: int, scaling: Scaling) -> ScaledRope:
    """arXiv 2309.00071: fast pairs keep their frequencies, slow ones are interpolated."""
    trained = positions(scaling, ORIGINAL, scaling.get(LONGEST))
    if scaling.get("factor") is None:
        scaling = {**scaling, "factor": positions(scaling, LONGEST) / trained}
    factor = positive(scaling, "factor")

    def pair_of(turns: float) -> float:
        """The pair that turns so often over the trained length, as a real number."""
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = pair_of(positive(scaling, "beta_fast", YARN_BETA_FAST))
    high = pair_of(positive(scaling, "beta_slow", YARN_BETA_SLOW))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += SMALLEST_RAMP
    found = []
    for pair, plain in enumerate(default_frequencies(base, dim)):
        slow = min(max((pair - low) / (high - low), 0.0), 1.0)
        found.append(plain / factor * slow + plain * (1 - slow))
    return ScaledRope(tuple(found), yarn_magnitude(factor, scaling))


def yarn_magnitude(factor: float, scaling: Scaling) -> float:
    def grown(by: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0

    if scaling.get("attention_factor") is not None:
        return positive(scaling, "attention_factor")
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        parts = (positive(scaling, name) for name in ("mscale", "mscale_all_dim"))
        above, below = (grown(part) for part in parts)
        return above / below
    return grown(1.0)


def longrope(base: float, dim: int, scaling: Scaling) -> ScaledRope:
    """arXiv 2402.13753: a factor for every pair, one list within the trained length, one beyond."""
    trained = positions(scaling, ORIGINAL, scaling.get(LONGEST))
    plain = default_frequencies(base, dim)
    long, short = (
        divide_by_factors(plain, factor_list(scaling, f"{which}_factor"))
        for which in ("long", "short")
    )
    factor = scaling.get("factor")
    if factor is None:
        factor = positions(scaling, LONGEST) / trained
    magnitude = 1.0
    if scaling.get("attention_factor") is not None:
        magnitude = positive(scaling, "attention_factor")
    elif factor > 1:
        magnitude = math.sqrt(1 + math.log(factor) / math.log(trained))
    return ScaledRope(long, magnitude, trained, short)


def llama3_rope(base: float, dim: int, scaling: Scaling) -> ScaledRope:
    """Llama 3.1: long wavelengths divided by the factor, short ones kept, a blend between; none
    where the two ends are one, as in Llama 4."""
    context, factor = positions(scaling, ORIGINAL), positive(scaling, "factor")
    low, high = (positive(scaling, f"{which}_freq_factor") for which in ("low", "high"))
    if low > high:
        raise ConfigError(f"rope_scaling: low_freq_factor {low} is above {high}, the high one")
    result = []
    for frequency in default_frequencies(base, dim):
        turns = context * frequency / (2 * math.pi)  # over the context the model was trained on
        blend = (turns - low) / (high - low) if low < high else float(turns >= low)
        kept = min(max(blend, 0.0), 1.0)
        result.append(kept * frequency + (1 - kept) * frequency / factor)
    return ScaledRope(tuple(result))


SCALINGS: dict[str, tuple[Callable[[float, int, Scaling], ScaledRope], set[str]]] = {
    "default": (default_rope, set()),
    "linear": (linear_rope, {"factor"}),
    "dynamic": (dynamic_rope, {"factor", LONGEST}),
    "yarn": (yarn_rope, set()),
    "longrope": (longrope, {"long_factor", "short_factor"}),
    "llama3": (llama3_rope, {"factor", "low_freq_factor", "high_freq_factor", ORIGINAL}),
}
ALIASES = {"su": "longrope", "deepseek_yarn": "yarn"}  # Phi-3's first files; vLLM's own name


def scaled_rope(base: float, dim: int, scaling: Scaling | None) -> ScaledRope:
    """inv_freq `[dim / 2]` from a `rope_scaling` entry of a config.json (`None`: not scaled).

    An unknown kind is an error: a model run with plain rope answers well at first and worse with
    every thousand tokens.
    """
    if scaling is None:
        return ScaledRope(default_frequencies(base, dim))
    kind = kind_of(scaling)
    if kind not in SCALINGS:
        raise ConfigError(f"rope type {brief(kind)!r} is not known (known: {', '.join(SCALINGS)})")
    make, required = SCALINGS[kind]
    missing = sorted(name for name in required if scaling.get(name) is None)
    if missing:
        raise ConfigError(f"rope_scaling of type {kind!r} has no {', '.join(missing)}")
    try:
        return make(base, dim, scaling)
    except (ArithmeticError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"rope_scaling of type {kind!r} cannot be computed: {error}") from None


def kind_of(scaling: Scaling) -> str:
    """The kind stands under `rope_type`, in older files under `type`."""
    kinds = {str(scaling[key]) for key in ("rope_type", "type") if scaling.get(key) is not None}
    if len(kinds) != 1:
        found = " and ".join(map(brief, sorted(kinds))) or "none"
        raise ConfigError(f"rope_scaling must name one kind under rope_type, found {found}")
    kind = kinds.pop()
    return ALIASES.get(kind, kind)


def divide_by_factors(frequencies: Frequencies, factors: list[float]) -> Frequencies:
    """inv_freq from factors, one per pair."""
    if len(factors) != len(frequencies):
        raise ConfigError(
            f"rope has {len(factors)} factors, expected {len(frequencies)}, one for each pair of "
            "rotated dimensions"
        )
    return tuple(f / factor for f, factor in zip(frequencies, factors, strict=True))


def factor_list(scaling: Scaling, name: str) -> list[float]:
    values = scaling.get(name)
    if not isinstance(values, list) or not all(is_positive(value) for value in values):
        raise ConfigError(f"rope_scaling: {name} must be a list of positive numbers")
    return [float(value) for value in values]


def positive(scaling: Scaling, name: str, default: float | None = None) -> float:
    value: Any = scaling.get(name)
    value = default if value is None else value
    if is_positive(value):
        return float(value)
    raise ConfigError(f"rope_scaling: {name} must be a positive number, found {brief(value)}")


def positions(scaling: Scaling, name: str, default: Any = None) -> int:
    value = scaling.get(name, default)
    if type(value) is int and 1 <= value < 2**31:
        return value
    raise ConfigError(f"rope_scaling: {name} must be a number of positions, found {brief(value)}")


def is_positive(value: Any) -> bool:
    return type(value) in (int, float) and SMALLEST_REAL <= value <= LARGEST_REAL
