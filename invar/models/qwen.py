"""Qwen 2 and 2.5 (arXiv 2407.10671, 2412.15115) and Qwen 3 (2505.09388), without experts.

Qwen 2 has biases at q, k and v, Qwen 3 norms of q and k instead.
"""

from __future__ import annotations

from typing import Any

from invar.graph.builder import GraphBuilder
from invar.graph.graph import Graph
from invar.graph.operations import Activation, RopeStyle, Value
from invar.models.blocks import EMBEDDING, feed_forward, linear, output_logits
from invar.models.decoder import (
    DecoderConfig,
    Place,
    attend,
    cache_groups,
    head_norms,
    projections,
)
from invar.models.hf import DECODER_KEYS, DECODER_NAMES, Config, HFFamily
from invar.models.metadata import ArchitectureKeys, ConfigError, ModelSource


def window(config: Config) -> Any:
    """`sliding_window` counts only where `use_sliding_window` says so, from a layer on."""
    if not config.get("use_sliding_window"):
        return None
    if config.get("max_window_layers") not in (0, None):
        raise ConfigError(
            "config.json: use_sliding_window with max_window_layers above 0 is not supported"
        )
    return config.get("sliding_window")


KEYS = {**DECODER_KEYS, "attention.sliding_window": window}
QWEN2 = HFFamily("qwen2", KEYS, DECODER_NAMES)
QWEN3 = HFFamily("qwen3", KEYS, DECODER_NAMES)


def attention(
    g: GraphBuilder, x: Value, config: DecoderConfig, block: str, place: Place, norms: bool
) -> Value:
    q, k, v = projections(g, x, block)
    if norms:
        q, k = head_norms(g, q, k, config, block)
    mixed = attend(g, q, k, v, config, place, rope=config.rope)
    return linear(g, mixed, f"{block}.attn_output")


def build_qwen2(source: ModelSource) -> Graph:
    return build(source, "qwen2", norms=False)


def build_qwen3(source: ModelSource) -> Graph:
    return build(source, "qwen3", norms=True)


def build(source: ModelSource, architecture: str, norms: bool) -> Graph:
    keys = ArchitectureKeys(source.metadata, architecture)
    config = DecoderConfig.read(source, keys, RopeStyle.HALF)
    g = GraphBuilder(source)
    seen = keys.optional_integer("attention.sliding_window")
    places = cache_groups(g, config, [seen] * config.layers)
    x = g.embed(EMBEDDING)
    for layer, place in enumerate(places):
        block = f"blk.{layer}"
        normed = g.rms_norm(x, f"{block}.attn_norm.weight", config.norm_eps)
        x = g.add(x, attention(g, normed, config, block, place, norms))
        normed = g.rms_norm(x, f"{block}.ffn_norm.weight", config.norm_eps)
        x = g.add(x, feed_forward(g, normed, block, Activation.SILU))
    x = g.rms_norm(g.take_rows(x), "output_norm.weight", config.norm_eps)
    return g.finish(output_logits(g, x), config.context_length)
