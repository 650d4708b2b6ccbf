"""Small models whose matrices have number formats of every kind, also within one layer.

    source = mixed_formats()                        # WeightSource with metadata
    source = one_format(QuantType.Q4_K, "gemma3")   # every matrix in that format
    path = source.write(tmp_path / "mixed.gguf")

Rows have 256 columns or more, since a block of a K-quant has 256. Weights are random with a fixed
seed; the tokenizer is that of the tiny models.
"""

from __future__ import annotations

from itertools import cycle
from typing import Any

import numpy as np
from golden.tiny_tokenizer import VOCAB_SIZE, tokenizer_metadata
from models.memory_source import Floats, MemorySource

from invar.weights.formats import QuantType

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD, LAYERS = 256, 4, 2, 64, 512, 3
WINDOW = 40  # of gemma3: shorter than a tile, so that tiles are masked in part and wholly

KERNEL_FORMATS = (
    QuantType.Q4_K,
    QuantType.Q6_K,
    QuantType.F16,
    QuantType.Q8_0,
    QuantType.Q4_1,
    QuantType.Q5_0,
    QuantType.BF16,
    QuantType.Q4_0,
    QuantType.Q5_K,
    QuantType.Q3_K,
    QuantType.Q5_1,
    QuantType.Q2_K,
    QuantType.IQ4_XS,
    QuantType.MXFP4,
    QuantType.IQ4_NL,
    QuantType.IQ3_XXS,
    QuantType.IQ3_S,
    QuantType.IQ2_S,
    QuantType.IQ2_XS,
    QuantType.IQ2_XXS,
    QuantType.IQ1_M,
    QuantType.IQ1_S,
    QuantType.TQ1_0,
    QuantType.TQ2_0,
    QuantType.F32,
)

# Those that no GGUF file has: of checkpoints, or made at load.
OTHER_FORMATS = (
    QuantType.INT4_ZP,
    QuantType.INT8_ZP,
    QuantType.INT8,
    QuantType.FP8,
    QuantType.NVFP4_ROWS,
)


def mixed_formats(architecture: str = "llama", layers: int = LAYERS) -> MemorySource:
    """All formats in turn over the matrices: q, k and v of a layer are never the same."""
    source = float_model(architecture, layers)
    matrices = [name for name, tensor in source.tensors.items() if len(tensor.shape) == 2]
    for name, quant_type in zip(matrices, cycle(KERNEL_FORMATS), strict=False):
        source.put(name, source.dequantize(name), quant_type)
    return source


def one_format(
    quant_type: QuantType, architecture: str = "llama", layers: int = LAYERS
) -> MemorySource:
    source = float_model(architecture, layers)
    for name, tensor in list(source.tensors.items()):
        if len(tensor.shape) == 2:
            source.put(name, source.dequantize(name), quant_type)
    return source


def float_model(architecture: str = "llama", layers: int = LAYERS) -> MemorySource:
    """The same weights in F32, the output tied to the embedding."""
    random = np.random.default_rng(20260815)
    source = MemorySource(metadata(architecture, layers), {})
    # Small, so that the layers and not the last token decide on the next one; the last norm makes
    # up for it. Gemma multiplies the embedding by sqrt(hidden).
    width = 0.1 / np.sqrt(HIDDEN) if architecture == "gemma3" else 0.1
    source.put("token_embd.weight", _matrix(random, VOCAB_SIZE, HIDDEN, width))
    for layer in range(layers):
        for name, (rows, columns) in _block_matrices().items():
            values = _matrix(random, rows, columns, 1 / np.sqrt(columns))
            source.put(f"blk.{layer}.{name}.weight", values)
        for name, size in _block_norms(architecture).items():
            source.put(f"blk.{layer}.{name}.weight", _norm(random, size))
    source.put("output_norm.weight", _norm(random, HIDDEN) * 2 / (width * np.sqrt(HIDDEN)))
    return source


def metadata(architecture: str, layers: int) -> dict[str, Any]:
    values: dict[str, Any] = {
        "block_count": layers,
        "context_length": 4096,
        "embedding_length": HIDDEN,
        "feed_forward_length": FEED_FORWARD,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    }
    if architecture == "gemma3":
        values["attention.sliding_window"] = WINDOW
        values["attention.sliding_window_pattern"] = 2
    prefixed = {f"{architecture}.{key}": value for key, value in values.items()}
    names = {"general.architecture": architecture, "general.name": f"small {architecture}"}
    return names | prefixed | tokenizer_metadata()


def _block_matrices() -> dict[str, tuple[int, int]]:
    return {
        "attn_q": (HEADS * HEAD_DIM, HIDDEN),
        "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_output": (HIDDEN, HEADS * HEAD_DIM),
        "ffn_gate": (FEED_FORWARD, HIDDEN),
        "ffn_up": (FEED_FORWARD, HIDDEN),
        "ffn_down": (HIDDEN, FEED_FORWARD),
    }


def _block_norms(architecture: str) -> dict[str, int]:
    norms = {"attn_norm": HIDDEN, "ffn_norm": HIDDEN}
    if architecture == "gemma3":
        norms |= {"post_attention_norm": HIDDEN, "post_ffw_norm": HIDDEN}
        norms |= {"attn_q_norm": HEAD_DIM, "attn_k_norm": HEAD_DIM}
    return norms


def _matrix(random: np.random.Generator, rows: int, columns: int, width: float) -> Floats:
    return (random.standard_normal((rows, columns)) * width).astype(np.float32)


def _norm(random: np.random.Generator, width: int) -> Floats:
    return (1 + 0.2 * random.standard_normal(width)).astype(np.float32)
