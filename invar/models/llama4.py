"""The text side of Llama 4: chunked attention, layers without positions, one expert a token.

Every fourth layer has no rope, sees everything, and scales its queries with the position; the
others see their own chunk of the sequence. What a GGUF file does not say are constants of
https://github.com/ggml-org/llama.cpp/blob/8a5c4e03d11bbcb157cbf05b9cd2968f34a55969/src/models/llama4.cpp
The rest is as in
https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/llama4/modeling_llama4.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from invar.graph.graph import Activation, CacheGroup, Graph, GraphBuilder, Rope, RopeStyle, Value
from invar.graph.routing import Routing, Scoring
from invar.models.blocks import (
    EMBEDDING,
    feed_forward,
    head_counts,
    head_size,
    hidden_size,
    layer_count,
    linear,
    output_logits,
)
from invar.models.experts import expert_counts, mixture
from invar.models.metadata import ArchitectureKeys, ConfigError, ModelSource
from invar.models.rope import rope_of, rotated_dimensions

DEFAULT_CHUNK = 8192
DEFAULT_PERIOD = 4  # every so many layers, one sees all
TEMPERATURE_SCALE, TEMPERATURE_LENGTH = 0.1, 8192
EXPERTS_WITHOUT_HEAD_NORMS = 128  # Maverick


@dataclass(frozen=True)
class Llama4Config:
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    context_length: int
    rope: Rope
    chunk: int
    period: int
    head_norms: bool
    temperature_scale: float
    temperature_length: int
    mixture_period: int  # every so many layers, one has experts
    experts: int
    routing: Routing

    @classmethod
    def read(cls, source: ModelSource) -> Llama4Config:
        keys = ArchitectureKeys(source.metadata, "llama4")
        layers, hidden = layer_count(source, keys), hidden_size(source, keys)
        heads, kv_heads = head_counts(keys, layers)
        head_dim = head_size(source, keys, hidden, heads, kv_heads)
        rotated = rotated_dimensions(keys, head_dim)
        experts, used = expert_counts(keys)
        if used != 1:
            raise ConfigError(f"{keys.full('expert_used_count')} is {used}; Llama 4 uses 1")
        head_norms = keys.optional_flag("attention.head_norms")
        return cls(
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            norm_eps=keys.real("attention.layer_norm_rms_epsilon"),
            context_length=keys.integer("context_length"),
            rope=rope_of(source, keys, rotated, RopeStyle.INTERLEAVED),
            chunk=keys.optional_integer("attention.chunk_size") or DEFAULT_CHUNK,
            period=keys.optional_integer("attention.sliding_window_pattern") or DEFAULT_PERIOD,
            head_norms=experts != EXPERTS_WITHOUT_HEAD_NORMS if head_norms is None else head_norms,
            temperature_scale=keys.optional_real("attention.temperature_scale")
            or TEMPERATURE_SCALE,
            temperature_length=keys.optional_integer("attention.temperature_length")
            or TEMPERATURE_LENGTH,
            mixture_period=keys.integer("interleave_moe_layer_step"),
            experts=experts,
            routing=Routing(1, Scoring.SIGMOID),
        )

    def sees_all(self, layer: int) -> bool:
        return layer % self.period == self.period - 1

    def has_experts(self, layer: int) -> bool:
        return layer % self.mixture_period == self.mixture_period - 1

    def groups(self) -> list[CacheGroup]:
        full = sum(self.sees_all(layer) for layer in range(self.layers))
        shape = self.kv_heads, self.head_dim
        chunk = CacheGroup("chunk", self.layers - full, *shape, self.chunk, chunked=True)
        return [group for group in (chunk, CacheGroup("full", full, *shape)) if group.layers]


def attention(
    g: GraphBuilder, x: Value, config: Llama4Config, layer: int, temperature: Value
) -> Value:
    block = f"blk.{layer}"
    q = linear(g, x, f"{block}.attn_q")
    k = linear(g, x, f"{block}.attn_k")
    v = linear(g, x, f"{block}.attn_v")
    sees_all = config.sees_all(layer)
    if sees_all:
        q = g.scale_rows(q, temperature)
    else:
        q, k = g.rope(q, config.heads, config.rope), g.rope(k, config.kv_heads, config.rope)
        if config.head_norms:
            q = g.rms_norm(q, None, config.norm_eps, config.heads)
            k = g.rms_norm(k, None, config.norm_eps, config.kv_heads)
    mixed = g.attention(
        q,
        k,
        v,
        group="full" if sees_all else "chunk",
        layer=sum(config.sees_all(below) == sees_all for below in range(layer)),
        heads=config.heads,
        scale=1 / math.sqrt(config.head_dim),
    )
    return linear(g, mixed, f"{block}.attn_output")


def experts(g: GraphBuilder, x: Value, config: Llama4Config, block: str) -> Value:
    """The weight of the expert is on its input."""
    mixed = mixture(
        g, x, block, config.experts, config.routing, Activation.SILU, weighted_input=True
    )
    return g.add(mixed, feed_forward(g, x, block, Activation.SILU, suffix="_shexp"))


def decoder_layer(
    g: GraphBuilder, x: Value, config: Llama4Config, layer: int, temperature: Value
) -> Value:
    block = f"blk.{layer}"
    normed = g.rms_norm(x, f"{block}.attn_norm.weight", config.norm_eps)
    x = g.add(x, attention(g, normed, config, layer, temperature))
    normed = g.rms_norm(x, f"{block}.ffn_norm.weight", config.norm_eps)
    if config.has_experts(layer):
        return g.add(x, experts(g, normed, config, block))
    return g.add(x, feed_forward(g, normed, block, Activation.SILU))


def build(source: ModelSource) -> Graph:
    config = Llama4Config.read(source)
    g = GraphBuilder(source)
    for group in config.groups():
        g.cache_group(group)
    temperature = g.temperature(config.temperature_scale, config.temperature_length)
    x = g.embed(EMBEDDING)
    for layer in range(config.layers):
        x = decoder_layer(g, x, config, layer, temperature)
    x = g.rms_norm(g.take_rows(x), "output_norm.weight", config.norm_eps)
    return g.finish(output_logits(g, x), config.context_length)
