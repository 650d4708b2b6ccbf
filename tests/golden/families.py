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
    *("phi3", "phi4_mini", "glm4", "glm"),
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
OWN_NAMES = {"gemma2": POST_NORMS, "olmo2": POST_NORMS, "glm4": GLM_POST_NORMS}
OWN_ARCHITECTURES = {"phi4_mini": "phi3", "glm": "chatglm"}
PERMUTED = ("smollm3", "granite")

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
# GGUF has no key for the query scale of Gemma 2, whose published models have the head size there.
UNSAID = {"gemma2": {"attention.scale": 0.125}}


def architecture_of(name: str) -> str:
    """What GGUF calls the family of a tiny model."""
    return OWN_ARCHITECTURES.get(name, name)


def family_directory(name: str) -> Path:
    return HERE / "families" / name


def family_config(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((family_directory(name) / "config.json").read_text())
    return config


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
    tensors = gguf_tensors(name, config) | factor_tensors(config["rope_parameters"])
    for tensor, values in tensors.items():
        kind = matrices if values.ndim == 2 else QuantType.F32
        writer.add_tensor(tensor, values.shape, kind, values)
    writer.write()
    return path


def gguf_keys(name: str, config: dict[str, Any]) -> dict[str, Any]:
    keys = KEYS | OWN_KEYS.get(name, {})
    found = {key: config[of] for key, of in keys.items() if config.get(of) is not None}
    found["rope.freq_base"] = float(config["rope_parameters"]["rope_theta"])
    found |= UNSAID.get(name, {}) | partial_rotary(config) | longrope_keys(config)
    if architecture_of(name) == "phi3":
        found["attention.sliding_window"] = config["sliding_window"] or 0
    return {f"{architecture_of(name)}.{key}": value for key, value in found.items()}


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
        values = file.raw(tensor).view(np.float16).astype(np.float32).reshape(info.shape)
        ours = gguf_name(name, tensor)
        if name in ("gemma", "gemma2") and ours.endswith("norm.weight"):
            values = values + 1
        if name in PERMUTED and ours.split(".")[-2] in ("attn_q", "attn_k"):
            heads = "attention" if ours.split(".")[-2] == "attn_q" else "key_value"
            values = permute(values, config[f"num_{heads}_heads"])
        found[ours] = values
    file.close()
    return found


def gguf_name(name: str, tensor: str) -> str:
    stem, _, kind = tensor.rpartition(".")
    for pattern, ours in (NAMES | OWN_NAMES.get(name, {})).items():
        found = re.fullmatch(pattern, stem)
        if found is not None:
            return f"{found.expand(ours)}.{kind}"
    raise AssertionError(f"{tensor}: no name in GGUF")
