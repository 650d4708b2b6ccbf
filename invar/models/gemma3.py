"""Gemma 3 text models (arXiv 2503.19786): five layers with a window, then one that sees all.

The +1 of the norms is already in the weights of a GGUF file. Defaults of missing keys are those of
https://github.com/ggml-org/llama.cpp/blob/569a0092b98e73bd222490441234144e52afd2ef/src/models/gemma3.cpp
and its `load_hparams`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from invar.graph.graph import Activation, CacheGroup, Graph, GraphBuilder, Rope, RopeStyle, Value
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
from invar.models.metadata import ArchitectureKeys, ModelSource
from invar.models.rope import (
    DEFAULT_BASE,
    LEAST_BASE,
    default_frequencies,
    rope_from_gguf,
    rotated_dimensions,
)

LAYERS_OF_27B = 62


@dataclass(frozen=True)
class Gemma3Config:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    attention_scale: float
    context_length: int
    window: int | None
    window_pattern: int  # every so many layers, one sees all
    global_rope: Rope
    local_rope: Rope
    logit_soft_cap: float | None

    @classmethod
    def from_gguf(cls, source: ModelSource) -> Gemma3Config:
        keys = ArchitectureKeys(source.metadata, "gemma3")
        layers, hidden = layer_count(source, keys), hidden_size(source, keys)
        heads, kv_heads = head_counts(keys, layers)
        head_dim = head_size(source, keys, hidden, heads, kv_heads)
        rotated = rotated_dimensions(keys, head_dim)
        local_base = keys.optional_real("rope.freq_base_swa", LEAST_BASE) or DEFAULT_BASE
        # The scale is 1 / sqrt(query_pre_attn_scalar), which GGUF does not carry: it is the head
        # size in all published models but the 27B.
        scaled_by = hidden // heads if layers == LAYERS_OF_27B else head_dim
        return cls(
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            norm_eps=keys.real("attention.layer_norm_rms_epsilon"),
            attention_scale=keys.optional_real("attention.scale") or 1 / math.sqrt(scaled_by),
            context_length=keys.integer("context_length"),
            window=keys.optional_integer("attention.sliding_window"),
            window_pattern=keys.optional_integer("attention.sliding_window_pattern") or 6,
            global_rope=rope_from_gguf(source, keys, rotated, RopeStyle.HALF),
            local_rope=Rope(default_frequencies(local_base, rotated), RopeStyle.HALF),
            logit_soft_cap=keys.optional_real("final_logit_softcapping"),
        )

    def is_global(self, layer: int) -> bool:
        return self.window is None or layer % self.window_pattern == self.window_pattern - 1

    def groups(self) -> list[CacheGroup]:
        """Layers that see all and layers with a window keep their KV apart."""
        full = sum(self.is_global(layer) for layer in range(self.layers))
        counts = {"full": (full, None), "window": (self.layers - full, self.window)}
        return [
            CacheGroup(name, layers, self.kv_heads, self.head_dim, window)
            for name, (layers, window) in counts.items()
            if layers
        ]


def attention(g: GraphBuilder, x: Value, config: Gemma3Config, layer: int) -> Value:
    block = f"blk.{layer}"
    is_global = config.is_global(layer)
    rope = config.global_rope if is_global else config.local_rope
    q = linear(g, x, f"{block}.attn_q")
    k = linear(g, x, f"{block}.attn_k")
    v = linear(g, x, f"{block}.attn_v")
    q = g.rms_norm(q, f"{block}.attn_q_norm.weight", config.norm_eps, config.heads)
    k = g.rms_norm(k, f"{block}.attn_k_norm.weight", config.norm_eps, config.kv_heads)
    mixed = g.attention(
        g.rope(q, config.heads, rope),
        g.rope(k, config.kv_heads, rope),
        v,
        group="full" if is_global else "window",
        layer=sum(config.is_global(below) == is_global for below in range(layer)),
        heads=config.heads,
        scale=config.attention_scale,
    )
    return linear(g, mixed, f"{block}.attn_output")


def decoder_layer(g: GraphBuilder, x: Value, config: Gemma3Config, layer: int) -> Value:
    block = f"blk.{layer}"
    normed = g.rms_norm(x, f"{block}.attn_norm.weight", config.norm_eps)
    mixed = attention(g, normed, config, layer)
    x = g.add(x, g.rms_norm(mixed, f"{block}.post_attention_norm.weight", config.norm_eps))
    normed = g.rms_norm(x, f"{block}.ffn_norm.weight", config.norm_eps)
    mixed = feed_forward(g, normed, block, Activation.GELU_TANH)
    return g.add(x, g.rms_norm(mixed, f"{block}.post_ffw_norm.weight", config.norm_eps))


def build(source: ModelSource) -> Graph:
    config = Gemma3Config.from_gguf(source)
    g = GraphBuilder(source)
    for group in config.groups():
        g.cache_group(group)
    # In double here, in fp32 where it is applied; `transformers` rounds it to the model's dtype.
    x = g.scale(g.embed(EMBEDDING), math.sqrt(config.hidden))
    for layer in range(config.layers):
        x = decoder_layer(g, x, config, layer)
    x = g.rms_norm(g.take_rows(x), "output_norm.weight", config.norm_eps)
    logits = output_logits(g, x)
    if config.logit_soft_cap is not None:
        logits = g.soft_cap(logits, config.logit_soft_cap)
    return g.finish(logits, config.context_length)
