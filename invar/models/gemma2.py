"""Gemma 2 (arXiv 2408.00118): every other layer has a window, logits of attention are capped.

The +1 of the norms is already in the weights of a GGUF file.
https://github.com/ggml-org/llama.cpp/blob/569a0092b98e73bd222490441234144e52afd2ef/src/models/gemma2-iswa.cpp
"""

from __future__ import annotations

import math

from invar.graph.builder import GraphBuilder
from invar.graph.graph import Graph
from invar.graph.operations import Activation, Value
from invar.models.blocks import EMBEDDING, feed_forward, linear, output_logits
from invar.models.decoder import DecoderConfig, Place, attend, cache_groups, projections
from invar.models.gemma3 import FULL, SLIDING, attention_scale, from_one, read_decoder
from invar.models.hf import DECODER_KEYS, DECODER_NAMES, Config, HFFamily
from invar.models.metadata import ArchitectureKeys, ConfigError, ModelSource
from invar.weights.hf_directory import CONFIG

LAYERS_OF_27B = 46


def window(config: Config) -> object:
    """Of every layer with an even number, as the reference has it if it is not told."""
    kinds = config.get("layer_types")
    if kinds is None:
        return config.get("sliding_window")
    if not isinstance(kinds, list):
        raise ConfigError(f"{CONFIG}: layer_types must be a list, not {type(kinds).__name__}")
    if kinds != [(SLIDING, FULL)[n % 2] for n in range(len(kinds))]:
        raise ConfigError(f"{CONFIG}: layer_types do not alternate, beginning with {SLIDING}")
    return config.get("sliding_window")


HF = HFFamily(
    architecture="gemma2",
    keys={
        **DECODER_KEYS,
        "attention.scale": attention_scale,
        "attention.sliding_window": window,
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    names={
        **DECODER_NAMES,
        "model.norm": from_one("output_norm"),
        "model.layers.{}.input_layernorm": from_one("blk.{}.attn_norm"),
        "model.layers.{}.post_attention_layernorm": from_one("blk.{}.post_attention_norm"),
        "model.layers.{}.pre_feedforward_layernorm": from_one("blk.{}.ffn_norm"),
        "model.layers.{}.post_feedforward_layernorm": from_one("blk.{}.post_ffw_norm"),
    },
)


def decoder_layer(
    g: GraphBuilder,
    x: Value,
    config: DecoderConfig,
    block: str,
    place: Place,
    soft_cap: float | None,
) -> Value:
    normed = g.rms_norm(x, f"{block}.attn_norm.weight", config.norm_eps)
    q, k, v = projections(g, normed, block)
    mixed = attend(g, q, k, v, config, place, rope=config.rope, soft_cap=soft_cap)
    mixed = linear(g, mixed, f"{block}.attn_output")
    x = g.add(x, g.rms_norm(mixed, f"{block}.post_attention_norm.weight", config.norm_eps))
    normed = g.rms_norm(x, f"{block}.ffn_norm.weight", config.norm_eps)
    mixed = feed_forward(g, normed, block, Activation.GELU_TANH)
    return g.add(x, g.rms_norm(mixed, f"{block}.post_ffw_norm.weight", config.norm_eps))


def build(source: ModelSource) -> Graph:
    keys = ArchitectureKeys(source.metadata, "gemma2")
    config = read_decoder(source, keys, LAYERS_OF_27B)
    g = GraphBuilder(source)
    seen = keys.optional_integer("attention.sliding_window")
    places = cache_groups(g, config, [None if n % 2 else seen for n in range(config.layers)])
    soft_cap = keys.optional_real("attn_logit_softcapping")
    x = g.scale(g.embed(EMBEDDING), math.sqrt(config.hidden))
    for layer, place in enumerate(places):
        x = decoder_layer(g, x, config, f"blk.{layer}", place, soft_cap)
    x = g.rms_norm(g.take_rows(x), "output_norm.weight", config.norm_eps)
    logits = output_logits(g, x)
    final_cap = keys.optional_real("final_logit_softcapping")
    if final_cap is not None:
        logits = g.soft_cap(logits, final_cap)
    return g.finish(logits, config.context_length)
