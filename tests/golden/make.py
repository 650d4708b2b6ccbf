"""Makes the tiny models and their golden logits. By hand, where torch and transformers are:

    PYTHONPATH=.:tests python tests/golden/make.py

Written with torch 2.13.0 and transformers 5.24.0. Weights are random float32 values from a fixed
seed; the logits are computed by `transformers` in double precision.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from golden.double_transformers import double_precision
from golden.gguf_names import gguf_metadata, gguf_tensors
from golden.tiny_tokenizer import VOCAB_SIZE, tokenizer_metadata
from transformers import Gemma3TextConfig, LlamaConfig, MistralConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gemma3.modeling_gemma3 import Gemma3ForCausalLM
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaRotaryEmbedding
from transformers.models.mistral.modeling_mistral import MistralForCausalLM

from invar.weights.formats import QuantType
from invar.weights.gguf_writer import GGUFWriter

Doubles = npt.NDArray[np.float64]

HERE = Path(__file__).parent
PROMPT_TOKENS = 48
GOLDEN_ROWS = (0, 1, 2, 3, 6, 7, 8, 11, 12, 13, 23, 31, 32, 40, 46, 47)

SHARED: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rms_norm_eps": float(np.float32(1e-5)),  # what GGUF can hold
    "attn_implementation": "eager",
}
LLAMA3_SCALING: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR_SCALING: dict[str, Any] = {"rope_type": "linear", "factor": 8.0}

LONGROPE: dict[str, Any] = {
    "long_factor": [1.0 + pair / 4 for pair in range(32)],
    "short_factor": [1.0 + pair / 64 for pair in range(32)],
}

LLAMA_SHAPES: dict[str, dict[str, Any]] = {
    # More rows in the embedding than tokens in the vocabulary, as padded models have.
    "llama_plain": {"num_key_value_heads": 2, "vocab_size": VOCAB_SIZE + 16},
    "llama_gqa": {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "llama3_rope": {
        "head_dim": 32,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": {"rope_theta": 10000.0, **LLAMA3_SCALING},
    },
}
GEMMA_SHAPES: dict[str, dict[str, Any]] = {
    "gemma3_pattern6": {"num_hidden_layers": 7, "intermediate_size": 32, "sliding_window": 12},
    "gemma3_scaled": {
        "num_hidden_layers": 3,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window": 9,
        "sliding_window_pattern": 2,
        "final_logit_softcapping": 5.0,
        "rope_parameters": {
            "full_attention": {"rope_theta": 1000000.0, **LINEAR_SCALING},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
    },
}


def fill(model: Any, seed: int) -> None:
    """Random float32 values, such that attention is far from uniform and answers are varied.

    An embedding that is small in the residual stream leaves the next token to the layers: with a
    tied output a large one would only repeat the last token. The last norm makes up for it.
    """
    random = np.random.default_rng(seed)
    config = model.config
    is_gemma = type(model) is Gemma3ForCausalLM
    root = math.sqrt(config.hidden_size)
    embedding_width = 0.1 / root if is_gemma else 0.1
    last_norm = 2 / (embedding_width * root) if config.tie_word_embeddings else 1.0
    for name, parameter in model.named_parameters():
        value = random.standard_normal(parameter.shape)
        if name.endswith("norm.weight"):
            size = last_norm if name == "model.norm.weight" else 1.0
            value = as_float32(size * (1 + 0.2 * value))
            if is_gemma:  # stored less 1, and to be read as float32 with and without it
                value = np.rint(value * 2**16) / 2**16 - 1
        elif name.endswith("bias"):
            value = as_float32(0.2 * value)
        elif name.endswith("sinks"):
            value = as_float32(value)
        elif "embed" in name:
            value = as_float32(embedding_width * value)
        else:
            value = as_float32(1.5 * value / np.sqrt(parameter.shape[-1]))
        parameter.data = torch.from_numpy(value)


def fill_router_biases(model: Any, seed: int) -> None:
    random = np.random.default_rng(seed)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            values = as_float32(0.3 * random.standard_normal(buffer.shape))
            buffer.copy_(torch.from_numpy(values))


def as_float32(values: Doubles) -> Doubles:
    """Doubles that a float32 can hold."""
    return values.astype(np.float32).astype(np.float64)


def write_model(name: str, model: Any, architecture: str, seed: int) -> None:
    model.eval()
    fill(model, seed)
    fill_router_biases(model, seed + 2)
    config: Any = model.config
    token_ids = np.random.default_rng(seed + 1).integers(0, config.vocab_size, PROMPT_TOKENS)
    with torch.no_grad():
        logits = model(torch.from_numpy(token_ids[None])).logits[0].numpy()
    assert logits.dtype == np.float64
    metadata = {"general.architecture": architecture, "general.name": name}
    metadata |= gguf_metadata(config, architecture) | tokenizer_metadata()
    tensors = gguf_tensors(model, architecture)
    if config.rope_parameters.get("rope_type") == "llama3":
        tensors["rope_freqs.weight"] = llama3_factors(config)
    writer = GGUFWriter(HERE / f"{name}.gguf", metadata)
    for tensor_name, values in tensors.items():
        writer.add_tensor(tensor_name, values.shape, QuantType.F32, values)
    writer.write()
    write_config(name, config)
    rows = np.array(GOLDEN_ROWS)
    np.savez_compressed(
        HERE / f"{name}.npz", token_ids=token_ids.astype(np.int32), rows=rows, logits=logits[rows]
    )
    print(
        f"{name}: logits {logits.std():.2f} wide, {sum(t.size for t in tensors.values())} weights"
    )


def write_config(name: str, config: Any) -> None:
    """config.json as `transformers` saves it, for the model's Hugging Face form (`hf_form.py`)."""
    config.save_pretrained(HERE)
    (HERE / "config.json").rename(HERE / f"{name}.json")


