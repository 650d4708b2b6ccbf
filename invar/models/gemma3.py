"""Gemma 3 text models (arXiv 2503.19786): five layers with a window, then one that sees all.

The +1 of the norms is already in the weights of a GGUF file. Defaults of missing keys are those of
https://github.com/ggml-org/llama.cpp/blob/569a0092b98e73bd222490441234144e52afd2ef/src/models/gemma3.cpp
and its `load_hparams`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

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
from invar.models.hf import (
    DECODER_KEYS,
    DECODER_NAMES,
    Config,
    HFFamily,
    Placed,
    rope_scaling,
    rope_theta,
)
from invar.models.metadata import ArchitectureKeys, ConfigError, ModelSource
from invar.models.rope import (
    DEFAULT_BASE,
    LEAST_BASE,
    default_frequencies,
    rope_of,
    rotated_dimensions,
)

LAYERS_OF_27B = 62
FULL, SLIDING = "full_attention", "sliding_attention"


def window_pattern(config: Config) -> Any:
    """Every so many layers, one sees all: told by the kind of each layer, or by the number."""
    kinds = config.get("layer_types")
    if not isinstance(kinds, list) or FULL not in kinds:
        return config.get("sliding_window_pattern", config.get("_sliding_window_pattern"))
    pattern = kinds.index(FULL) + 1
    regular = [FULL if (n + 1) % pattern == 0 else SLIDING for n in range(len(kinds))]
    if kinds != regular:
        raise ConfigError(f"config.json: layer_types are not one {FULL} every {pattern} layers")
    return pattern


def attention_scale(config: Config) -> Any:
    scalar = config.get("query_pre_attn_scalar")
    return 1 / math.sqrt(scalar) if isinstance(scalar, int | float) and scalar > 0 else scalar


def local_base(config: Config) -> Any:
    return config.get("rope_local_base_freq") or rope_theta(config, SLIDING)


def from_one(name: str) -> Placed:
    """Norms are stored as their distance from 1."""
    return Placed(name, plus=1.0)


HF = HFFamily(
    architecture="gemma3",
    model_types=("gemma3_text",),
    keys={
        **DECODER_KEYS,
        "context_length": "max_position_embeddings",  # with scaling: the reference multiplies none
        "attention.scale": attention_scale,
        "attention.sliding_window": "sliding_window",
        "attention.sliding_window_pattern": window_pattern,
        "final_logit_softcapping": "final_logit_softcapping",
        "rope.freq_base": lambda config: rope_theta(config, FULL),
        "rope.freq_base_swa": local_base,
        "rope.scaling": lambda config: rope_scaling(config, FULL),
    },
    names={
        **DECODER_NAMES,
        "model.norm": from_one("output_norm"),
        "model.layers.{}.input_layernorm": from_one("blk.{}.attn_norm"),
        "model.layers.{}.self_attn.q_norm": from_one("blk.{}.attn_q_norm"),
        "model.layers.{}.self_attn.k_norm": from_one("blk.{}.attn_k_norm"),
        "model.layers.{}.post_attention_layernorm": from_one("blk.{}.post_attention_norm"),
        "model.layers.{}.pre_feedforward_layernorm": from_one("blk.{}.ffn_norm"),
        "model.layers.{}.post_feedforward_layernorm": from_one("blk.{}.post_ffw_norm"),
    },
)


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
    def read(cls, source: ModelSource) -> Gemma3Config:
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
            global_rope=rope_of(source, keys, rotated, RopeStyle.HALF),
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
    config = Gemma3Config.read(source)
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
