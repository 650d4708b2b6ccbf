"""Mixtures of Qwen 2 (arXiv 2407.10671, section 2.2.2) and Qwen 3 (2505.09388).

They differ in the norms of q and k (Qwen 3), the biases of q, k and v (Qwen 2), the expert that all
tokens share behind a gate of its own (Qwen 2), and whether the weights of a token add up to 1
(Qwen 3, unless the model says otherwise).
https://github.com/ggml-org/llama.cpp/blob/623ac8d30a54433969bdd3e54d4487c3608d047c/src/models/qwen2moe.cpp
https://github.com/ggml-org/llama.cpp/blob/069be0ae22f391c64e26e8da4c7da0143ede8cf3/src/models/qwen3moe.cpp
"""

from __future__ import annotations

from typing import Any

from invar.graph.builder import GraphBuilder
from invar.graph.graph import Graph
from invar.graph.operations import Activation, RopeStyle, Value
from invar.graph.routing import Routing, Scoring
from invar.models.blocks import EMBEDDING, feed_forward, output_logits
from invar.models.decoder import DecoderConfig, cache_groups
from invar.models.experts import expert_counts, mixture
from invar.models.hf import (
    DECODER_KEYS,
    DECODER_NAMES,
    EXPERT_KEYS,
    EXPERT_NAMES,
    Config,
    HFFamily,
)
from invar.models.metadata import ArchitectureKeys, ConfigError, ModelSource
from invar.models.placed import Placed
from invar.models.qwen import attention
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
    keys=KEYS,
    names={**DECODER_NAMES, **EXPERT_NAMES},
)


def routing_of(keys: ArchitectureKeys, normalise: bool) -> tuple[int, Routing]:
    """Experts of a layer, and how a token comes to its own."""
    experts, used = expert_counts(keys)
    told = keys.optional_flag("expert_weights_norm")
    return experts, Routing(used, Scoring.SOFTMAX, normalise if told is None else told)


def experts(
    g: GraphBuilder, x: Value, block: str, count: int, routing: Routing, is_shared: bool
) -> Value:
    """is_shared: beside them one that every token goes through."""
    if f"{block}.ffn_gate_inp.weight" not in g.source.tensors:
        return feed_forward(g, x, block, Activation.SILU)  # a layer without experts
    mixed = mixture(g, x, block, count, routing, Activation.SILU)
    if not is_shared:
        return mixed
    shared = feed_forward(g, x, block, Activation.SILU, suffix="_shexp")
    gate = g.sigmoid(g.linear(x, f"{block}.ffn_gate_inp_shexp.weight"))
    return g.add(mixed, g.scale_rows(shared, gate))


def build_qwen2(source: ModelSource) -> Graph:
    return build(source, "qwen2moe", is_qwen3=False)


def build_qwen3(source: ModelSource) -> Graph:
    return build(source, "qwen3moe", is_qwen3=True)


def build(source: ModelSource, architecture: str, is_qwen3: bool) -> Graph:
    keys = ArchitectureKeys(source.metadata, architecture)
    config = DecoderConfig.read(source, keys, RopeStyle.HALF)
    count, routing = routing_of(keys, normalise=is_qwen3)
    g = GraphBuilder(source)
    x = g.embed(EMBEDDING)
    for layer, place in enumerate(cache_groups(g, config, [None] * config.layers)):
        block = f"blk.{layer}"
        normed = g.rms_norm(x, f"{block}.attn_norm.weight", config.norm_eps)
        x = g.add(x, attention(g, normed, config, block, place, norms=is_qwen3))
        normed = g.rms_norm(x, f"{block}.ffn_norm.weight", config.norm_eps)
        x = g.add(x, experts(g, normed, block, count, routing, is_shared=not is_qwen3))
    x = g.rms_norm(g.take_rows(x), "output_norm.weight", config.norm_eps)
    return g.finish(output_logits(g, x), config.context_length)
