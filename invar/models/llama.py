"""Llama (arXiv 2302.13971, 2407.21783), and with it SmolLM, Mistral, Mixtral and TinyLlama.

GGUF stores the rows of q and k so that the rotated pairs are neighbours; see `permute` in
https://github.com/ggml-org/llama.cpp/blob/7bca1fd9ca2a681b0182e16f24f832b7be1942af/conversion/llama.py
"""

from __future__ import annotations

from invar.graph.builder import GraphBuilder
from invar.graph.graph import Graph
from invar.graph.operations import Activation, RopeStyle, Value
from invar.graph.routing import Routing, Scoring
from invar.models.blocks import EMBEDDING, feed_forward, linear, output_logits
from invar.models.decoder import DecoderConfig, Place, attend, cache_groups, projections
from invar.models.experts import expert_counts, mixture
from invar.models.hf import DECODER_KEYS, EXPERT_KEYS, INTERLEAVED_NAMES, HFFamily
from invar.models.metadata import ArchitectureKeys, ModelSource

HF = HFFamily(
    architecture="llama",
    keys={**DECODER_KEYS, **EXPERT_KEYS, "attention.sliding_window": "sliding_window"},
    names={
        **INTERLEAVED_NAMES,
        "model.layers.{}.block_sparse_moe.gate": "blk.{}.ffn_gate_inp",
        "model.layers.{}.block_sparse_moe.experts.{}.w1": "blk.{}.ffn_gate_exps",
        "model.layers.{}.block_sparse_moe.experts.{}.w3": "blk.{}.ffn_up_exps",
        "model.layers.{}.block_sparse_moe.experts.{}.w2": "blk.{}.ffn_down_exps",
    },
)


def attention(g: GraphBuilder, x: Value, config: DecoderConfig, block: str, place: Place) -> Value:
    q, k, v = projections(g, x, block)
    mixed = attend(g, q, k, v, config, place, rope=config.rope)
    return linear(g, mixed, f"{block}.attn_output")


def experts(g: GraphBuilder, x: Value, keys: ArchitectureKeys, block: str) -> Value:
    """Mixtral's (arXiv 2401.04088, section 2.1): softmax over the logits of the chosen ones."""
    count, used = expert_counts(keys)
    routing = Routing(used, Scoring.SOFTMAX_OF_CHOSEN)
    return mixture(g, x, block, count, routing, Activation.SILU)


def build(source: ModelSource) -> Graph:
    keys = ArchitectureKeys(source.metadata, "llama")
    config = DecoderConfig.read(source, keys, RopeStyle.INTERLEAVED)
    window = keys.optional_integer("attention.sliding_window")  # Mistral 7B v0.1
    is_mixture = bool(keys.optional_integer("expert_count", least=0))
    g = GraphBuilder(source)
    x = g.embed(EMBEDDING)
    for layer, place in enumerate(cache_groups(g, config, [window] * config.layers)):
        block = f"blk.{layer}"
        normed = g.rms_norm(x, f"{block}.attn_norm.weight", config.norm_eps)
        x = g.add(x, attention(g, normed, config, block, place))
        normed = g.rms_norm(x, f"{block}.ffn_norm.weight", config.norm_eps)
        if is_mixture:
            x = g.add(x, experts(g, normed, keys, block))
        else:
            x = g.add(x, feed_forward(g, normed, block, Activation.SILU))
    x = g.rms_norm(g.take_rows(x), "output_norm.weight", config.norm_eps)
    return g.finish(output_logits(g, x), config.context_length)
