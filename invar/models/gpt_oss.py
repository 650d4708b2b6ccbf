"""GPT-OSS (arXiv 2508.10925): attention with sinks, every second layer in a window, experts alone.

https://github.com/ggml-org/llama.cpp/blob/069be0ae22f391c64e26e8da4c7da0143ede8cf3/src/models/openai-moe.cpp
https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/gpt_oss/modeling_gpt_oss.py

In a directory the rows of gate and up alternate, and plain experts are stored as [in, out].
"""

from __future__ import annotations

from invar.graph.builder import GraphBuilder
from invar.graph.graph import Graph
from invar.graph.operations import Activation, RopeStyle, Value
from invar.graph.routing import Routing, Scoring
from invar.models.blocks import EMBEDDING, linear, output_logits
from invar.models.decoder import DecoderConfig, Place, attend, cache_groups, projections
from invar.models.experts import expert_counts, mixture
from invar.models.gemma2 import window
from invar.models.hf import DECODER_KEYS, DECODER_NAMES, EXPERT_KEYS, Config, HFFamily
from invar.models.metadata import ArchitectureKeys, ConfigError, ModelSource, brief
from invar.models.placed import Placed, every
from invar.weights.hf_directory import CONFIG

WINDOW_PERIOD = 2  # as Gemma 2
YARN = {"truncate": False}  # the ends of its ramp are not whole pairs; GGUF has no key for that
UNIT = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}  # constants of `Activation.SWIGLU_OAI`


def gated_unit(config: Config) -> None:
    for name, value in UNIT.items():
        if config.get(name, value) != value:
            raise ConfigError(f"{CONFIG}: {name} is {brief(config[name])}, supported is {value}")


EXPERTS = "model.layers.{}.mlp.experts"
HF = HFFamily(
    architecture="gpt-oss",
    keys={
        **DECODER_KEYS,
        **EXPERT_KEYS,
        "context_length": "max_position_embeddings",  # with scaling
        "attention.sliding_window": window,
        "gated_unit": gated_unit,
    },
    names={
        **DECODER_NAMES,
        "model.layers.{}.self_attn.sinks": "blk.{}.attn_sinks.weight",
        "model.layers.{}.post_attention_layernorm": "blk.{}.post_attention_norm",
        "model.layers.{}.mlp.router": "blk.{}.ffn_gate_inp",
        f"{EXPERTS}.gate_up_proj": (
            Placed("blk.{}.ffn_gate_exps.weight", transposed=True, rows=every(2, 0)),
            Placed("blk.{}.ffn_up_exps.weight", transposed=True, rows=every(2, 1)),
        ),
        f"{EXPERTS}.gate_up_proj_bias": (
            Placed("blk.{}.ffn_gate_exps.bias", rows=every(2, 0), vectors=True),
            Placed("blk.{}.ffn_up_exps.bias", rows=every(2, 1), vectors=True),
        ),
        f"{EXPERTS}.down_proj": Placed("blk.{}.ffn_down_exps.weight", transposed=True),
        f"{EXPERTS}.down_proj_bias": "blk.{}.ffn_down_exps.bias",
    },
)


def attention(g: GraphBuilder, x: Value, config: DecoderConfig, block: str, place: Place) -> Value:
    q, k, v = projections(g, x, block)
    sinks = f"{block}.attn_sinks.weight"
    mixed = attend(g, q, k, v, config, place, rope=config.rope, sinks=sinks)
    return linear(g, mixed, f"{block}.attn_output")


def build(source: ModelSource) -> Graph:
    keys = ArchitectureKeys(source.metadata, "gpt-oss")
    config = DecoderConfig.read(source, keys, RopeStyle.HALF, YARN)
    window = keys.integer("attention.sliding_window")
    windows = [None if n % WINDOW_PERIOD else window for n in range(config.layers)]
    experts, used = expert_counts(keys)
    routing = Routing(used, Scoring.SOFTMAX_OF_CHOSEN)
    g = GraphBuilder(source)
    x = g.embed(EMBEDDING)
    for layer, place in enumerate(cache_groups(g, config, windows)):
        block = f"blk.{layer}"
        normed = g.rms_norm(x, f"{block}.attn_norm.weight", config.norm_eps)
        x = g.add(x, attention(g, normed, config, block, place))
        normed = g.rms_norm(x, f"{block}.post_attention_norm.weight", config.norm_eps)
        x = g.add(x, mixture(g, normed, block, experts, routing, Activation.SWIGLU_OAI))
    x = g.rms_norm(g.take_rows(x), "output_norm.weight", config.norm_eps)
    return g.finish(output_logits(g, x), config.context_length)
