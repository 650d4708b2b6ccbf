"""GPT-NeoX (arXiv 2204.06745) and Pythia (2304.01373): attention and feed-forward read the same
residual, a quarter of every head rotates.

Every head has its q, k and v stored below each other; in GGUF the heads of q come first. GGUF does
not say which GELU it is: here the exact one, as in Pythia.
https://github.com/ggml-org/llama.cpp/blob/7bca1fd9ca2a681b0182e16f24f832b7be1942af/conversion/gpt_neox.py
https://github.com/ggml-org/llama.cpp/blob/a0b8c172c7113ff5275be4de7f6f68d214a527c6/src/models/gptneox.cpp
"""

from __future__ import annotations

from typing import Any

from invar.graph.builder import GraphBuilder
from invar.graph.graph import Graph
from invar.graph.operations import Activation, RopeStyle, Value
from invar.models.blocks import (
    EMBEDDING,
    activation_of,
    layer_norm,
    linear,
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
from invar.models.hf import DECODER_KEYS, Config, HFFamily, activation, rotary_dim
from invar.models.metadata import ArchitectureKeys, ModelSource
from invar.models.placed import Placed, alternating

ROTATED_SHARE = 0.25  # where config.json does not say
PARALLEL = "use_parallel_residual"


def rotated(config: Config) -> Any:
    return rotary_dim({"rotary_pct": ROTATED_SHARE, **config})


HF = HFFamily(
    architecture="gptneox",
    keys={
        **DECODER_KEYS,
        LAYER_EPS: "layer_norm_eps",
        "rope.dimension_count": rotated,
        PARALLEL: PARALLEL,
        "feed_forward_activation": activation("hidden_act"),
    },
    names={
        "gpt_neox.embed_in": "token_embd",
        "gpt_neox.final_layer_norm": "output_norm",
        "embed_out": "output",
        "lm_head": "output",
        "gpt_neox.layers.{}.input_layernorm": "blk.{}.attn_norm",
        "gpt_neox.layers.{}.attention.query_key_value": tuple(
            Placed(f"blk.{{}}.attn_{name}", rows=alternating(name)) for name in "qkv"
        ),
        "gpt_neox.layers.{}.attention.dense": "blk.{}.attn_output",
        "gpt_neox.layers.{}.post_attention_layernorm": "blk.{}.ffn_norm",
        "gpt_neox.layers.{}.mlp.dense_h_to_4h": "blk.{}.ffn_up",
        "gpt_neox.layers.{}.mlp.dense_4h_to_h": "blk.{}.ffn_down",
    },
    left_out=tuple(
        f"gpt_neox.layers.{{}}.attention.{name}"
        for name in ("bias", "masked_bias", "rotary_emb.inv_freq")
    ),
)


def attention(g: GraphBuilder, x: Value, config: DecoderConfig, block: str, place: Place) -> Value:
    q, k, v = projections(g, layer_norm(g, x, f"{block}.attn_norm", config.norm_eps), block)
    mixed = attend(g, q, k, v, config, place, rope=config.rope)
    return linear(g, mixed, f"{block}.attn_output")


def build(source: ModelSource) -> Graph:
    keys = ArchitectureKeys(source.metadata, "gptneox")
    config = DecoderConfig.read(source, keys, RopeStyle.HALF, eps=LAYER_EPS)
    parallel, form = keys.optional_flag(PARALLEL), activation_of(keys, Activation.GELU)
    g = GraphBuilder(source)
    x = g.embed(EMBEDDING)
    for layer, place in enumerate(cache_groups(g, config, [None] * config.layers)):
        block = f"blk.{layer}"
        attended = g.add(x, attention(g, x, config, block, place))
        residual = attended if parallel is False else x
        normed = layer_norm(g, residual, f"{block}.ffn_norm", config.norm_eps)
        x = g.add(attended, plain_feed_forward(g, normed, block, form))
    x = layer_norm(g, g.take_rows(x), "output_norm", config.norm_eps)
    return g.finish(output_logits(g, x), config.context_length)
