"""Granite 3 and 4, dense: a Llama with multipliers for embedding, residuals, attention and logits.

Granite 4 has the configuration of a mixture with layers of other kinds, of which its dense models
have none; it stores gate and up as one, and may leave positions out. GGUF calls it granite too.
https://github.com/ggml-org/llama.cpp/blob/010f22d8a3a9a0b545af17177e956859baadc66a/conversion/granite.py

https://github.com/huggingface/transformers/blob/0044e3b3facff1a1ad60b235c69d5b45beae75a4/src/transformers/models/granite/modeling_granite.py
GGUF stores the rows of q and k so that the rotated pairs are neighbours.
"""

from __future__ import annotations

from invar.graph.builder import GraphBuilder
from invar.graph.graph import Graph
from invar.graph.operations import Activation, RopeStyle
from invar.models.blocks import EMBEDDING, feed_forward, linear, output_logits
from invar.models.decoder import DecoderConfig, attend, cache_groups, projections
from invar.models.hf import DECODER_KEYS, INTERLEAVED_NAMES, Config, HFFamily
from invar.models.metadata import ArchitectureKeys, ConfigError, ModelSource, brief
from invar.models.placed import GATE_UP
from invar.weights.hf_directory import CONFIG

ROPE = "rope.scaling.finetuned"  # the key by which GGUF says whether there is one; by default
ATTENTION = ("attention", "full_attention")

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


def num_local_experts(config: Config) -> None:
    experts = config.get("num_local_experts", 8)
    if experts != 0:
        raise ConfigError(
            f"{CONFIG}: num_local_experts is {brief(experts)}; of this family, models without "
            "experts alone (0) are supported"
        )


def num_hidden_layers(config: Config) -> object:
    kinds = config.get("layer_types") or config.get("layers_block_type")
    if not isinstance(kinds, list) or not set(map(str, kinds)) <= set(ATTENTION):
        raise ConfigError(
            f"{CONFIG}: layer_types are {brief(kinds)}; of this family, models of attention "
            "layers alone are supported"
        )
    return config.get("num_hidden_layers")


def position_embedding_type(config: Config) -> bool:
    return config.get("position_embedding_type") == "rope"


HF_GRANITE4 = HFFamily(
    architecture="granite",
    keys={
        **HF.keys,
        "block_count": num_hidden_layers,
        "expert_count": num_local_experts,
        ROPE: position_embedding_type,
    },
    names={
        **INTERLEAVED_NAMES,
        "model.layers.{}.shared_mlp.input_linear": GATE_UP,
        "model.layers.{}.shared_mlp.output_linear": "blk.{}.ffn_down",
    },
)


def build(source: ModelSource) -> Graph:
    keys = ArchitectureKeys(source.metadata, "granite")
    config = DecoderConfig.read(source, keys, RopeStyle.INTERLEAVED)
    residual = keys.optional_real("residual_scale") or 1.0
    rope = None if keys.optional_flag(ROPE) is False else config.rope
    g = GraphBuilder(source)
    x = g.scale(g.embed(EMBEDDING), keys.optional_real("embedding_scale") or 1.0)
    for layer, place in enumerate(cache_groups(g, config, [None] * config.layers)):
        block = f"blk.{layer}"
        normed = g.rms_norm(x, f"{block}.attn_norm.weight", config.norm_eps)
        q, k, v = projections(g, normed, block)
        mixed = attend(g, q, k, v, config, place, rope=rope)
        x = g.add(x, g.scale(linear(g, mixed, f"{block}.attn_output"), residual))
        normed = g.rms_norm(x, f"{block}.ffn_norm.weight", config.norm_eps)
        x = g.add(x, g.scale(feed_forward(g, normed, block, Activation.SILU), residual))
    x = g.rms_norm(g.take_rows(x), "output_norm.weight", config.norm_eps)
    logits = output_logits(g, x)
    return g.finish(
        g.scale(logits, 1 / (keys.optional_real("logit_scale") or 1.0)), config.context_length
    )
