"""GPT-OSS (arXiv 2508.10925): attention with sinks, every second layer in a window, experts alone.

https://github.com/ggml-org/llama.cpp/blob/069be0ae22f391c64e26e8da4c7da0143ede8cf3/src/models/openai-moe.cpp
https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/gpt_oss/modeling_gpt_oss.py
"""

from __future__ import annotations

from invar.graph.graph import Activation, Graph, GraphBuilder, RopeStyle, Value
from invar.graph.routing import Routing, Scoring
from invar.models.blocks import EMBEDDING, linear, output_logits
from invar.models.decoder import DecoderConfig, Place, attend, cache_groups, projections
from invar.models.experts import expert_counts, mixture
from invar.models.metadata import ArchitectureKeys, ModelSource

WINDOW_PERIOD = 2
YARN = {"truncate": False}  # the ends of its ramp are not whole pairs; GGUF has no key for that


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
