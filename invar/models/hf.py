"""What a family says of its Hugging Face form, and what many families say alike.

Which key of config.json and which weight stands for what, under the names of GGUF: so `build` of a
family sees the same source whatever the form. `hf_source.py` applies such a table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from invar.graph.operations import Activation
from invar.models.metadata import ConfigError, brief
from invar.models.placed import Placed, interleaved
from invar.models.rope_scaling import kind_of
from invar.weights.hf_directory import CONFIG

Config = Mapping[str, Any]  # the object in config.json
Key = str | tuple[str, ...] | Callable[[Config], Any]
Names = Mapping[str, str | Placed | tuple[Placed, ...]]


@dataclass(frozen=True)
class HFFamily:
    """How the configuration and the weights of a family are called in Hugging Face's form.

    keys: the key of the metadata, without its prefix → one of config.json, several of which the
    first present counts, or a function of all (whose None is as good as absent).
    names: weight → name of ours, both without `.weight` or `.bias`, or whole; of a tensor that
    holds several weights, all of them.
    left_out: weights that say nothing: tables and masks that older versions stored.
    renamed: the name by which `names` knows a stored weight; None: of a part of the model that is
    not run.
    """

    architecture: str  # as in GGUF
    keys: Mapping[str, Key]
    names: Names
    left_out: tuple[str, ...] = ("model.layers.{}.self_attn.rotary_emb.inv_freq",)
    renamed: Callable[[Config, str], str | None] | None = None
    defaults: Config = field(default_factory=dict)  # of keys that config.json may leave out


def rope_parameters(config: Config, layers: str | None = None) -> Mapping[str, Any]:
    """What config.json says about rope, in today's form or in the older one.

    layers: the kind of layers, where kinds have ropes of their own ("full_attention", …).
    https://github.com/huggingface/transformers/blob/0044e3b3facff1a1ad60b235c69d5b45beae75a4/src/transformers/modeling_rope_utils.py
    """
    older = {
        "rope_theta": "rope_theta",
        "rotary_emb_base": "rope_theta",
        "partial_rotary_factor": "partial_rotary_factor",
        "rotary_pct": "partial_rotary_factor",
    }
    found = {to: config[of] for of, to in older.items() if config.get(of) is not None}
    for name in ("rope_scaling", "rope_parameters"):
        given = config.get(name)
        if layers is not None and isinstance(given, Mapping):
            given = given.get(layers, given)
        if given is not None and not isinstance(given, Mapping):
            raise ConfigError(f"{CONFIG}: {name} must be an object, found {brief(given)}")
        found |= given or {}
    return found


def rope_scaling(config: Config, layers: str | None = None) -> Mapping[str, Any] | None:
    """The part of it that is about scaling; None where positions are as they are.

    The trained length may stand beside it, where it counts more, and the longest always does.
    """
    plain = ("rope_theta", "partial_rotary_factor")
    parameters = rope_parameters(config, layers)
    found = {name: v for name, v in parameters.items() if name not in plain and v is not None}
    if not found or found in ({"rope_type": "default"}, {"type": "default"}):
        return None
    for name in ("max_position_embeddings", "original_max_position_embeddings"):
        if config.get(name) is not None:
            found[name] = config[name]
    return found


def context_length(config: Config) -> Any:
    """Positions with scaling, as vLLM derives them: a trained length is multiplied, never twice.

    https://github.com/vllm-project/vllm/blob/v0.11.0/vllm/config/model.py (_get_and_verify_max_len)
    """
    longest, scaling = config.get("max_position_embeddings"), rope_scaling(config)
    if scaling is None:
        return longest
    kind = kind_of(scaling)
    factor: Any = scaling.get("factor")
    if kind == "yarn":
        trained = scaling.get("original_max_position_embeddings", longest)
        longest = longest if factor is None else trained
    if kind not in ("linear", "dynamic", "yarn") or type(longest) is not int:
        return longest
    is_factor = isinstance(factor, int | float) and math.isfinite(factor)
    return int(longest * factor) if is_factor else longest


def rope_theta(config: Config, layers: str | None = None) -> Any:
    return rope_parameters(config, layers).get("rope_theta")


def head_dim(config: Config) -> Any:
    given = config.get("head_dim")
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if given is None and type(hidden) is int and type(heads) is int and heads > 0:
        return hidden // heads
    return given


def rotary_dim(config: Config) -> Any:
    share, size = rope_parameters(config).get("partial_rotary_factor"), head_dim(config)
    if share is None or not isinstance(size, int):
        return None
    if not isinstance(share, int | float) or not 0 < share <= 1:
        raise ConfigError(f"{CONFIG}: partial_rotary_factor {brief(share)} is not in (0, 1]")
    return int(size * share)


# What config.json calls an activation, with the names of older versions.
ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {
        **dict.fromkeys(("silu", "swish"), Activation.SILU),
        **dict.fromkeys(("gelu", "gelu_python"), Activation.GELU),
        **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), Activation.GELU_TANH),
    }
)


def activation(name: str) -> Callable[[Config], Activation | None]:
    """What the key of this name says; None: nothing."""

    def found(config: Config) -> Activation | None:
        given = config.get(name)
        if given is not None and (not isinstance(given, str) or given not in ACTIVATIONS):
            known = ", ".join(ACTIVATIONS)
            raise ConfigError(
                f"{CONFIG}: {name} {brief(given)!r} is not supported (supported: {known})"
            )
        return None if given is None else ACTIVATIONS[given]

    return found


DECODER_KEYS: Mapping[str, Key] = MappingProxyType(
    {
        "block_count": "num_hidden_layers",
        "context_length": context_length,
        "embedding_length": "hidden_size",
        "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": "rms_norm_eps",
        "rope.freq_base": rope_theta,
        "rope.dimension_count": rotary_dim,
        "rope.scaling": rope_scaling,
    }
)

# Mixtures of experts, each expert with matrices of its own.
EXPERT_KEYS: Mapping[str, Key] = MappingProxyType(
    {
        "expert_count": ("num_local_experts", "num_experts", "n_routed_experts"),
        "expert_used_count": "num_experts_per_tok",
    }
)
EXPERT_NAMES: Names = MappingProxyType(
    {
        "model.layers.{}.mlp.gate": "blk.{}.ffn_gate_inp",
        "model.layers.{}.mlp.experts.{}.gate_proj": "blk.{}.ffn_gate_exps",
        "model.layers.{}.mlp.experts.{}.up_proj": "blk.{}.ffn_up_exps",
        "model.layers.{}.mlp.experts.{}.down_proj": "blk.{}.ffn_down_exps",
    }
)

DECODER_NAMES: Names = MappingProxyType(
    {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers.{}.input_layernorm": "blk.{}.attn_norm",
        "model.layers.{}.post_attention_layernorm": "blk.{}.ffn_norm",
        "model.layers.{}.self_attn.q_proj": "blk.{}.attn_q",
        "model.layers.{}.self_attn.k_proj": "blk.{}.attn_k",
        "model.layers.{}.self_attn.v_proj": "blk.{}.attn_v",
        "model.layers.{}.self_attn.o_proj": "blk.{}.attn_output",
        "model.layers.{}.self_attn.q_norm": "blk.{}.attn_q_norm",
        "model.layers.{}.self_attn.k_norm": "blk.{}.attn_k_norm",
        "model.layers.{}.mlp.gate_proj": "blk.{}.ffn_gate",
        "model.layers.{}.mlp.up_proj": "blk.{}.ffn_up",
        "model.layers.{}.mlp.down_proj": "blk.{}.ffn_down",
    }
)

INTERLEAVED_NAMES: Names = MappingProxyType(
    {
        **DECODER_NAMES,
        "model.layers.{}.self_attn.q_proj": Placed(
            "blk.{}.attn_q", rows=interleaved("attention.head_count")
        ),
        "model.layers.{}.self_attn.k_proj": Placed(
            "blk.{}.attn_k", rows=interleaved("attention.head_count_kv")
        ),
    }
)
"""Of families whose GGUF files have the rotated pairs of q and k as neighbours."""
