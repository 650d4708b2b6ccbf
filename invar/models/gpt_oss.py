"""GPT-OSS (arXiv 2508.10925): attention with sinks, every second layer in a window, experts alone.

https://github.com/ggml-org/llama.cpp/blob/069be0ae22f391c64e26e8da4c7da0143ede8cf3/src/models/openai-moe.cpp
https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/gpt_oss/modeling_gpt_oss.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from invar.graph.graph import Activation, CacheGroup, Graph, GraphBuilder, Rope, RopeStyle, Value
from invar.graph.routing import Routing, Scoring
from invar.models.blocks import (
    EMBEDDING,
    head_counts,
    head_size,
    hidden_size,
    layer_count,
    linear,
    output_logits,
)
from invar.models.experts import expert_counts, mixture
from invar.models.metadata import ArchitectureKeys, ModelSource
from invar.models.rope import rope_of

WINDOW_PERIOD = 2
YARN = {"truncate": False}  # the ends of its ramp are not whole pairs; GGUF has no key for that


@dataclass(frozen=True)
class GptOssConfig:
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    context_length: int
    window: int
    rope: Rope
    experts: int
    routing: Routing

    @classmethod
    def read(cls, source: ModelSource) -> GptOssConfig:
        keys = ArchitectureKeys(source.metadata, "gpt-oss")
        layers, hidden = layer_count(source, keys), hidden_size(source, keys)
        heads, kv_heads = head_counts(keys, layers)
        head_dim = head_size(source, keys, hidden, heads, kv_heads)
        experts, used = expert_counts(keys)
        return cls(
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            norm_eps=keys.real("attention.layer_norm_rms_epsilon"),
            context_length=keys.integer("context_length"),
            window=keys.integer("attention.sliding_window"),
            rope=rope_of(source, keys, head_dim, RopeStyle.HALF, YARN),
            experts=experts,
            routing=Routing(used, Scoring.SOFTMAX_OF_CHOSEN),
        )

    def group_of(self, layer: int) -> str:
        return "full" if layer % WINDOW_PERIOD == WINDOW_PERIOD - 1 else "window"

    def groups(self) -> list[CacheGroup]:
        full = self.layers // WINDOW_PERIOD
        counts = {"window": (self.layers - full, self.window), "full": (full, None)}
        return [
            CacheGroup(name, layers, self.kv_heads, self.head_dim, window)
            for name, (layers, window) in counts.items()
            if layers
        ]


def attention(g: GraphBuilder, x: Value, config: GptOssConfig, layer: int) -> Value:
    block = f"blk.{layer}"
    q = g.rope(linear(g, x, f"{block}.attn_q"), config.heads, config.rope)
    k = g.rope(linear(g, x, f"{block}.attn_k"), config.kv_heads, config.rope)
    v = linear(g, x, f"{block}.attn_v")
    mixed = g.attention(
        q,
        k,
        v,
        group=config.group_of(layer),
        layer=layer // WINDOW_PERIOD,
        heads=config.heads,
        scale=1 / math.sqrt(config.head_dim),
        sinks=f"{block}.attn_sinks.weight",
    )
    return linear(g, mixed, f"{block}.attn_output")


def decoder_layer(g: GraphBuilder, x: Value, config: GptOssConfig, layer: int) -> Value:
    block = f"blk.{layer}"
    normed = g.rms_norm(x, f"{block}.attn_norm.weight", config.norm_eps)
    x = g.add(x, attention(g, normed, config, layer))
    normed = g.rms_norm(x, f"{block}.post_attention_norm.weight", config.norm_eps)
    activation = Activation.SWIGLU_OAI
    return g.add(x, mixture(g, normed, block, config.experts, config.routing, activation))


def build(source: ModelSource) -> Graph:
    config = GptOssConfig.read(source)
    g = GraphBuilder(source)
    for group in config.groups():
        g.cache_group(group)
    x = g.embed(EMBEDDING)
    for layer in range(config.layers):
        x = decoder_layer(g, x, config, layer)
    x = g.rms_norm(g.take_rows(x), "output_norm.weight", config.norm_eps)
    return g.finish(output_logits(g, x), config.context_length)
