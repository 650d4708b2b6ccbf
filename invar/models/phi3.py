"""Phi-3 (arXiv 2404.14219), Phi-4 (2412.08905) and Phi-4-mini: q, k and v stored as one matrix, and
gate and up.

Long contexts have LongRoPE, Phi-4-mini rotates three quarters of a head. GGUF writes a window of 0
for models without one.
https://github.com/ggml-org/llama.cpp/blob/358a4a0109ee414feb67a8bec271e1e6c5aa9302/src/models/phi3.cpp
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from invar.graph.builder import GraphBuilder
from invar.graph.graph import Graph
from invar.graph.operations import Activation, RopeStyle
from invar.models.blocks import EMBEDDING, output_logits
from invar.models.decoder import DecoderConfig, cache_groups, pre_norm_block
from invar.models.hf import DECODER_KEYS, DECODER_NAMES, Config, HFFamily, rope_scaling
from invar.models.metadata import ArchitectureKeys, ModelSource
from invar.models.placed import GATE_UP, QKV

OLDER_KINDS = ("su", "yarn")  # what the first files call LongRoPE


def longrope(config: Config) -> Mapping[str, Any] | None:
    scaling = rope_scaling(config)
    if scaling is None or scaling.get("long_factor") is None:
        return scaling
    kinds = {name: scaling[name] for name in ("rope_type", "type") if scaling.get(name)}
    if not all(kind in (*OLDER_KINDS, "longrope") for kind in kinds.values()):
        return scaling
    return {**scaling, **dict.fromkeys(kinds, "longrope")}


HF = HFFamily(
    architecture="phi3",
    keys={
        **DECODER_KEYS,
        "context_length": "max_position_embeddings",  # with scaling
        "attention.sliding_window": "sliding_window",
        "rope.scaling": longrope,
    },
    names={
        **DECODER_NAMES,
        "model.layers.{}.self_attn.qkv_proj": QKV,
        "model.layers.{}.mlp.gate_up_proj": GATE_UP,
    },
)
FUSED = {"blk.{}.ffn_up": GATE_UP}


def build(source: ModelSource) -> Graph:
    keys = ArchitectureKeys(source.metadata, "phi3")
    config = DecoderConfig.read(source, keys, RopeStyle.HALF)
    window = keys.optional_integer("attention.sliding_window", least=0) or None
    g = GraphBuilder(source)
    x = g.embed(EMBEDDING)
    for layer, place in enumerate(cache_groups(g, config, [window] * config.layers)):
        x = pre_norm_block(
            g, x, config, f"blk.{layer}", place, activation=Activation.SILU, rope=config.rope
        )
    x = g.rms_norm(g.take_rows(x), "output_norm.weight", config.norm_eps)
    return g.finish(output_logits(g, x), config.context_length)
