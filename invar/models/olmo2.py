"""OLMo 2 (arXiv 2501.00656): norms behind attention and feed-forward, and over whole q and k.

https://github.com/ggml-org/llama.cpp/blob/569a0092b98e73bd222490441234144e52afd2ef/src/models/olmo2.cpp
"""

from __future__ import annotations

from invar.graph.builder import GraphBuilder
from invar.graph.graph import Graph
from invar.graph.operations import Activation, RopeStyle, Value
from invar.models.blocks import EMBEDDING, feed_forward, linear, output_logits
from invar.models.decoder import DecoderConfig, Place, attend, cache_groups, projections
from invar.models.hf import DECODER_KEYS, DECODER_NAMES, HFFamily
from invar.models.metadata import ArchitectureKeys, ModelSource

HF = HFFamily(
    architecture="olmo2",
    keys=DECODER_KEYS,
    names={
        **DECODER_NAMES,
        "model.layers.{}.post_attention_layernorm": "blk.{}.post_attention_norm",
        "model.layers.{}.post_feedforward_layernorm": "blk.{}.post_ffw_norm",
    },
)


def attention(g: GraphBuilder, x: Value, config: DecoderConfig, block: str, place: Place) -> Value:
    q, k, v = projections(g, x, block)
    q = g.rms_norm(q, f"{block}.attn_q_norm.weight", config.norm_eps)
    k = g.rms_norm(k, f"{block}.attn_k_norm.weight", config.norm_eps)
    mixed = attend(g, q, k, v, config, place, rope=config.rope)
    return linear(g, mixed, f"{block}.attn_output")


def build(source: ModelSource) -> Graph:
    keys = ArchitectureKeys(source.metadata, "olmo2")
    config = DecoderConfig.read(source, keys, RopeStyle.HALF)
    g = GraphBuilder(source)
    x = g.embed(EMBEDDING)
    for layer, place in enumerate(cache_groups(g, config, [None] * config.layers)):
        block = f"blk.{layer}"
        mixed = attention(g, x, config, block, place)
        x = g.add(x, g.rms_norm(mixed, f"{block}.post_attention_norm.weight", config.norm_eps))
        mixed = feed_forward(g, x, block, Activation.SILU)
        x = g.add(x, g.rms_norm(mixed, f"{block}.post_ffw_norm.weight", config.norm_eps))
    x = g.rms_norm(g.take_rows(x), "output_norm.weight", config.norm_eps)
    return g.finish(output_logits(g, x), config.context_length)
