"""The text side of Llama 4: chunked attention, layers without positions, one expert a token.

Every fourth layer has no rope, sees everything, and scales its queries with the position; the
others see their own chunk of the sequence. What a GGUF file does not say are constants of
https://github.com/ggml-org/llama.cpp/blob/8a5c4e03d11bbcb157cbf05b9cd2968f34a55969/src/models/llama4.cpp
The rest is as in
https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/llama4/modeling_llama4.py

A directory is of the text model, or of the one that sees too, of which the language model is run.
Its experts are stored as [in, out], gate before up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from invar.graph.builder import GraphBuilder
from invar.graph.graph import Graph
from invar.graph.operations import Activation, RopeStyle, Value
from invar.graph.routing import Routing, Scoring
from invar.models.blocks import EMBEDDING, feed_forward, linear, output_logits
from invar.models.decoder import DecoderConfig, Place, attend, cache_groups, projections
from invar.models.experts import expert_counts, mixture
from invar.models.hf import DECODER_KEYS, DECODER_NAMES, EXPERT_KEYS, Config, HFFamily
from invar.models.metadata import ArchitectureKeys, ConfigError, ModelSource
from invar.models.placed import Placed, part
from invar.weights.hf_directory import CONFIG

DEFAULT_CHUNK = 8192
DEFAULT_PERIOD = 4  # every so many layers, one sees all
TEMPERATURE_SCALE, TEMPERATURE_LENGTH = 0.1, 8192
EXPERTS_WITHOUT_HEAD_NORMS = 128  # Maverick


def regular_period(config: Config, given: Sequence[int], period: object, what: str) -> object:
    """The period in which layers stand out, the last of each; given: those that do."""
    layers = config.get("num_hidden_layers")
    if not isinstance(period, int) or period < 1 or not isinstance(layers, int):
        return period
    # No more than are given: how many layers there are is not checked yet.
    last = islice(range(period - 1, layers, period), len(given) + 1)
    if list(given) != list(last):
        raise ConfigError(f"{CONFIG}: {what} are not the last of every {period} layers")
    return period


def no_rope_period(config: Config) -> object:
    ropes = config.get("no_rope_layers")  # 1: with rope, in spite of the name
    period = config.get("no_rope_layer_interval")
    if not isinstance(ropes, list) or not ropes:
        return period
    without = [layer for layer, rope in enumerate(ropes) if not rope]
    if period is None and without:
        period = without[0] + 1
    return regular_period(config, without, period, "no_rope_layers")


def mixture_period(config: Config) -> object:
    layers, period = config.get("moe_layers"), config.get("interleave_moe_layer_step", 1)
    if not isinstance(layers, list):
        return period
    return regular_period(config, layers, period, "moe_layers")


def temperature_scale(config: Config) -> object:
    if not config.get("attn_temperature_tuning", True):
        raise ConfigError(f"{CONFIG}: attn_temperature_tuning is off, which is not supported")
    return config.get("attn_scale")


MIXTURE = "model.layers.{}.feed_forward"
HF = HFFamily(
    architecture="llama4",
    keys={
        **DECODER_KEYS,
        **EXPERT_KEYS,
        "feed_forward_length": "intermediate_size_mlp",
        "interleave_moe_layer_step": mixture_period,
        "attention.chunk_size": "attention_chunk_size",
        "attention.sliding_window_pattern": no_rope_period,
        "attention.head_norms": "use_qk_norm",
        "attention.temperature_scale": temperature_scale,
        "attention.temperature_length": "floor_scale",
    },
    names={
        **DECODER_NAMES,
        f"{MIXTURE}.gate_proj": "blk.{}.ffn_gate",
        f"{MIXTURE}.up_proj": "blk.{}.ffn_up",
        f"{MIXTURE}.down_proj": "blk.{}.ffn_down",
        f"{MIXTURE}.router": "blk.{}.ffn_gate_inp",
        f"{MIXTURE}.shared_expert.gate_proj": "blk.{}.ffn_gate_shexp",
        f"{MIXTURE}.shared_expert.up_proj": "blk.{}.ffn_up_shexp",
        f"{MIXTURE}.shared_expert.down_proj": "blk.{}.ffn_down_shexp",
        f"{MIXTURE}.experts.gate_up_proj": (
            Placed("blk.{}.ffn_gate_exps.weight", transposed=True, rows=part(0, 2)),
            Placed("blk.{}.ffn_up_exps.weight", transposed=True, rows=part(1, 2)),
        ),
        f"{MIXTURE}.experts.down_proj": Placed("blk.{}.ffn_down_exps.weight", transposed=True),
    },
)


@dataclass(frozen=True)
class Llama4Config:
    decoder: DecoderConfig
    chunk: int
    period: int
    head_norms: bool
    temperature_scale: float
    temperature_length: int
    mixture_period: int  # every so many layers, one has experts
    experts: int

    @classmethod
    def read(cls, source: ModelSource) -> Llama4Config:
        keys = ArchitectureKeys(source.metadata, "llama4")
        experts, used = expert_counts(keys)
        if used != 1:
            raise ConfigError(f"{keys.full('expert_used_count')} is {used}; Llama 4 uses 1")
        head_norms = keys.optional_flag("attention.head_norms")
        return cls(
            decoder=DecoderConfig.read(source, keys, RopeStyle.INTERLEAVED),
            chunk=keys.optional_integer("attention.chunk_size") or DEFAULT_CHUNK,
            period=keys.optional_integer("attention.sliding_window_pattern") or DEFAULT_PERIOD,
            head_norms=experts != EXPERTS_WITHOUT_HEAD_NORMS if head_norms is None else head_norms,
            temperature_scale=keys.optional_real("attention.temperature_scale")
            or TEMPERATURE_SCALE,
            temperature_length=keys.optional_integer("attention.temperature_length")
            or TEMPERATURE_LENGTH,
            mixture_period=keys.integer("interleave_moe_layer_step"),
            experts=experts,
        )

    def sees_all(self, layer: int) -> bool:
        return layer % self.period == self.period - 1

    def has_experts(self, layer: int) -> bool:
        return layer % self.mixture_period == self.mixture_period - 1


def attention(
    g: GraphBuilder, x: Value, llama: Llama4Config, layer: int, place: Place, temperature: Value
) -> Value:
    block, config = f"blk.{layer}", llama.decoder
    q, k, v = projections(g, x, block)
    if llama.sees_all(layer):
        q = g.scale_rows(q, temperature)
    else:
        q, k = g.rope(q, config.heads, config.rope), g.rope(k, config.kv_heads, config.rope)
        if llama.head_norms:
            q = g.rms_norm(q, None, config.norm_eps, config.heads)
            k = g.rms_norm(k, None, config.norm_eps, config.kv_heads)
    mixed = attend(g, q, k, v, config, place, rope=None)
    return linear(g, mixed, f"{block}.attn_output")


def experts(g: GraphBuilder, x: Value, count: int, block: str) -> Value:
    """The weight of the expert is on its input."""
    routing = Routing(1, Scoring.SIGMOID)
    mixed = mixture(g, x, block, count, routing, Activation.SILU, weighted_input=True)
    return g.add(mixed, feed_forward(g, x, block, Activation.SILU, suffix="_shexp"))


def build(source: ModelSource) -> Graph:
    llama = Llama4Config.read(source)
    config = llama.decoder
    g = GraphBuilder(source)
    windows = [None if llama.sees_all(n) else llama.chunk for n in range(config.layers)]
    places = cache_groups(g, config, windows, chunked=True)
    temperature = g.temperature(llama.temperature_scale, llama.temperature_length)
    x = g.embed(EMBEDDING)
    for layer, place in enumerate(places):
        block = f"blk.{layer}"
        normed = g.rms_norm(x, f"{block}.attn_norm.weight", config.norm_eps)
        x = g.add(x, attention(g, normed, llama, layer, place, temperature))
        normed = g.rms_norm(x, f"{block}.ffn_norm.weight", config.norm_eps)
        if llama.has_experts(layer):
            x = g.add(x, experts(g, normed, llama.experts, block))
        else:
            x = g.add(x, feed_forward(g, normed, block, Activation.SILU))
    x = g.rms_norm(g.take_rows(x), "output_norm.weight", config.norm_eps)
    return g.finish(output_logits(g, x), config.context_length)
