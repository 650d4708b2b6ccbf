"""From a `transformers` model to the tensors and metadata of its GGUF file.

Names, permutation and keys as in
https://github.com/ggml-org/llama.cpp/blob/7bca1fd9ca2a681b0182e16f24f832b7be1942af/conversion/llama.py
and `gemma.py` beside it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

TOP_LEVEL = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
IN_BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.sinks": "attn_sinks",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.k_b_proj": "attn_k_b",
    "self_attn.v_b_proj": "attn_v_b",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
NORMS_IN_BLOCK = {
    "llama": {"post_attention_layernorm": "ffn_norm"},
    "llama4": {"post_attention_layernorm": "ffn_norm"},
    "deepseek2": {"post_attention_layernorm": "ffn_norm"},
    "gpt-oss": {"post_attention_layernorm": "post_attention_norm"},
    "qwen2moe": {"post_attention_layernorm": "ffn_norm"},
    "qwen3moe": {"post_attention_layernorm": "ffn_norm"},
    "gemma3": {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
}


def gguf_name(name: str, architecture: str) -> str:
    """`model.layers.0.self_attn.q_proj.weight` → `blk.0.attn_q.weight`."""
    module, _, kind = name.rpartition(".")
    if module in TOP_LEVEL:
        return f"{TOP_LEVEL[module]}.{kind}"
    _, _, layer, part = module.split(".", 3)
    part = part.replace("shared_experts.", "shared_expert.")  # as DeepSeek calls it
    return f"blk.{layer}.{(IN_BLOCK | NORMS_IN_BLOCK[architecture])[part]}.{kind}"


def permute(rows: Floats, heads: int) -> Floats:
    """Rows of q or k so that dimensions i and i + dim / 2 of a head become neighbours."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))


def unfused(name: str, value: Floats, architecture: str) -> dict[str, Floats]:
    """Names as most families have them; gate and up of experts, stored as one, come apart."""
    if name.endswith(".sinks"):
        return {f"{name}.weight": value}
    name = name.replace(".feed_forward.", ".mlp.").replace(".mlp.router.", ".mlp.gate.")
    if ".experts." not in name:
        return {name: value}
    kind = "bias" if name.endswith("_bias") else "weight"
    name = name.removesuffix("_bias")
    if architecture in ("llama4", "gpt-oss") and kind == "weight":
        value = value.swapaxes(1, 2)  # stored as [experts, in_features, out_features]
    if not name.endswith("gate_up_proj"):
        return {f"{name}.{kind}": value}
    interleaved = value[:, 0::2], value[:, 1::2]
    gate, up = interleaved if architecture == "gpt-oss" else np.split(value, 2, axis=1)
    stem = name.removesuffix("gate_up_proj")
    return {f"{stem}gate_proj.{kind}": gate, f"{stem}up_proj.{kind}": up}


def apart(name: str, value: Floats, config: Any) -> dict[str, Floats]:
    """What makes keys and values of DeepSeek's latent: both by heads, that of keys transposed."""
    plain, width = config.qk_nope_head_dim, config.qk_nope_head_dim + config.v_head_dim
    by_head = value.reshape(config.num_attention_heads, width, -1)
    keys, values = by_head[:, :plain].swapaxes(1, 2), by_head[:, plain:]
    stem = name.removesuffix("kv_b_proj.weight")
    return {f"{stem}k_b_proj.weight": keys, f"{stem}v_b_proj.weight": values}


def gguf_tensors(model: Any, architecture: str) -> dict[str, Floats]:
    """Every parameter as GGUF stores it: q and k of llama permuted, norms of gemma3 plus one."""
    config, tensors = model.config, {}
    for name, parameter in model.named_parameters():
        value = parameter.detach().numpy()
        if architecture == "gemma3" and name.endswith("norm.weight"):
            value = value + 1
        rounded = value.astype(np.float32)
        assert (rounded == value).all(), f"{name} is not a float32 value"
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            is_q = ".q_proj." in name
            rounded = permute(
                rounded, config.num_attention_heads if is_q else config.num_key_value_heads
            )
        parts = unfused(name, rounded, architecture)
        if name.endswith("kv_b_proj.weight"):
            parts = apart(name, rounded, config)
        for part, values in parts.items():
            if part.endswith("shared_expert_gate.weight"):
                values = values.reshape(-1)
            tensors[gguf_name(part, architecture)] = np.ascontiguousarray(values)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            layer = name.split(".")[2]
            tensors[f"blk.{layer}.exp_probs_b.bias"] = buffer.numpy().astype(np.float32)
    return tensors


def gguf_metadata(config: Any, architecture: str) -> dict[str, Any]:
    values = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }
    values |= _expert_metadata(config)
    head_dim = getattr(config, "head_dim", None)
    if head_dim is not None:
        values |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    window = getattr(config, "sliding_window", None)
    if window is not None:
        values["attention.sliding_window"] = window
    rope = config.rope_parameters
    if architecture == "gemma3":
        rope = rope["full_attention"]
        values |= _gemma3_metadata(config)
    values["rope.freq_base"] = float(rope["rope_theta"])
    if architecture == "deepseek2":
        values |= _deepseek_metadata(config)
    if architecture == "llama4":
        values |= _llama4_metadata(config)
    if rope["rope_type"] == "yarn":
        values |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(rope["factor"]),
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        }
    if rope["rope_type"] == "linear":
        values |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    return {f"{architecture}.{key}": value for key, value in values.items()}


def _expert_metadata(config: Any) -> dict[str, Any]:
    if getattr(config, "num_experts_per_tok", None) is None:
        return {}
    values = {
        "expert_count": getattr(config, "num_local_experts", None) or config.num_experts,
        "expert_used_count": config.num_experts_per_tok,
    }
    if getattr(config, "norm_topk_prob", None) is not None:
        values["expert_weights_norm"] = config.norm_topk_prob
    return values


def _deepseek_metadata(config: Any) -> dict[str, Any]:
    is_v3 = config.model_type == "deepseek_v3"
    values = {
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.head_count_kv": 1,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": config.qk_rope_head_dim,
        "leading_dense_block_count": config.first_k_dense_replace,
        "expert_gating_func": 2 if is_v3 else 1,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
        "expert_weights_scale": config.routed_scaling_factor,
    }
    if config.rope_parameters.get("mscale_all_dim"):
        growth = 0.1 * config.rope_parameters["mscale_all_dim"]
        values["rope.scaling.yarn_log_multiplier"] = growth
    return values


def _llama4_metadata(config: Any) -> dict[str, Any]:
    """Those of llama.cpp, and the numbers that are constants there."""
    return {
        "interleave_moe_layer_step": config.interleave_moe_layer_step,
        "attention.chunk_size": config.attention_chunk_size,
        "attention.sliding_window_pattern": config.no_rope_layer_interval,
        "attention.temperature_scale": config.attn_scale,
        "attention.temperature_length": config.floor_scale,
    }


def _gemma3_metadata(config: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    pattern = config.layer_types.index("full_attention") + 1
    if pattern != 6:
        values["attention.sliding_window_pattern"] = pattern
    if config.final_logit_softcapping is not None:
        values["final_logit_softcapping"] = config.final_logit_softcapping
    return values
