"""Llama (arXiv 2302.13971, 2407.21783), and with it SmolLM, Mistral, Mixtral and TinyLlama.

GGUF stores the rows of q and k so that the rotated pairs are neighbours; see `permute` in
https://github.com/ggml-org/llama.cpp/blob/7bca1fd9ca2a681b0182e16f24f832b7be1942af/conversion/llama.py
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
from invar.models.hf import DECODER_KEYS, EXPERT_KEYS, INTERLEAVED_NAMES, HFFamily
from invar.models.metadata import ArchitectureKeys, ModelSource
from invar.models.rope import rope_of, rotated_dimensions

HF = HFFamily(
    architecture="llama",
    model_types=("llama", "mistral", "mixtral"),
    keys={**DECODER_KEYS, **EXPERT_KEYS, "attention.sliding_window": "sliding_window"},
    names={
        **INTERLEAVED_NAMES,
        "model.layers.{}.block_sparse_moe.gate": "blk.{}.ffn_gate_inp",
        "model.layers.{}.block_sparse_moe.experts.{}.w1": "blk.{}.ffn_gate_exps",
        "model.layers.{}.block_sparse_moe.experts.{}.w3": "blk.{}.ffn_up_exps",
        "model.layers.{}.block_sparse_moe.experts.{}.w2": "blk.{}.ffn_down_exps",
    },
)


@dataclass(frozen=True)
class LlamaConfig:
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    attention_scale: float
    context_length: int
    rope: Rope
    window: int | None  # Mistral 7B v0.1: tokens a query sees
    experts: int  # Mixtral: of every layer; 0: no mixture
    experts_used: int

    @classmethod
    def read(cls, source: ModelSource) -> LlamaConfig:
        keys = ArchitectureKeys(source.metadata, "llama")
        mixture_of = keys.optional_integer("expert_count", least=0)
        experts, experts_used = expert_counts(keys) if mixture_of else (0, 0)
        layers, hidden = layer_count(source, keys), hidden_size(source, keys)
        heads, kv_heads = head_counts(keys, layers)
        head_dim = head_size(source, keys, hidden, heads, kv_heads)
        rotated = rotated_dimensions(keys, head_dim)
        return cls(
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            norm_eps=keys.real("attention.layer_norm_rms_epsilon"),
            attention_scale=keys.optional_real("attention.scale") or 1 / math.sqrt(head_dim),
            context_length=keys.integer("context_length"),
            rope=rope_of(source, keys, rotated, RopeStyle.INTERLEAVED),
            window=keys.optional_integer("attention.sliding_window"),
            experts=experts,
            experts_used=experts_used,
        )

    @property
    def group(self) -> str:
        return "full" if self.window is None else "window"


def attention(g: GraphBuilder, x: Value, config: LlamaConfig, layer: int) -> Value:
    block = f"blk.{layer}"
    q = g.rope(linear(g, x, f"{block}.attn_q"), config.heads, config.rope)
    k = g.rope(linear(g, x, f"{block}.attn_k"), config.kv_heads, config.rope)
    v = linear(g, x, f"{block}.attn_v")
    mixed = g.attention(
        q,
        k,
        v,
        group=config.group,
        layer=layer,
        heads=config.heads,
        scale=config.attention_scale,
    )
    return linear(g, mixed, f"{block}.attn_output")


def decoder_layer(g: GraphBuilder, x: Value, config: LlamaConfig, layer: int) -> Value:
    block = f"blk.{layer}"
    normed = g.rms_norm(x, f"{block}.attn_norm.weight", config.norm_eps)
    x = g.add(x, attention(g, normed, config, layer))
    normed = g.rms_norm(x, f"{block}.ffn_norm.weight", config.norm_eps)
    if not config.experts:
        return g.add(x, feed_forward(g, normed, block, Activation.SILU))
    # arXiv 2401.04088, section 2.1: softmax over the logits of the chosen experts.
    routing = Routing(config.experts_used, Scoring.SOFTMAX_OF_CHOSEN)
    return g.add(x, mixture(g, normed, block, config.experts, routing, Activation.SILU))


def build(source: ModelSource) -> Graph:
    config = LlamaConfig.read(source)
    g = GraphBuilder(source)
    g.cache_group(
        CacheGroup(config.group, config.layers, config.kv_heads, config.head_dim, config.window)
    )
    x = g.embed(EMBEDDING)
    for layer in range(config.layers):
        x = decoder_layer(g, x, config, layer)
    x = g.rms_norm(g.take_rows(x), "output_norm.weight", config.norm_eps)
    return g.finish(output_logits(g, x), config.context_length)
