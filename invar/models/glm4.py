"""GLM-4 (arXiv 2406.12793): half of every head rotates, in neighbouring pairs; gate and up are
stored as one matrix. The models of 2025 have norms behind attention and feed-forward too.

GGUF calls those without the second norms chatglm, some of which store q, k and v as one.
https://github.com/ggml-org/llama.cpp/blob/0f7288922039b9231e22f3ab85ff78b62778c3a1/src/models/glm4.cpp
https://github.com/ggml-org/llama.cpp/blob/051139f511300aaf6159294433fab91c73ef7455/conversion/glm.py
"""

from __future__ import annotations

from typing import Any

from invar.graph.builder import GraphBuilder
from invar.graph.graph import Graph
from invar.graph.operations import Activation, RopeStyle, Value
from invar.models.blocks import EMBEDDING, feed_forward, linear, output_logits
from invar.models.decoder import DecoderConfig, Place, attend, cache_groups, projections
from invar.models.hf import DECODER_KEYS, DECODER_NAMES, Config, HFFamily, rotary_dim
from invar.models.metadata import ArchitectureKeys, ModelSource
from invar.models.placed import GATE_UP

ROTATED_SHARE = 0.5  # where config.json does not say


def rotated(config: Config) -> Any:
    return rotary_dim({"partial_rotary_factor": ROTATED_SHARE, **config})


KEYS = {**DECODER_KEYS, "rope.dimension_count": rotated}
HF_GLM = HFFamily(
    architecture="chatglm",
    keys=KEYS,
    names={**DECODER_NAMES, "model.layers.{}.mlp.gate_up_proj": GATE_UP},
)
HF = HFFamily(
    architecture="glm4",
    keys=KEYS,
    names={
        **HF_GLM.names,
        "model.layers.{}.post_self_attn_layernorm": "blk.{}.post_attention_norm",
        "model.layers.{}.post_mlp_layernorm": "blk.{}.post_ffw_norm",
    },
)
FUSED = {"blk.{}.ffn_up": GATE_UP}


def decoder_layer(
    g: GraphBuilder, x: Value, config: DecoderConfig, block: str, place: Place, post_norms: bool
) -> Value:
    def behind(mixed: Value, name: str) -> Value:
        return g.rms_norm(mixed, f"{block}.{name}.weight", config.norm_eps) if post_norms else mixed

    normed = g.rms_norm(x, f"{block}.attn_norm.weight", config.norm_eps)
    q, k, v = projections(g, normed, block)
    mixed = attend(g, q, k, v, config, place, rope=config.rope)
    x = g.add(x, behind(linear(g, mixed, f"{block}.attn_output"), "post_attention_norm"))
    normed = g.rms_norm(x, f"{block}.ffn_norm.weight", config.norm_eps)
    return g.add(x, behind(feed_forward(g, normed, block, Activation.SILU), "post_ffw_norm"))


def build_chatglm(source: ModelSource) -> Graph:
    return build(source, "chatglm")


def build(source: ModelSource, architecture: str = "glm4") -> Graph:
    keys = ArchitectureKeys(source.metadata, architecture)
    config = DecoderConfig.read(source, keys, RopeStyle.INTERLEAVED)
    g = GraphBuilder(source)
    x = g.embed(EMBEDDING)
    for layer, place in enumerate(cache_groups(g, config, [None] * config.layers)):
        x = decoder_layer(g, x, config, f"blk.{layer}", place, architecture == "glm4")
    x = g.rms_norm(g.take_rows(x), "output_norm.weight", config.norm_eps)
    return g.finish(output_logits(g, x), config.context_length)
