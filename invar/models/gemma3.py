"""Gemma 3 text models (arXiv 2503.19786): five layers with a window, then one that sees all.

The +1 of the norms is already in the weights of a GGUF file. Defaults of missing keys are those of
https://github.com/ggml-org/llama.cpp/blob/569a0092b98e73bd222490441234144e52afd2ef/src/models/gemma3.cpp
and its `load_hparams`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from invar.graph.builder import GraphBuilder
from invar.graph.graph import Graph
from invar.graph.operations import Activation, Rope, RopeStyle, Value
from invar.models.blocks import EMBEDDING, feed_forward, linear, output_logits
from invar.models.decoder import (
    DecoderConfig,
    Place,
    attend,
    cache_groups,
    head_norms,
    projections,
)
from invar.models.hf import (
    DECODER_KEYS,
    DECODER_NAMES,
    Config,
    HFFamily,
    rope_scaling,
    rope_theta,
)
from invar.models.metadata import LARGEST_REAL, ArchitectureKeys, ConfigError, ModelSource, brief
from invar.models.placed import Placed
from invar.models.rope import DEFAULT_BASE, LEAST_BASE, default_frequencies, rotated_dimensions

LAYERS_OF_27B = 62
FULL, SLIDING = "full_attention", "sliding_attention"


def window_pattern(config: Config) -> Any:
    """Every so many layers, one sees all: told by the kind of each layer, or by the number."""
    if config.get("use_bidirectional_attention"):
        raise ConfigError("config.json: use_bidirectional_attention is not supported")
    kinds = config.get("layer_types")
    if not isinstance(kinds, list) or FULL not in kinds:
        return config.get("sliding_window_pattern", config.get("_sliding_window_pattern"))
    pattern = kinds.index(FULL) + 1
    regular = [FULL if (n + 1) % pattern == 0 else SLIDING for n in range(len(kinds))]
    if kinds != regular:
        raise ConfigError(f"config.json: layer_types are not one {FULL} every {pattern} layers")
    return pattern


def attention_scale(config: Config) -> Any:
    scalar = config.get("query_pre_attn_scalar")
    if scalar is None:
        return None
    if not (isinstance(scalar, int | float) and 0 < scalar <= LARGEST_REAL):
        raise ConfigError(
            f"config.json: query_pre_attn_scalar must be a positive number, found {brief(scalar)}"
        )
    return 1 / math.sqrt(scalar)


def local_base(config: Config) -> Any:
    """Of layers with a window; not the base of the others where it is left out."""
    by_kind = config.get("rope_parameters")
    local = by_kind.get(SLIDING) if isinstance(by_kind, Mapping) else None
    given = local.get("rope_theta") if isinstance(local, Mapping) else None
    return config.get("rope_local_base_freq", given)


def from_one(name: str) -> Placed:
    """Norms are stored as their distance from 1."""
    return Placed(name, plus=1.0)


HF = HFFamily(
    architecture="gemma3",
    keys={
        **DECODER_KEYS,
        "context_length": "max_position_embeddings",  # with scaling: the reference multiplies none
        "attention.scale": attention_scale,
        "attention.sliding_window": "sliding_window",
        "attention.sliding_window_pattern": window_pattern,
        "final_logit_softcapping": "final_logit_softcapping",
        "rope.freq_base": lambda config: rope_theta(config, FULL),
        "rope.freq_base_swa": local_base,
        "rope.scaling": lambda config: rope_scaling(config, FULL),
    },
    names={
        **DECODER_NAMES,
        "model.norm": from_one("output_norm"),
        "model.layers.{}.input_layernorm": from_one("blk.{}.attn_norm"),
        "model.layers.{}.self_attn.q_norm": from_one("blk.{}.attn_q_norm"),
        "model.layers.{}.self_attn.k_norm": from_one("blk.{}.attn_k_norm"),
        "model.layers.{}.post_attention_layernorm": from_one("blk.{}.post_attention_norm"),
        "model.layers.{}.pre_feedforward_layernorm": from_one("blk.{}.ffn_norm"),
        "model.layers.{}.post_feedforward_layernorm": from_one("blk.{}.post_ffw_norm"),
    },
    # The models that see leave out what is so by default.
    # https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/gemma3/configuration_gemma3.py
    defaults={
        **{"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26},
        **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
        **{"max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "rope_theta": 1e6},
        **{"query_pre_attn_scalar": 256, "sliding_window": 4096},
    },
)


@dataclass(frozen=True)
class Gemma3Config:
    decoder: DecoderConfig  # whose rope is that of the layers that see all
    local_rope: Rope
    window: int | None
    window_pattern: int  # every so many layers, one sees all
    logit_soft_cap: float | None

    @classmethod
    def read(cls, source: ModelSource) -> Gemma3Config:
        keys = ArchitectureKeys(source.metadata, "gemma3")
        decoder = read_decoder(source, keys, LAYERS_OF_27B)
        local_base = keys.optional_real("rope.freq_base_swa", LEAST_BASE) or DEFAULT_BASE
        local = default_frequencies(local_base, rotated_dimensions(keys, decoder.head_dim))
        return cls(
            decoder=decoder,
            local_rope=Rope(local, RopeStyle.HALF),
            window=keys.optional_integer("attention.sliding_window"),
            window_pattern=keys.optional_integer("attention.sliding_window_pattern") or 6,
            logit_soft_cap=keys.optional_real("final_logit_softcapping"),
        )

    def windows(self) -> list[int | None]:
        pattern = self.window_pattern
        layers = range(self.decoder.layers)
        return [None if n % pattern == pattern - 1 else self.window for n in layers]


def read_decoder(source: ModelSource, keys: ArchitectureKeys, layers_of_27b: int) -> DecoderConfig:
    """The scale is 1 / sqrt(query_pre_attn_scalar), which GGUF does not carry: it is the head size
    in all published models but the 27B."""
    config = DecoderConfig.read(source, keys, RopeStyle.HALF)
    if keys.optional_real("attention.scale") is None and config.layers == layers_of_27b:
        return replace(config, attention_scale=1 / math.sqrt(config.hidden // config.heads))
    return config


def attention(
    g: GraphBuilder, x: Value, config: DecoderConfig, block: str, place: Place, rope: Rope
) -> Value:
    q, k, v = projections(g, x, block)
    q, k = head_norms(g, q, k, config, block)
    mixed = attend(g, q, k, v, config, place, rope=rope)
    return linear(g, mixed, f"{block}.attn_output")


def decoder_layer(
    g: GraphBuilder, x: Value, config: DecoderConfig, block: str, place: Place, rope: Rope
) -> Value:
    normed = g.rms_norm(x, f"{block}.attn_norm.weight", config.norm_eps)
    mixed = attention(g, normed, config, block, place, rope)
    x = g.add(x, g.rms_norm(mixed, f"{block}.post_attention_norm.weight", config.norm_eps))
    normed = g.rms_norm(x, f"{block}.ffn_norm.weight", config.norm_eps)
    mixed = feed_forward(g, normed, block, Activation.GELU_TANH)
    return g.add(x, g.rms_norm(mixed, f"{block}.post_ffw_norm.weight", config.norm_eps))


def build(source: ModelSource) -> Graph:
    gemma = Gemma3Config.read(source)
    config, windows = gemma.decoder, gemma.windows()
    g = GraphBuilder(source)
    # In double here, in fp32 where it is applied; `transformers` rounds it to the model's dtype.
    x = g.scale(g.embed(EMBEDDING), math.sqrt(config.hidden))
    for layer, place in enumerate(cache_groups(g, config, windows)):
        rope = config.rope if windows[layer] is None else gemma.local_rope
        x = decoder_layer(g, x, config, f"blk.{layer}", place, rope)
    x = g.rms_norm(g.take_rows(x), "output_norm.weight", config.norm_eps)
    logits = output_logits(g, x)
    if gemma.logit_soft_cap is not None:
        logits = g.soft_cap(logits, gemma.logit_soft_cap)
    return g.finish(logits, config.context_length)
