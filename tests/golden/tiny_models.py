"""The tiny models beside this file and what `transformers` makes of them (written by `make.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

HERE = Path(__file__).parent

TINY_MODELS = (
    "llama_plain",  # a KV head for every query head, own output matrix, padded vocabulary
    "llama_gqa",  # two query heads share a KV head, output tied to the embedding
    "llama3_rope",  # Llama 3 scaling of rope by a factor tensor; biases; head_dim > hidden / heads
    "mistral_window",  # every layer sees 7 tokens
    "gemma3_pattern6",  # layers 0–4 and 6 see 12 tokens, layer 5 all
    "mixtral",  # two of four experts a token, layers see 9 tokens
    "qwen2_moe",  # two of four experts whose weights do not add up to 1, a shared one behind a gate
    "qwen3_moe",  # three of six experts, norms of q and k
    "gpt_oss",  # sinks, every second layer sees 9 tokens, YaRN, experts with biases and limits
    "llama4",  # chunks of 12 tokens, a layer without positions, one expert of four on its input
    "deepseek_v2",  # latent attention, experts in groups by their best, a dense layer first
    "deepseek_v3",  # queries through a narrower layer, sigmoids with biases, YaRN that grows logits
    "gemma3_scaled",  # every second layer sees all, linear rope there, soft-capped logits
)

MIXTURES = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "llama4"),
    *("deepseek_v2", "deepseek_v3"),
)


@dataclass(frozen=True)
class Golden:
    """A prompt and the logits of some of its rows, in double precision."""

    token_ids: list[int]
    rows: list[int]
    logits: npt.NDArray[np.float64]  # [rows, vocab]


def model_path(name: str) -> Path:
    return HERE / f"{name}.gguf"


def load_golden(name: str) -> Golden:
    with np.load(HERE / f"{name}.npz") as arrays:
        token_ids, rows = arrays["token_ids"].tolist(), arrays["rows"].tolist()
        return Golden(token_ids, rows, arrays["logits"])