def llama3_factors(config: Any) -> npt.NDArray[np.float32]:
    """What the converter writes as rope_freqs.weight: plain frequencies over scaled ones."""
    rope = LlamaRotaryEmbedding(config)
    plain, _ = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    factors: npt.NDArray[np.float32] = (plain / rope.inv_freq).numpy().astype(np.float32)
    return factors


def write_rope_tables() -> None:
    """cos and sin `[positions, pairs]` for each kind of scaling, with Llama 3.1's own numbers."""
    positions = np.array([0, 1000, 9000, 100000])
    scalings: dict[str, dict[str, Any]] = {
        "default": {"rope_type": "default"},
        "linear": LINEAR_SCALING,
        "llama3": LLAMA3_SCALING | {"factor": 8.0, "original_max_position_embeddings": 8192},
        "llama3_step": LLAMA3_SCALING
        | {"factor": 16.0, "high_freq_factor": 1.0, "original_max_position_embeddings": 8192},
    }
    arrays: dict[str, Any] = {"positions": positions} | computed_ropes(positions)
    for kind, scaling in scalings.items():
        shape = SHARED | {"head_dim": 64, "max_position_embeddings": 131072}
        rope_parameters = {"rope_theta": 500000.0, **scaling}
        config = LlamaConfig(**shape, rope_parameters=rope_parameters)
        rope = LlamaRotaryEmbedding(config)
        ids = torch.from_numpy(positions[None])
        cos, sin = (table[0, :, :32].numpy() for table in rope(torch.zeros(1), ids))
        arrays |= {f"{kind}_cos": cos, f"{kind}_sin": sin}
        if kind == "llama3":
            arrays["llama3_factors"] = llama3_factors(config)
    np.savez_compressed(HERE / "rope_tables.npz", **arrays)


# Kinds that depend on more than the config's length, by what computes them in `transformers`.
COMPUTED: dict[str, tuple[dict[str, Any], dict[str, Any], int | None]] = {
    # kind: scaling, what else the config says, length asked for
    "dynamic": ({"factor": 2.0}, {"max_position_embeddings": 4096}, 8192),
    "yarn": ({"factor": 4.0}, {"original_max_position_embeddings": 32768}, None),
    "yarn_mscale": (
        {"factor": 40.0, "beta_fast": 16, "beta_slow": 2, "mscale": 1.0, "mscale_all_dim": 0.7},
        {"original_max_position_embeddings": 4096},
        None,
    ),
    "yarn_given": (
        {"factor": 8.0, "attention_factor": 0.8, "truncate": False},
        {"original_max_position_embeddings": 4096},
        None,
    ),
    "longrope": (LONGROPE, {"original_max_position_embeddings": 4096}, 131072),
    "longrope_short": (LONGROPE, {"original_max_position_embeddings": 4096}, 4096),
}


def computed_ropes(positions: npt.NDArray[np.int64]) -> dict[str, Any]:
    arrays: dict[str, Any] = {}
    for name, (scaling, beside, length) in COMPUTED.items():
        kind = name.split("_")[0]
        shape = SHARED | {"head_dim": 64, "max_position_embeddings": 131072} | beside
        rope_parameters = {"rope_theta": 500000.0, "rope_type": kind, **scaling}
        config = LlamaConfig(**shape, rope_parameters=rope_parameters)
        inv_freq, magnitude = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=length)
        angles = positions[:, None] * inv_freq.double().numpy()
        arrays |= {
            f"{name}_cos": np.cos(angles) * magnitude,
            f"{name}_sin": np.sin(angles) * magnitude,
        }
    return arrays


def main() -> None:
    wanted = sys.argv[1:]
    with double_precision():
        models = {
            name: (LlamaForCausalLM(LlamaConfig(**SHARED | shape)), "llama")
            for name, shape in LLAMA_SHAPES.items()
        }
        mistral = SHARED | {"sliding_window": 7, "tie_word_embeddings": False}
        models["mistral_window"] = (MistralForCausalLM(MistralConfig(**mistral)), "llama")
        for name, shape in GEMMA_SHAPES.items():
            shape = SHARED | {"query_pre_attn_scalar": 16, "pad_token_id": None} | shape
            models[name] = (Gemma3ForCausalLM(Gemma3TextConfig(**shape)), "gemma3")
        for seed, (name, (model, architecture)) in enumerate(models.items()):
            if not wanted or name in wanted:
                write_model(name, model, architecture, 1000 * (seed + 1))
        write_rope_tables()


if __name__ == "__main__":
    main()
