"""What DeepSeek's directories and its older GGUF files call things, for `deepseek2.py`.

Both store what makes keys and values of the latent as one matrix, which comes apart here.
"""

from __future__ import annotations

import re

import numpy as np

from invar.graph.routing import Scoring
from invar.models.hf import (
    DECODER_KEYS,
    DECODER_NAMES,
    EXPERT_KEYS,
    EXPERT_NAMES,
    Config,
    HFFamily,
    rope_scaling,
)
from invar.models.metadata import LARGEST_REAL, ArchitectureKeys, ConfigError, brief
from invar.models.placed import Placed, Rows, RowsOf
from invar.weights.hf_directory import CONFIG

SCORINGS = {1: Scoring.SOFTMAX, 2: Scoring.SIGMOID}  # expert_gating_func


def qk_head_dim(config: Config) -> object:
    plain, rotated = config.get("qk_nope_head_dim"), config.get("qk_rope_head_dim")
    return plain + rotated if type(plain) is int and type(rotated) is int else None


def is_grouped(config: Config) -> bool:
    return config.get("topk_method") != "greedy"


def n_group(config: Config) -> object:
    return config.get("n_group") if is_grouped(config) else None


def topk_group(config: Config) -> object:
    return config.get("topk_group") if is_grouped(config) else None


def scoring_func(config: Config) -> int:
    """As GGUF numbers them."""
    default = Scoring.SIGMOID if config.get("model_type") == "deepseek_v3" else Scoring.SOFTMAX
    name = config.get("scoring_func", default)
    if name not in SCORINGS.values():
        raise ConfigError(f"{CONFIG}: scoring_func {name!r} is not known (softmax, sigmoid)")
    return next(number for number, scoring in SCORINGS.items() if scoring == name)


def dense_layers(config: Config) -> object:
    if config.get("moe_layer_freq", 1) != 1:
        raise ConfigError(f"{CONFIG}: moe_layer_freq is not 1, which is not supported")
    return config.get("first_k_dense_replace")


def yarn_factor(config: Config) -> object:
    return (rope_scaling(config) or {}).get("factor")


def yarn_growth(config: Config) -> object:
    growth = (rope_scaling(config) or {}).get("mscale_all_dim")
    if growth is None:
        return None
    if not (isinstance(growth, int | float) and abs(growth) <= LARGEST_REAL):
        raise ConfigError(f"{CONFIG}: mscale_all_dim must be a number, found {brief(growth)}")
    return 0.1 * growth or None


def without_draft(config: Config, name: str) -> str | None:
    """None: of the layer behind the last, which guesses further tokens and is not run."""
    found, layers = LAYER.match(name), config.get("num_hidden_layers")
    is_draft = found is not None and type(layers) is int and int(found[1]) >= layers
    return None if is_draft else name


def key_or_value_rows(is_value: bool) -> RowsOf:
    """Every head has the rows of its key, without the rotated part, and then those of its value."""

    def rows_of(keys: ArchitectureKeys, rows: int) -> Rows:
        heads = keys.integer("attention.head_count")
        plain = head_size(keys) - keys.integer("rope.dimension_count")
        if rows % heads or not 0 < plain < rows // heads:
            raise ConfigError(
                f"{rows} rows are not keys of {plain} dimensions and values for {heads} heads "
                f"({keys.full('attention.head_count')})"
            )
        by_head = np.arange(rows).reshape(heads, -1)
        return (by_head[:, plain:] if is_value else by_head[:, :plain]).reshape(-1)

    return rows_of


LAYER = re.compile(r"model\.layers\.(\d+)\.")
HEADS = "attention.head_count"
KEYS_AND_VALUES = (
    Placed("blk.{}.attn_k_b", rows=key_or_value_rows(False), matrices=HEADS, turned=True),
    Placed("blk.{}.attn_v_b", rows=key_or_value_rows(True), matrices=HEADS),
)
FUSED = {"blk.{}.attn_kv_b": KEYS_AND_VALUES}
ATTENTION, MIXTURE = "model.layers.{}.self_attn", "model.layers.{}.mlp"
HF = HFFamily(
    architecture="deepseek2",
    keys={
        **DECODER_KEYS,
        **EXPERT_KEYS,
        "context_length": "max_position_embeddings",  # with scaling
        "attention.kv_lora_rank": "kv_lora_rank",
        "attention.key_length": qk_head_dim,
        "rope.dimension_count": "qk_rope_head_dim",
        "rope.scaling.factor": yarn_factor,
        "rope.scaling.yarn_log_multiplier": yarn_growth,
        "leading_dense_block_count": dense_layers,
        "expert_gating_func": scoring_func,
        "expert_group_count": n_group,
        "expert_group_used_count": topk_group,
        "expert_weights_norm": "norm_topk_prob",
        "expert_weights_scale": "routed_scaling_factor",
    },
    names={
        **DECODER_NAMES,
        **EXPERT_NAMES,
        f"{ATTENTION}.q_a_proj": "blk.{}.attn_q_a",
        f"{ATTENTION}.q_a_layernorm": "blk.{}.attn_q_a_norm",
        f"{ATTENTION}.q_b_proj": "blk.{}.attn_q_b",
        f"{ATTENTION}.kv_a_proj_with_mqa": "blk.{}.attn_kv_a_mqa",
        f"{ATTENTION}.kv_a_layernorm": "blk.{}.attn_kv_a_norm",
        f"{ATTENTION}.kv_b_proj": KEYS_AND_VALUES,
        f"{MIXTURE}.gate.e_score_correction_bias": "blk.{}.exp_probs_b.bias",
        f"{MIXTURE}.shared_experts.gate_proj": "blk.{}.ffn_gate_shexp",
        f"{MIXTURE}.shared_experts.up_proj": "blk.{}.ffn_up_shexp",
        f"{MIXTURE}.shared_experts.down_proj": "blk.{}.ffn_down_shexp",
    },
    renamed=without_draft,
)


def head_size(keys: ArchitectureKeys) -> int:
    """Of a query or key; before the matrices were apart it had no key of its own."""
    return keys.optional_integer("attention.key_length_mla") or keys.integer("attention.key_length")
