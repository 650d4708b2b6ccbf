"""Gemma 1 (arXiv 2403.08295): a Llama with gelu, a scaled embedding and norms stored less one.

The +1 of the norms is already in the weights of a GGUF file.
https://github.com/ggml-org/llama.cpp/blob/569a0092b98e73bd222490441234144e52afd2ef/src/models/gemma.cpp
"""

from __future__ import annotations

import math

from invar.graph.builder import GraphBuilder
from invar.graph.graph import Graph
from invar.graph.operations import Activation, RopeStyle
from invar.models.blocks import EMBEDDING, output_logits
from invar.models.decoder import DecoderConfig, cache_groups, pre_norm_block
from invar.models.gemma3 import from_one
from invar.models.hf import DECODER_KEYS, DECODER_NAMES, HFFamily
from invar.models.metadata import ArchitectureKeys, ModelSource

HF = HFFamily(
    architecture="gemma",
    keys=DECODER_KEYS,
    names={
        **DECODER_NAMES,
        "model.norm": from_one("output_norm"),
        "model.layers.{}.input_layernorm": from_one("blk.{}.attn_norm"),
        "model.layers.{}.post_attention_layernorm": from_one("blk.{}.ffn_norm"),
    },
)


def build(source: ModelSource) -> Graph:
    config = DecoderConfig.read(source, ArchitectureKeys(source.metadata, "gemma"), RopeStyle.HALF)
    g = GraphBuilder(source)
    x = g.scale(g.embed(EMBEDDING), math.sqrt(config.hidden))
    for layer, place in enumerate(cache_groups(g, config, [None] * config.layers)):
        x = pre_norm_block(
            g, x, config, f"blk.{layer}", place, activation=Activation.GELU_TANH, rope=config.rope
        )
    x = g.rms_norm(g.take_rows(x), "output_norm.weight", config.norm_eps)
    return g.finish(output_logits(g, x), config.context_length)
