"""Mixtures of Qwen 2 (arXiv 2407.10671, section 2.2.2) and Qwen 3 (2505.09388).

They differ in the norms of q and k (Qwen 3), the biases of q, k and v (Qwen 2), the expert that all
tokens share behind a gate of its own (Qwen 2), and whether the weights of a token add up to 1
(Qwen 3, unless the model says otherwise).
https://github.com/ggml-org/llama.cpp/blob/623ac8d30a54433969bdd3e54d4487c3608d047c/src/models/qwen2moe.cpp
https://github.com/ggml-org/llama.cpp/blob/069be0ae22f391c64e26e8da4c7da0143ede8cf3/src/models/qwen3moe.cpp
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

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
from invar.models.hf import (
    DECODER_KEYS,
    DECODER_NAMES,
    EXPERT_KEYS,
    EXPERT_NAMES,
    Config,
    HFFamily,
    Placed,
)
from invar.models.metadata import ArchitectureKeys, ConfigError, ModelSource
from invar.models.rope import rope_of, rotated_dimensions
from invar.weights.hf_directory import CONFIG


def norm_topk_prob(config: Config) -> Any:
    return config.get("norm_topk_prob", False)


def use_sliding_window(config: Config) -> None:
    if config.get("use_sliding_window"):
        raise ConfigError(f"{CONFIG}: use_sliding_window is not supported for mixtures of Qwen yet")


KEYS = {
    **DECODER_KEYS,
    **EXPERT_KEYS,
    "expert_weights_norm": norm_topk_prob,
    "attention.sliding_window": use_sliding_window,
}
HF_QWEN2 = HFFamily(
    architecture="qwen2moe",
    model_types=("qwen2_moe",),
    keys=KEYS,
    names={
        **DECODER_NAMES,
        **EXPERT_NAMES,
        "model.layers.{}.mlp.shared_expert.gate_proj": "blk.{}.ffn_gate_shexp",
        "model.layers.{}.mlp.shared_expert.up_proj": "blk.{}.ffn_up_shexp",
        "model.layers.{}.mlp.shared_expert.down_proj": "blk.{}.ffn_down_shexp",
        "model.layers.{}.mlp.shared_expert_gate": Placed("blk.{}.ffn_gate_inp_shexp", vector=True),
    },
)
HF_QWEN3 = HFFamily(
    architecture="qwen3moe",
    model_types=("qwen3_moe",),
    keys=KEYS,
    names={**DECODER_NAMES, **EXPERT_NAMES},
)


@dataclass(frozen=True)
class QwenMoeConfig:
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    context_length: int
    rope: Rope
    head_norms: bool
    shared_expert: bool
    experts: int
    routing: Routing

    @classmethod
    def read(cls, source: ModelSource, architecture: str) -> QwenMoeConfig:
        keys = ArchitectureKeys(source.metadata, architecture)
        is_qwen3 = architecture == "qwen3moe"
        layers, hidden = layer_count(source, keys), hidden_size(source, keys)
        heads, kv_heads = head_counts(keys, layers)
        head_dim = head_size(source, keys, hidden, heads, kv_heads)
        rotated = rotated_dimensions(keys, head_dim)
        experts, used = expert_counts(keys)
        normalise = keys.optional_flag("expert_weights_norm")
        return cls(
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            norm_eps=keys.real("attention.layer_norm_rms_epsilon"),
            context_length=keys.integer("context_length"),
            rope=rope_of(source, keys, rotated, RopeStyle.HALF),
            head_norms=is_qwen3,
            shared_expert=not is_qwen3,
            experts=experts,
            routing=Routing(used, Scoring.SOFTMAX, is_qwen3 if normalise is None else normalise),
        )


def attention(g: GraphBuilder, x: Value, config: QwenMoeConfig, layer: int) -> Value:
    block = f"blk.{layer}"
    q = linear(g, x, f"{block}.attn_q")
    k = linear(g, x, f"{block}.attn_k")
    v = linear(g, x, f"{block}.attn_v")
    if config.head_norms:
        q = g.rms_norm(q, f"{block}.attn_q_norm.weight", config.norm_eps, config.heads)
        k = g.rms_norm(k, f"{block}.attn_k_norm.weight", config.norm_eps, config.kv_heads)
    mixed = g.attention(
        g.rope(q, config.heads, config.rope),
        g.rope(k, config.kv_heads, config.rope),
        v,
        group="full",
        layer=layer,
        heads=config.heads,
        scale=1 / math.sqrt(config.head_dim),
    )
    return linear(g, mixed, f"{block}.attn_output")


def experts(g: GraphBuilder, x: Value, config: QwenMoeConfig, block: str) -> Value:
    if f"{block}.ffn_gate_inp.weight" not in g.source.tensors:
        return feed_forward(g, x, block, Activation.SILU)  # a layer without experts
    mixed = mixture(g, x, block, config.experts, config.routing, Activation.SILU)
    if not config.shared_expert:
        return mixed
    shared = feed_forward(g, x, block, Activation.SILU, suffix="_shexp")
    gate = g.sigmoid(g.linear(x, f"{block}.ffn_gate_inp_shexp.weight"))
    return g.add(mixed, g.scale_rows(shared, gate))


def decoder_layer(g: GraphBuilder, x: Value, config: QwenMoeConfig, layer: int) -> Value:
    block = f"blk.{layer}"
    normed = g.rms_norm(x, f"{block}.attn_norm.weight", config.norm_eps)
    x = g.add(x, attention(g, normed, config, layer))
    normed = g.rms_norm(x, f"{block}.ffn_norm.weight", config.norm_eps)
    return g.add(x, experts(g, normed, config, block))


def build_qwen2(source: ModelSource) -> Graph:
    return build(source, "qwen2moe")


def build_qwen3(source: ModelSource) -> Graph:
    return build(source, "qwen3moe")


def build(source: ModelSource, architecture: str) -> Graph:
    config = QwenMoeConfig.read(source, architecture)
    g = GraphBuilder(source)
    g.cache_group(CacheGroup("full", config.layers, config.kv_heads, config.head_dim))
    x = g.embed(EMBEDDING)
    for layer in range(config.layers):
        x = decoder_layer(g, x, config, layer)
    x = g.rms_norm(g.take_rows(x), "output_norm.weight", config.norm_eps)
    return g.finish(output_logits(g, x), config.context_length)
