"""Makes a tiny directory and golden logits for each family. By hand, where transformers are:

    PYTHONPATH=.:tests python tests/golden/make_families.py [NAME…]

What is written to `families/NAME/` is the model as its makers would publish it: config.json and
model.safetensors, in float16. The logits are of `transformers` in double precision.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import torch
import transformers
from golden.double_transformers import double_precision
from golden.families import FAMILIES, HERE
from golden.safetensors_writer import safetensors_bytes, stored

VOCAB = 96
PROMPT_TOKENS = 48
GOLDEN_ROWS = (0, 1, 5, 8, 17, 31, 40, 47)

SHARED: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": float(np.float32(1e-5)),  # what GGUF can hold
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
# What GPT-2 calls these; the others it does not have.
SHARED_GPT2: dict[str, Any] = {
    "n_embd": 32,
    "n_inner": 64,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 64,
    "layer_norm_epsilon": SHARED["rms_norm_eps"],
    **{name: SHARED[name] for name in ("vocab_size", "bos_token_id", "eos_token_id")},
}
HEADS_OF_16: dict[str, Any] = {"head_dim": 16}
TWO_HEADS: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}

GRANITE: dict[str, Any] = {
    **TWO_HEADS,
    **{"embedding_multiplier": 12.0, "residual_multiplier": 0.25, "logits_scaling": 0.5},
    **{"attention_multiplier": 0.125, "tie_word_embeddings": True},
}
GRANITE4: dict[str, Any] = {
    **GRANITE,
    **{"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 64},
    **{"layer_types": ["full_attention"] * 2, "mamba_n_heads": 4, "mamba_d_head": 16},
}
VISION: dict[str, Any] = {
    **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1},
    **{"num_attention_heads": 1, "image_size": 16, "patch_size": 4},
}
ROPES_OF_GEMMA3: dict[str, Any] = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
NEOX: dict[str, Any] = {"num_attention_heads": 2, "layer_norm_eps": SHARED["rms_norm_eps"]}


def longrope(pairs: int, trained: int) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "long_factor": [1.0 + pair / 4 for pair in range(pairs)],
        "short_factor": [1.0 + pair / 64 for pair in range(pairs)],
        "attention_factor": 1.25,  # what GGUF can hold
        "original_max_position_embeddings": trained,
    }


# name → class of the model, and its configuration beside what is shared
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", TWO_HEADS),
    "qwen3": ("Qwen3", HEADS_OF_16 | {"tie_word_embeddings": True}),
    "gemma2": (
        "Gemma2",
        HEADS_OF_16
        | {"num_hidden_layers": 3, "sliding_window": 9, "query_pre_attn_scalar": 64}
        | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "smollm3": ("SmolLM3", TWO_HEADS | {"num_hidden_layers": 4, "tie_word_embeddings": True}),
    "granite": ("Granite", GRANITE),
    "olmo2": ("Olmo2", TWO_HEADS),
    "gemma": ("Gemma", TWO_HEADS | {"head_dim": 32}),
    "phi3": (
        "Phi3",  # 48 tokens are beyond the trained length
        TWO_HEADS
        | {"sliding_window": 11, "original_max_position_embeddings": 32}
        | {"rope_parameters": longrope(8, 32)},
    ),
    "phi4_mini": (
        "Phi3",  # 48 tokens are within it
        {"hidden_size": 64, "tie_word_embeddings": True, "original_max_position_embeddings": 256}
        | {"rope_parameters": longrope(6, 256) | {"partial_rotary_factor": 0.75}},
    ),
    "glm4": ("Glm4", HEADS_OF_16),
    "glm": ("Glm", HEADS_OF_16 | {"attention_bias": False}),
    "gpt2": ("GPT2", {}),
    "gpt_neox": ("GPTNeoX", NEOX | {"rotary_pct": 0.25}),
    "gpt_neox_serial": ("GPTNeoX", NEOX | {"rotary_pct": 0.5, "use_parallel_residual": False}),
    "granite4": ("GraniteMoeHybrid", GRANITE4 | {"position_embedding_type": "rope"}),
    "granite4_nope": ("GraniteMoeHybrid", GRANITE4),
    "gemma3_vision": (
        "Gemma3",  # whose text model is as the published ones
        HEADS_OF_16
        | {"num_hidden_layers": 6, "sliding_window": 9, "query_pre_attn_scalar": 16}
        | {"vision_config": VISION, "rope_parameters": ROPES_OF_GEMMA3},
    ),
}


def fill(model: Any, seed: int) -> None:
    """Random values of float16, such that attention is far from uniform and answers are varied."""
    random = np.random.default_rng(seed)
    for name, parameter in model.named_parameters():
        value = random.standard_normal(parameter.shape)
        if ("norm" in name or ".ln_" in name) and name.endswith("weight"):
            value = 0.2 * value + ("Gemma" not in type(model).__name__)
        elif name.endswith("bias"):
            value = 0.2 * value
        elif "embed" in name or ".wte." in name or ".wpe." in name:
            value = 0.3 * value
        else:
            value = 1.5 * value / np.sqrt(parameter.shape[-1])
        parameter.data = torch.from_numpy(value.astype(np.float16).astype(np.float64))


def make(name: str, seed: int) -> None:
    kind, shape = MODELS[name]
    shape = SHARED_GPT2 if kind == "GPT2" else SHARED | shape
    if "vision_config" in shape:
        inner = {key: value for key, value in shape.items() if key != "vision_config"}
        shape = {"text_config": inner, "vision_config": shape["vision_config"]}
        shape |= {"mm_tokens_per_image": 4, "tie_word_embeddings": True}
    config = getattr(transformers, f"{kind}Config")(**shape, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    fill(model, seed)
    token_ids = np.random.default_rng(seed + 1).integers(0, VOCAB, PROMPT_TOKENS)
    with torch.no_grad():
        logits = model(torch.from_numpy(token_ids[None])).logits[0].numpy()
    assert logits.dtype == np.float64
    folder = HERE / "families" / name
    folder.mkdir(exist_ok=True)
    config.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    assert written["model_type"] == config.model_type
    tensors = {
        key: stored(parameter.detach().numpy().astype(np.float32), "F16")
        for key, parameter in model.named_parameters()
    }
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    rows = np.array(GOLDEN_ROWS)
    np.savez_compressed(
        folder / "golden.npz", token_ids=token_ids.astype(np.int32), rows=rows, logits=logits[rows]
    )
    print(f"{name}: logits {logits.std():.2f} wide")


def main() -> None:
    wanted = sys.argv[1:] or FAMILIES
    with double_precision():
        for seed, name in enumerate(MODELS):
            if name in wanted:
                make(name, 100_000 + 1000 * seed)


if __name__ == "__main__":
    main()
