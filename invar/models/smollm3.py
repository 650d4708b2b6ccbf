"""SmolLM3 (https://huggingface.co/blog/smollm3): a Llama of which every fourth layer has no rope.

GGUF stores the rows of q and k so that the rotated pairs are neighbours, and not which layers have
no positions: as in llama.cpp these are the last of every four.
https://github.com/ggml-org/llama.cpp/blob/569a0092b98e73bd222490441234144e52afd2ef/src/models/smollm3.cpp
"""

from __future__ import annotations

from invar.graph.builder import GraphBuilder
from invar.graph.graph import Graph
from invar.graph.operations import Activation, RopeStyle
from invar.models.blocks import EMBEDDING, output_logits
from invar.models.decoder import DecoderConfig, cache_groups, pre_norm_block
from invar.models.hf import DECODER_KEYS, INTERLEAVED_NAMES, Config, HFFamily
from invar.models.metadata import ArchitectureKeys, ConfigError, ModelSource
from invar.weights.hf_directory import CONFIG

STEP = 4


def no_rope_step(config: Config) -> object:
    """Every so many layers, one without rope."""
    if config.get("use_sliding_window"):
        raise ConfigError(f"{CONFIG}: use_sliding_window is not supported for this family")
    step = config.get("no_rope_layer_interval", STEP)
    ropes = config.get("no_rope_layers")  # 1: with rope, in spite of the name
    if isinstance(ropes, list) and isinstance(step, int) and step > 0:
        regular = [int((layer + 1) % step != 0) for layer in range(len(ropes))]
        if [int(bool(rope)) for rope in ropes] != regular:
            raise ConfigError(f"{CONFIG}: no_rope_layers are not the last of every {step}")
    return step


HF = HFFamily(
    architecture="smollm3",
    keys={**DECODER_KEYS, "rope.no_rope_step": no_rope_step},
    names=INTERLEAVED_NAMES,
)


def build(source: ModelSource) -> Graph:
    keys = ArchitectureKeys(source.metadata, "smollm3")
    config = DecoderConfig.read(source, keys, RopeStyle.INTERLEAVED)
    step = keys.optional_integer("rope.no_rope_step") or STEP
    g = GraphBuilder(source)
    x = g.embed(EMBEDDING)
    for layer, place in enumerate(cache_groups(g, config, [None] * config.layers)):
        rope = None if (layer + 1) % step == 0 else config.rope
        x = pre_norm_block(
            g, x, config, f"blk.{layer}", place, activation=Activation.SILU, rope=rope
        )
    x = g.rms_norm(g.take_rows(x), "output_norm.weight", config.norm_eps)
    return g.finish(output_logits(g, x), config.context_length)
