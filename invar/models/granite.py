"""Granite 3, dense: a Llama with multipliers for embedding, residuals, attention and logits.

https://github.com/huggingface/transformers/blob/0044e3b3facff1a1ad60b235c69d5b45beae75a4/src/transformers/models/granite/modeling_granite.py
GGUF stores the rows of q and k so that the rotated pairs are neighbours.
"""

from __future__ import annotations

from invar.graph.graph import Activation, Graph, GraphBuilder, RopeStyle
from invar.models.blocks import EMBEDDING, feed_forward, linear, output_logits
from invar.models.decoder import DecoderConfig, attend, cache_groups, projections
from invar.models.hf import DECODER_KEYS, INTERLEAVED_NAMES, HFFamily
from invar.models.metadata import ArchitectureKeys, ModelSource

HF = HFFamily(
    architecture="granite",
    keys={
        **DECODER_KEYS,
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    },
    names=INTERLEAVED_NAMES,
)


def build(source: ModelSource) -> Graph:
    keys = ArchitectureKeys(source.metadata, "granite")
    config = DecoderConfig.read(source, keys, RopeStyle.INTERLEAVED)
    residual = keys.optional_real("residual_scale") or 1.0
    g = GraphBuilder(source)
    x = g.scale(g.embed(EMBEDDING), keys.optional_real("embedding_scale") or 1.0)
    for layer, place in enumerate(cache_groups(g, config, [None] * config.layers)):
        block = f"blk.{layer}"
        normed = g.rms_norm(x, f"{block}.attn_norm.weight", config.norm_eps)
        q, k, v = projections(g, normed, block)
        mixed = attend(g, q, k, v, config, place, rope=config.rope)
        x = g.add(x, g.scale(linear(g, mixed, f"{block}.attn_output"), residual))
        normed = g.rms_norm(x, f"{block}.ffn_norm.weight", config.norm_eps)
        x = g.add(x, g.scale(feed_forward(g, normed, block, Activation.SILU), residual))
    x = g.rms_norm(g.take_rows(x), "output_norm.weight", config.norm_eps)
    logits = output_logits(g, x)
    return g.finish(
        g.scale(logits, 1 / (keys.optional_real("logit_scale") or 1.0)), config.context_length
    )
