"""What nearly every decoder says of itself, and the parts of a layer that go with it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from invar.graph.builder import GraphBuilder
from invar.graph.operations import Activation, CacheGroup, Rope, RopeStyle, Value
from invar.models.blocks import (
    feed_forward,
    head_counts,
    head_size,
    hidden_size,
    layer_count,
    linear,
)
from invar.models.metadata import ArchitectureKeys, ModelSource
from invar.models.rope import rope_of, rotated_dimensions

RMS_EPS, LAYER_EPS = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"


@dataclass(frozen=True)
class DecoderConfig:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    attention_scale: float
    context_length: int
    rope: Rope

    @classmethod
    def read(
        cls,
        source: ModelSource,
        keys: ArchitectureKeys,
        style: RopeStyle,
        yarn: Mapping[str, Any] = MappingProxyType({}),
        eps: str = RMS_EPS,
    ) -> DecoderConfig:
        """yarn: as `rope_of` has it. eps: the key of what norms add to the mean square."""
        layers, hidden = layer_count(source, keys), hidden_size(source, keys)
        heads, kv_heads = head_counts(keys, layers)
        head_dim = head_size(source, keys, hidden, heads, kv_heads)
        rotated = rotated_dimensions(keys, head_dim)
        return cls(
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            norm_eps=keys.real(eps),
            attention_scale=keys.optional_real("attention.scale") or 1 / math.sqrt(head_dim),
            context_length=keys.integer("context_length"),
            rope=rope_of(source, keys, rotated, style, yarn),
        )


@dataclass(frozen=True)
class Place:
    """Where a layer keeps its K and V."""

    group: str
    layer: int  # inside the group


def cache_groups(
    g: GraphBuilder,
    config: DecoderConfig,
    windows: Sequence[int | None],
    *,
    chunked: bool = False,
) -> list[Place]:
    """Declares a group for the layers with a window and one for those that see all.

    windows: of each layer, all of the same size. chunked: they do not slide, but follow each other.
    Returns the place of each layer.
    """
    kinds = ["full" if window is None else "window" for window in windows]
    for name in sorted(set(kinds)):
        window = windows[kinds.index(name)]
        shape = kinds.count(name), config.kv_heads, config.head_dim
        g.cache_group(CacheGroup(name, *shape, window, chunked=chunked and window is not None))
    return [Place(kind, kinds[:layer].count(kind)) for layer, kind in enumerate(kinds)]


def projections(g: GraphBuilder, x: Value, block: str) -> tuple[Value, Value, Value]:
    """q, k and v, with their biases if the model has some."""
    q, k, v = (linear(g, x, f"{block}.attn_{part}") for part in "qkv")
    return q, k, v


def head_norms(
    g: GraphBuilder, q: Value, k: Value, config: DecoderConfig, block: str
) -> tuple[Value, Value]:
    """q and k, every head normalised."""
    return (
        g.rms_norm(q, f"{block}.attn_q_norm.weight", config.norm_eps, config.heads),
        g.rms_norm(k, f"{block}.attn_k_norm.weight", config.norm_eps, config.kv_heads),
    )


def attend(
    g: GraphBuilder,
    q: Value,
    k: Value,
    v: Value,
    config: DecoderConfig,
    place: Place,
    *,
    rope: Rope | None,
    soft_cap: float | None = None,
    sinks: str | None = None,
) -> Value:
    """Rope (none: positions are left out, or in), and attention."""
    if rope is not None:
        q, k = g.rope(q, config.heads, rope), g.rope(k, config.kv_heads, rope)
    return g.attention(
        q,
        k,
        v,
        group=place.group,
        layer=place.layer,
        heads=config.heads,
        scale=config.attention_scale,
        soft_cap=soft_cap,
        sinks=sinks,
    )


def pre_norm_block(
    g: GraphBuilder,
    x: Value,
    config: DecoderConfig,
    block: str,
    place: Place,
    *,
    activation: Activation,
    rope: Rope | None,
) -> Value:
    """Attention and a gated feed-forward, each behind a norm and added to what went in.

    x: `[tokens, hidden]`, as is the result.
    """
    normed = g.rms_norm(x, f"{block}.attn_norm.weight", config.norm_eps)
    q, k, v = projections(g, normed, block)
    mixed = attend(g, q, k, v, config, place, rope=rope)
    x = g.add(x, linear(g, mixed, f"{block}.attn_output"))
    normed = g.rms_norm(x, f"{block}.ffn_norm.weight", config.norm_eps)
    return g.add(x, feed_forward(g, normed, block, activation))
