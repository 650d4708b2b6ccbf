"""DeepSeek V2 (arXiv 2405.04434), V3 and R1 (2412.19437): latent attention and many small experts.

Keys and values of all heads come from one latent of each token, which with the rotated part of the
keys is all that is cached. Attention runs over the latents, always: the matrix that would make keys
of them is applied to the queries, and the one that would make values to the result (section 2.1.2
of the first paper). To the cache it is a single KV head. GGUF has the two matrices apart and the
first transposed, as they are used here; other files have them as one (`deepseek2_files.py`):
https://github.com/ggml-org/llama.cpp/blob/59b9e36f872df37454c1a01a5dd4ea69ede65832/src/models/deepseek2.cpp
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from invar.graph.builder import GraphBuilder
from invar.graph.graph import Graph
from invar.graph.operations import Activation, CacheGroup, Rope, RopeStyle, Value
from invar.graph.routing import Routing, Scoring
from invar.models.blocks import (
    EMBEDDING,
    feed_forward,
    hidden_size,
    layer_count,
    linear,
    output_logits,
)
from invar.models.deepseek2_files import SCORINGS, head_size
from invar.models.experts import expert_counts, mixture
from invar.models.metadata import ArchitectureKeys, ConfigError, ModelSource
from invar.models.rope import rope_of

GROUP = "latent"
# In published models cos and sin grow by mscale / mscale_all_dim, which is 1; the logits grow by
# the square of mscale_all_dim's own growth (attention_scale).
YARN = {"attention_factor": 1.0}


@dataclass(frozen=True)
class DeepseekConfig:
    layers: int
    heads: int
    latent: int  # dimensions of what keys and values are made of
    rotated: int  # of a key beside it, and of a query
    plain: int  # of a query, that do not rotate
    norm_eps: float
    attention_scale: float
    context_length: int
    rope: Rope
    dense_layers: int  # at the beginning, without experts
    experts: int
    routing: Routing

    @classmethod
    def read(cls, source: ModelSource) -> DeepseekConfig:
        keys = ArchitectureKeys(source.metadata, "deepseek2")
        hidden_size(source, keys)
        rotated = keys.integer("rope.dimension_count")
        head = head_size(keys)
        if rotated % 2 or rotated >= head:
            raise ConfigError(
                f"{keys.full('rope.dimension_count')} is {rotated}, expected an even number below "
                f"the head size of {head} ({keys.full('attention.key_length_mla')})"
            )
        experts, _ = expert_counts(keys)
        return cls(
            layers=layer_count(source, keys),
            heads=keys.integer("attention.head_count"),
            latent=keys.integer("attention.kv_lora_rank"),
            rotated=rotated,
            plain=head - rotated,
            norm_eps=keys.real("attention.layer_norm_rms_epsilon"),
            attention_scale=attention_scale(keys, head),
            context_length=keys.integer("context_length"),
            rope=rope_of(source, keys, rotated, RopeStyle.INTERLEAVED, YARN),
            dense_layers=keys.optional_integer("leading_dense_block_count", least=0) or 0,
            experts=experts,
            routing=read_routing(keys),
        )


def attention_scale(keys: ArchitectureKeys, head: int) -> float:
    """1 / sqrt(head), times the square of what yarn makes of the logits."""
    growth, factor = (
        keys.optional_real(f"rope.scaling.{name}") for name in ("yarn_log_multiplier", "factor")
    )
    grown = 1 + growth * math.log(factor) if growth and factor and factor > 1 else 1.0
    return grown * grown / math.sqrt(head)


def read_routing(keys: ArchitectureKeys) -> Routing:
    """Groups are as good as their best expert, or as their best two where scores are sigmoids."""
    _, used = expert_counts(keys)
    gating = keys.optional_integer("expert_gating_func") or 1
    if gating not in SCORINGS:
        raise ConfigError(
            f"{keys.full('expert_gating_func')} is {gating}, known are 1 (softmax) and 2 (sigmoid)"
        )
    return Routing(
        used,
        SCORINGS[gating],
        normalise=keys.optional_flag("expert_weights_norm") or False,
        scale=keys.optional_real("expert_weights_scale") or 1.0,
        groups=keys.optional_integer("expert_group_count") or 1,
        groups_used=keys.optional_integer("expert_group_used_count") or 1,
        group_best=2 if SCORINGS[gating] is Scoring.SIGMOID else 1,
    )


def queries(g: GraphBuilder, x: Value, config: DeepseekConfig, block: str) -> Value:
    """`[tokens, heads * (plain + rotated)]`, through a narrower layer where the model has one."""
    if f"{block}.attn_q_a.weight" not in g.source.tensors:
        return linear(g, x, f"{block}.attn_q")
    narrow = linear(g, x, f"{block}.attn_q_a")
    normed = g.rms_norm(narrow, f"{block}.attn_q_a_norm.weight", config.norm_eps)
    return linear(g, normed, f"{block}.attn_q_b")


def attention(g: GraphBuilder, x: Value, config: DeepseekConfig, layer: int) -> Value:
    block, heads = f"blk.{layer}", config.heads
    q = queries(g, x, config, block)
    q_plain = g.columns(q, 0, config.plain, heads)
    q_rotated = g.rope(g.columns(q, config.plain, config.rotated, heads), heads, config.rope)
    compressed = linear(g, x, f"{block}.attn_kv_a_mqa")
    latent = g.rms_norm(
        g.columns(compressed, 0, config.latent), f"{block}.attn_kv_a_norm.weight", config.norm_eps
    )
    k_rotated = g.rope(g.columns(compressed, config.latent, config.rotated), 1, config.rope)
    absorbed = g.headwise_linear(q_plain, f"{block}.attn_k_b.weight")
    cached = g.join(latent, k_rotated)
    mixed = g.attention(
        g.join(absorbed, q_rotated, heads),
        cached,
        cached,  # of the result, the part of the latent alone is read
        group=GROUP,
        layer=layer,
        heads=heads,
        scale=config.attention_scale,
    )
    return linear(g, g.headwise_linear(mixed, f"{block}.attn_v_b.weight"), f"{block}.attn_output")


def experts(g: GraphBuilder, x: Value, config: DeepseekConfig, block: str) -> Value:
    mixed = mixture(g, x, block, config.experts, config.routing, Activation.SILU)
    return g.add(mixed, feed_forward(g, x, block, Activation.SILU, suffix="_shexp"))


def decoder_layer(g: GraphBuilder, x: Value, config: DeepseekConfig, layer: int) -> Value:
    block = f"blk.{layer}"
    normed = g.rms_norm(x, f"{block}.attn_norm.weight", config.norm_eps)
    x = g.add(x, attention(g, normed, config, layer))
    normed = g.rms_norm(x, f"{block}.ffn_norm.weight", config.norm_eps)
    if layer < config.dense_layers:
        return g.add(x, feed_forward(g, normed, block, Activation.SILU))
    return g.add(x, experts(g, normed, config, block))


def build(source: ModelSource) -> Graph:
    config = DeepseekConfig.read(source)
    g = GraphBuilder(source)
    g.cache_group(CacheGroup(GROUP, config.layers, 1, config.latent + config.rotated))
    x = g.embed(EMBEDDING)
    for layer in range(config.layers):
        x = decoder_layer(g, x, config, layer)
    x = g.rms_norm(g.take_rows(x), "output_norm.weight", config.norm_eps)
    return g.finish(output_logits(g, x), config.context_length)
