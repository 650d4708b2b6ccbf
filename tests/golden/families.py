"""A tiny model of every dense family, as a directory and as the GGUF file that it converts to.

Written by `make_families.py`. The table of names and keys here is llama.cpp's side of the matter
(`gguf-py/gguf/tensor_mapping.py` and `conversion/*.py` of
https://github.com/ggml-org/llama.cpp/tree/569a0092b98e73bd222490441234144e52afd2ef); it shares
nothing with the tables of `invar/models`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from golden.gguf_names import permute
from golden.tiny_models import HERE, Golden

from invar.weights.formats import QuantType
from invar.weights.gguf_writer import GGUFWriter
from invar.weights.safetensors import SafetensorsFile

Floats = npt.NDArray[np.float32]

FAMILIES = (
    *("qwen2", "qwen3", "gemma2", "smollm3", "granite", "olmo2", "gemma"),
    *("phi3", "phi4_mini", "glm4", "glm", "granite4", "granite4_nope"),
    *("gpt2", "gpt_neox", "gpt_neox_serial", "gemma3_vision"),
)

NAMES = {
    r"model\.embed_tokens": "token_embd",
    r"model\.norm": "output_norm",
    r"lm_head": "output",
    r"model\.layers\.(\d+)\.input_layernorm": r"blk.\1.attn_norm",
    r"model\.layers\.(\d+)\.post_attention_layernorm": r"blk.\1.ffn_norm",
    r"model\.layers\.(\d+)\.self_attn\.([qkv])_proj": r"blk.\1.attn_\2",
    r"model\.layers\.(\d+)\.self_attn\.o_proj": r"blk.\1.attn_output",
    r"model\.layers\.(\d+)\.self_attn\.([qk])_norm": r"blk.\1.attn_\2_norm",
    r"model\.layers\.(\d+)\.mlp\.(gate|up|down)_proj": r"blk.\1.ffn_\2",
    r"model\.layers\.(\d+)\.self_attn\.qkv_proj": r"blk.\1.attn_qkv",
    r"model\.layers\.(\d+)\.mlp\.gate_up_proj": r"blk.\1.ffn_up",
    r"model\.layers\.(\d+)\.shared_mlp\.input_linear": r"blk.\1.ffn_gate_up",  # comes apart
    r"model\.layers\.(\d+)\.shared_mlp\.output_linear": r"blk.\1.ffn_down",
}
POST_NORMS = {
    r"model\.layers\.(\d+)\.post_attention_layernorm": r"blk.\1.post_attention_norm",
    r"model\.layers\.(\d+)\.pre_feedforward_layernorm": r"blk.\1.ffn_norm",
    r"model\.layers\.(\d+)\.post_feedforward_layernorm": r"blk.\1.post_ffw_norm",
}
GLM_POST_NORMS = {
    r"model\.layers\.(\d+)\.post_self_attn_layernorm": r"blk.\1.post_attention_norm",
    r"model\.layers\.(\d+)\.post_mlp_layernorm": r"blk.\1.post_ffw_norm",
}
GPT2_NAMES = {
    r"transformer\.wte": "token_embd",
    r"transformer\.wpe": "position_embd",
    r"transformer\.ln_f": "output_norm",
    r"transformer\.h\.(\d+)\.ln_1": r"blk.\1.attn_norm",
    r"transformer\.h\.(\d+)\.attn\.c_attn": r"blk.\1.attn_qkv",
    r"transformer\.h\.(\d+)\.attn\.c_proj": r"blk.\1.attn_output",
    r"transformer\.h\.(\d+)\.ln_2": r"blk.\1.ffn_norm",
    r"transformer\.h\.(\d+)\.mlp\.c_fc": r"blk.\1.ffn_up",
    r"transformer\.h\.(\d+)\.mlp\.c_proj": r"blk.\1.ffn_down",
}
NEOX_NAMES = {
    r"gpt_neox\.embed_in": "token_embd",
    r"gpt_neox\.final_layer_norm": "output_norm",
    r"gpt_neox\.layers\.(\d+)\.input_layernorm": r"blk.\1.attn_norm",
    r"gpt_neox\.layers\.(\d+)\.attention\.query_key_value": r"blk.\1.attn_qkv",
    r"gpt_neox\.layers\.(\d+)\.attention\.dense": r"blk.\1.attn_output",
    r"gpt_neox\.layers\.(\d+)\.post_attention_layernorm": r"blk.\1.ffn_norm",
    r"gpt_neox\.layers\.(\d+)\.mlp\.dense_h_to_4h": r"blk.\1.ffn_up",
    r"gpt_neox\.layers\.(\d+)\.mlp\.dense_4h_to_h": r"blk.\1.ffn_down",
}
OWN_NAMES = {
    "gemma3_vision": POST_NORMS,
    **{"gemma2": POST_NORMS, "olmo2": POST_NORMS, "glm4": GLM_POST_NORMS},
    **{"gpt2": GPT2_NAMES, "gpt_neox": NEOX_NAMES, "gpt_neox_serial": NEOX_NAMES},
}
OWN_ARCHITECTURES = {
    **{"phi4_mini": "phi3", "glm": "chatglm"},
    **{"gpt_neox": "gptneox", "gpt_neox_serial": "gptneox"},
    **{"granite4": "granite", "granite4_nope": "granite", "gemma3_vision": "gemma3"},
}
NOT_TEXT = ("model.vision_tower.", "model.multi_modal_projector.")
PERMUTED = ("smollm3", "granite", "granite4", "granite4_nope")

KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
}
OWN_KEYS = {
    "gemma2": {
        "attention.sliding_window": "sliding_window",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    "granite": {
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    },
}
NEOX_KEYS = {
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "use_parallel_residual": "use_parallel_residual",
}
GPT2_KEYS = {
    "block_count": "n_layer",
    "context_length": "n_positions",
    "embedding_length": "n_embd",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}
OWN_KEYS |= {"gpt2": GPT2_KEYS, "gpt_neox": NEOX_KEYS, "gpt_neox_serial": NEOX_KEYS}
OWN_KEYS["gemma3_vision"] = {"attention.sliding_window": "sliding_window"}
OWN_KEYS |= {"granite4": OWN_KEYS["granite"], "granite4_nope": OWN_KEYS["granite"]}
# GGUF has no key for the query scale of Gemma 2, whose published models have the head size there.
UNSAID = {"gemma2": {"attention.scale": 0.125}}


def architecture_of(name: str) -> str:
    """What GGUF calls the family of a tiny model."""
    return OWN_ARCHITECTURES.get(name, name)


def family_directory(name: str) -> Path:
    return HERE / "families" / name


def family_config(name: str) -> dict[str, Any]:
    """Of the text model, where the model sees too."""
    config: dict[str, Any] = json.loads((family_directory(name) / "config.json").read_text())
    text: dict[str, Any] = config.get("text_config", config)
    return text


def family_golden(name: str) -> Golden:
    with np.load(family_directory(name) / "golden.npz") as arrays:
        token_ids, rows = arrays["token_ids"].tolist(), arrays["rows"].tolist()
        return Golden(token_ids, rows, arrays["logits"])


def write_family_gguf(name: str, path: Path, matrices: QuantType = QuantType.F16) -> Path:
    """matrices: their number format; vectors are float32."""
    config = family_config(name)
    writer = GGUFWriter(
        path, {"general.architecture": architecture_of(name)} | gguf_keys(name, config)
    )
    tensors = gguf_tensors(name, config) | factor_tensors(config.get("rope_parameters", {}))
    for tensor, values in tensors.items():
        kind = matrices if values.ndim == 2 else QuantType.F32
        writer.add_tensor(tensor, values.shape, kind, values)
    writer.write()
    return path


def gguf_keys(name: str, config: dict[str, Any]) -> dict[str, Any]:
    keys = KEYS | OWN_KEYS.get(name, {})
    found = {key: config[of] for key, of in keys.items() if config.get(of) is not None}
    found |= UNSAID.get(name, {})
    if name == "gemma3_vision":
        found |= gemma3_rope(config)
    elif "rope_parameters" in config:
        found["rope.freq_base"] = float(config["rope_parameters"]["rope_theta"])
        found |= partial_rotary(config) | longrope_keys(config)
    if name.startswith("granite4"):
        found["rope.scaling.finetuned"] = config["position_embedding_type"] == "rope"
    if architecture_of(name) == "phi3":
        found["attention.sliding_window"] = config["sliding_window"] or 0
    return {f"{architecture_of(name)}.{key}": value for key, value in found.items()}


def gemma3_rope(config: dict[str, Any]) -> dict[str, Any]:
    """Layers with a window have the base that readers take where none is told."""
    rope = config["rope_parameters"]["full_attention"]
    scaling = {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    return {"rope.freq_base": rope["rope_theta"]} | scaling


def partial_rotary(config: dict[str, Any]) -> dict[str, Any]:
    share = config["rope_parameters"].get("partial_rotary_factor", 1.0)
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return {} if share == 1.0 else {"rope.dimension_count": int(share * size)}


def longrope_keys(config: dict[str, Any]) -> dict[str, Any]:
    rope = config["rope_parameters"]
    if rope["rope_type"] != "longrope":
        return {}
    return {
        "rope.scaling.attn_factor": rope["attention_factor"],
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
    }


def factor_tensors(rope: dict[str, Any]) -> dict[str, Floats]:
    """What the converter writes beside the weights."""
    return {
        f"rope_factors_{which}.weight": np.array(rope[f"{which}_factor"], np.float32)
        for which in ("long", "short")
        if f"{which}_factor" in rope
    }


def gguf_tensors(name: str, config: dict[str, Any]) -> dict[str, Floats]:
    file = SafetensorsFile(family_directory(name) / "model.safetensors")
    found = {}
    for tensor, info in file.tensors.items():
        if tensor.startswith(NOT_TEXT):
            continue
        values = file.raw(tensor).view(np.float16).astype(np.float32).reshape(info.shape)
        ours = gguf_name(name, tensor.replace("model.language_model.", "model."))
        if name.startswith("gemma") and ours.endswith("norm.weight"):
            values = values + 1
        if name in PERMUTED and ours.split(".")[-2] in ("attn_q", "attn_k"):
            heads = "attention" if ours.split(".")[-2] == "attn_q" else "key_value"
            values = permute(values, config[f"num_{heads}_heads"])
        if name == "gpt2" and ".h." in tensor and values.ndim == 2:
            values = values.T
        if "query_key_value" in tensor:
            values = parts_apart(values, config["num_attention_heads"])
        if "shared_mlp.input_linear" in tensor:
            gate, up = np.split(values, 2)
            found |= {
                ours.replace("_gate_up", f"_{part}"): v for part, v in (("gate", gate), ("up", up))
            }
            continue
        found[ours] = np.ascontiguousarray(values)
    file.close()
    return found


def parts_apart(rows: Floats, heads: int) -> Floats:
    """Rows of q, k and v of each head → of q of all heads, of k, of v."""
    by_head = rows.reshape(heads, 3, -1, *rows.shape[1:])
    return np.concatenate([by_head[:, part].reshape(-1, *rows.shape[1:]) for part in range(3)])


def gguf_name(name: str, tensor: str) -> str:
    stem, _, kind = tensor.rpartition(".")
    for pattern, ours in (NAMES | OWN_NAMES.get(name, {})).items():
        found = re.fullmatch(pattern, stem)
        if found is not None:
            return f"{found.expand(ours)}.{kind}"
    raise AssertionError(f"{tensor}: no name in GGUF")
