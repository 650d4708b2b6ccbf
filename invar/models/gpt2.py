"""GPT-2 (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019), DistilGPT-2.

Positions are learned, so there are no more than the table has. Matrices are stored as
[in_features, out_features], and q, k and v as one.
https://github.com/ggml-org/llama.cpp/blob/a0b8c172c7113ff5275be4de7f6f68d214a527c6/src/models/gpt2.cpp
"""

from __future__ import annotations

from dataclasses import replace

from invar.graph.builder import GraphBuilder
from invar.graph.graph import Graph
from invar.graph.operations import Activation, RopeStyle, Value
from invar.models.blocks import (
    EMBEDDING,
    activation_of,
    layer_norm,
    linear,
    matrix_shape,
    output_logits,
    plain_feed_forward,
)
from invar.models.decoder import (
    LAYER_EPS,
    DecoderConfig,
    Place,
    attend,
    cache_groups,
    projections,
)
from invar.models.hf import Config, HFFamily, activation
from invar.models.metadata import ArchitectureKeys, ConfigError, ModelSource
from invar.models.placed import QKV, Placed
from invar.weights.hf_directory import CONFIG

POSITIONS = "position_embd.weight"


def attention_scale(config: Config) -> float | None:
    for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if config.get(name):
            raise ConfigError(f"{CONFIG}: {name} is not supported for this family")
    return 1.0 if config.get("scale_attn_weights") is False else None


HF = HFFamily(
    architecture="gpt2",
    keys={
        "block_count": "n_layer",
        "context_length": "n_positions",
        "embedding_length": "n_embd",
        "attention.head_count": "n_head",
        "attention.scale": attention_scale,
        LAYER_EPS: "layer_norm_epsilon",
        "feed_forward_activation": activation("activation_function"),
    },
    names={
        "wte": "token_embd",
        "wpe": "position_embd",
        "ln_f": "output_norm",
        "lm_head": "output",
        "h.{}.ln_1": "blk.{}.attn_norm",
        "h.{}.attn.c_attn": tuple(replace(part, transposed=True) for part in QKV),
        "h.{}.attn.c_proj": Placed("blk.{}.attn_output", transposed=True),
        "h.{}.ln_2": "blk.{}.ffn_norm",
        "h.{}.mlp.c_fc": Placed("blk.{}.ffn_up", transposed=True),
        "h.{}.mlp.c_proj": Placed("blk.{}.ffn_down", transposed=True),
    },
    left_out=("h.{}.attn.bias", "h.{}.attn.masked_bias"),
    renamed=lambda config, name: name.removeprefix("transformer."),
)


def decoder_layer(
    g: GraphBuilder, x: Value, config: DecoderConfig, block: str, place: Place, form: Activation
) -> Value:
    q, k, v = projections(g, layer_norm(g, x, f"{block}.attn_norm", config.norm_eps), block)
    mixed = attend(g, q, k, v, config, place, rope=None)
    x = g.add(x, linear(g, mixed, f"{block}.attn_output"))
    normed = layer_norm(g, x, f"{block}.ffn_norm", config.norm_eps)
    return g.add(x, plain_feed_forward(g, normed, block, form))


def build(source: ModelSource) -> Graph:
    keys = ArchitectureKeys(source.metadata, "gpt2")
    config = DecoderConfig.read(source, keys, RopeStyle.HALF, eps=LAYER_EPS)
    positions, _ = matrix_shape(source, POSITIONS)
    if positions != config.context_length:
        raise ConfigError(
            f"{keys.full('context_length')} is {config.context_length}, but {POSITIONS} has "
            f"{positions} rows"
        )
    form = activation_of(keys, Activation.GELU_TANH)
    g = GraphBuilder(source)
    x = g.add(g.embed(EMBEDDING), g.position_embed(POSITIONS))
    for layer, place in enumerate(cache_groups(g, config, [None] * config.layers)):
        x = decoder_layer(g, x, config, f"blk.{layer}", place, form)
    x = layer_norm(g, g.take_rows(x), "output_norm", config.norm_eps)
    return g.finish(output_logits(g, x), config.context_length)
