"""llama.cpp's mixtures of K formats: which format each matrix of a model gets under a file type.

    matrix_type("q4_k_m", Place("ffn_down", layer=0, layers=16))    # QuantType.Q6_K

llama_tensor_get_type_impl and tensor_type_fallback of
https://github.com/ggml-org/llama.cpp/blob/569a0092b98e73bd222490441234144e52afd2ef/src/llama-quant.cpp
for models without an importance matrix.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from invar.weights.formats import QuantType

MIXTURES = {
    "q2_k": QuantType.Q2_K,
    "q2_k_s": QuantType.Q2_K,
    "q3_k_s": QuantType.Q3_K,
    "q3_k_m": QuantType.Q3_K,
    "q3_k_l": QuantType.Q3_K,
    "q4_k_s": QuantType.Q4_K,
    "q4_k_m": QuantType.Q4_K,
    "q5_k_s": QuantType.Q5_K,
    "q5_k_m": QuantType.Q5_K,
    "q6_k": QuantType.Q6_K,
    "iq4_nl": QuantType.IQ4_NL,
    "iq4_xs": QuantType.IQ4_XS,
}
"""The format of most matrices of each, by its name in small letters."""

HEAD = QuantType.Q6_K
"""Of the output matrix of all of them."""

FALLBACKS = {
    QuantType.Q2_K: QuantType.Q4_0,
    QuantType.Q3_K: QuantType.Q4_0,
    QuantType.Q4_K: QuantType.Q5_0,
    QuantType.Q5_K: QuantType.Q5_1,
    QuantType.Q6_K: QuantType.Q8_0,
    QuantType.IQ4_XS: QuantType.IQ4_NL,
}
"""Where rows are no whole blocks of 256."""

NAME = re.compile(r"blk\.(\d+)\.(\w+?)(?:_exps)?\.weight$")


@dataclass(frozen=True)
class Place:
    """Where a matrix stands. sharing: query heads to a head of K and V; experts: of a layer."""

    part: str  # such as "attn_v", as GGUF calls it
    layer: int
    layers: int
    sharing: int = 1
    experts: int = 0

    @staticmethod
    def of(tensor: str, layers: int, sharing: int = 1, experts: int = 0) -> Place:
        """tensor: its name in GGUF; outside layers a place that no rule knows."""
        found = NAME.match(tensor)
        layer, part = (int(found[1]), found[2]) if found else (0, "")
        return Place(part, layer, layers, sharing, experts)

    @property
    def wants_more_bits(self) -> bool:
        """The first and last eighth of layers, and every third between."""
        eighth = self.layers // 8
        is_third = (self.layer - eighth) % 3 == 2
        return self.layer < eighth or self.layer >= 7 * self.layers // 8 or is_third


def matrix_type(mixture: str, place: Place) -> QuantType:
    """Raises KeyError for a name that is none of `MIXTURES`."""
    base = MIXTURES[mixture]
    rules = {
        "attn_v": _value_type,
        "attn_qkv": _value_type,
        "attn_kv_b": _value_type,
        "ffn_down": _down_type,
        "attn_output": _attention_output_type,
    }
    found = rules[place.part](mixture, place) if place.part in rules else None
    if place.experts == 8 and place.part in ("attn_k", "attn_v", "attn_qkv"):
        found = QuantType.Q8_0  # of the little that all tokens share
    return found or base


def fitting(kind: QuantType, columns: int) -> QuantType | None:
    """The format itself or what stands in for it where rows are no whole blocks; None: nothing."""
    for one in (kind, FALLBACKS.get(kind)):
        if one is not None and columns % one.block_size == 0:
            return one
    return None


def _value_type(mixture: str, place: Place) -> QuantType | None:
    shares_much = place.sharing >= 4
    match mixture:
        case "q2_k":
            return QuantType.Q4_K if shares_much else QuantType.Q3_K
        case "q2_k_s" if shares_much:
            return QuantType.Q4_K
        case "q3_k_m":
            return QuantType.Q5_K if place.layer < 2 else QuantType.Q4_K
        case "q3_k_l":
            return QuantType.Q5_K
        case "q4_k_s" if place.layer < 4:
            return QuantType.Q5_K
        case "q4_k_m" | "q5_k_m" if place.wants_more_bits:
            return QuantType.Q6_K
        case "iq4_nl" | "iq4_xs" if shares_much:
            return QuantType.Q5_K
    return None


def _down_type(mixture: str, place: Place) -> QuantType | None:
    is_early = place.layer < place.layers // 8
    match mixture:
        case "q2_k":
            return QuantType.Q3_K
        case "q2_k_s" if is_early:
            return QuantType.Q4_K
        case "q3_k_m":
            return QuantType.Q5_K if place.layer < place.layers // 16 else QuantType.Q4_K
        case "q3_k_l":
            return QuantType.Q5_K
        case "q4_k_m" | "q5_k_m" if place.wants_more_bits:
            return QuantType.Q6_K
        case "q4_k_s" | "iq4_nl" | "iq4_xs" if is_early:
            return QuantType.Q5_K
    return None


def _attention_output_type(mixture: str, place: Place) -> QuantType | None:
    if place.experts == 8:
        fine = ("q3_k_l", "q5_k_s", "q5_k_m", "q6_k", "q2_k_s")
        return None if mixture in fine else QuantType.Q5_K
    named = {"q2_k": QuantType.Q3_K, "q3_k_m": QuantType.Q4_K, "q3_k_l": QuantType.Q5_K}
    return named.get(mixture)
