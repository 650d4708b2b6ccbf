"""Random-weight GGUF files in the shapes people run, for benchmarks that need no download.

    python bench/synthetic.py 1b Q4_K_M out.gguf

Speed does not depend on what the weights say, only on their shape and format: a "1b" has the
matrices of Llama 3.2 1B, an "8b" those of Llama 3.1 8B, a "16x1b" has 16 experts of which a token
uses two, with a billion weights in all, a "gemma3-1b" those of Gemma 3 1B, of whose layers five in
six see 512 tokens. The type is one of llama.cpp's mixtures such as `Q4_K_M`, or any single format.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from invar.weights import mixtures
from invar.weights.formats import PLAIN_TYPES, QuantType, quantize
from invar.weights.gguf_writer import GGUFWriter


@dataclass(frozen=True)
class Shape:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context: int
    experts: int = 0  # of every layer; ffn is the width of one
    experts_used: int = 0
    family: str = "llama"
    window: int = 0  # of the layers that have one; which do is the family's to say


# config.json of meta-llama/Llama-3.2-1B, meta-llama/Llama-3.1-8B and google/gemma-3-1b-it (that the
# context is as long as its larger sisters'); "tiny" is for tests.
SHAPES = {
    "tiny": Shape(256, 2, 4, 2, 64, 512, 512, 2048),
    "1b": Shape(2048, 16, 32, 8, 64, 8192, 128256, 131072),
    "16x1b": Shape(2048, 16, 32, 8, 64, 4096, 32768, 131072, 16, 2),
    "8b": Shape(4096, 32, 32, 8, 128, 14336, 128256, 131072),
    "gemma3-1b": Shape(1152, 26, 4, 1, 256, 6912, 262144, 131072, family="gemma3", window=512),
}

# `general.file_type`: llama_ftype of llama.h, which OpenVINO GenAI will not read a file without.
# https://github.com/ggml-org/llama.cpp/blob/master/include/llama.h
FILE_TYPES = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10,
    "Q3_K": 11, "Q3_K_S": 11, "Q3_K_M": 12, "Q3_K_L": 13, "Q4_K": 14, "Q4_K_S": 14, "Q4_K_M": 15,
    "Q5_K": 16, "Q5_K_S": 16, "Q5_K_M": 17, "Q6_K": 18, "IQ2_XXS": 19, "IQ2_XS": 20,
    "Q2_K_S": 21, "IQ3_XXS": 23, "IQ1_S": 24, "IQ4_NL": 25, "IQ3_S": 26, "IQ2_S": 28, "IQ4_XS": 30,
    "IQ1_M": 31, "BF16": 32, "TQ1_0": 36, "TQ2_0": 37, "MXFP4": 38, "NVFP4": 39,
}  # fmt: skip

# A file is made of so many blocks, drawn at random, since some encoders are slow: they hold 16,384
# indices into the largest codebook, which has 2048 rows (IQ1).
BLOCKS_TO_DRAW = 512


def random_blocks(kind: QuantType, rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    """uint8 ``[rows, row_bytes]``: weights that keep activations in range."""
    if kind in PLAIN_TYPES:
        values = rng.standard_normal((rows, columns), dtype=np.float32) * columns**-0.5
        return quantize(values, kind)
    values = rng.standard_normal((BLOCKS_TO_DRAW, kind.block_size), dtype=np.float32)
    pool = quantize(values * np.float32(columns**-0.5), kind)
    drawn = rng.integers(0, len(pool), rows * kind.row_bytes(columns) // kind.block_bytes)
    return pool[drawn].reshape(rows, -1)


def layer_matrices(shape: Shape, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of one layer's matrices; those of experts are stacked."""
    q_width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield f"blk.{layer}.attn_q.weight", (q_width, shape.hidden)
    yield f"blk.{layer}.attn_k.weight", (kv_width, shape.hidden)
    yield f"blk.{layer}.attn_v.weight", (kv_width, shape.hidden)
    yield f"blk.{layer}.attn_output.weight", (shape.hidden, q_width)
    stack, ending = ((shape.experts,), "_exps.weight") if shape.experts else ((), ".weight")
    if shape.experts:
        yield f"blk.{layer}.ffn_gate_inp.weight", (shape.experts, shape.hidden)
    yield f"blk.{layer}.ffn_gate{ending}", (*stack, shape.ffn, shape.hidden)
    yield f"blk.{layer}.ffn_up{ending}", (*stack, shape.ffn, shape.hidden)
    yield f"blk.{layer}.ffn_down{ending}", (*stack, shape.hidden, shape.ffn)


def type_of(kind: str, tensor: str, columns: int, shape: Shape) -> QuantType:
    """What a mixture gives a matrix with rows of so many columns; a name that is none, what it
    says."""
    if tensor.endswith("ffn_gate_inp.weight"):
        return QuantType.F32
    if not is_mixture(kind):
        return QuantType[kind]
    wanted = mixtures.HEAD  # of the embedding, which is the output as well
    if tensor != "token_embd.weight":
        sharing = shape.heads // shape.kv_heads
        place = mixtures.Place.of(tensor, shape.layers, sharing, shape.experts)
        wanted = mixtures.matrix_type(kind.lower(), place)
    found = mixtures.fitting(wanted, columns)
    if found is None:
        raise ValueError(f"{tensor}: rows of {columns} are no whole blocks of {wanted.name}")
    return found


def is_mixture(kind: str) -> bool:
    return kind not in QuantType.__members__ and kind.lower() in mixtures.MIXTURES


def byte_tokens() -> list[str]:
    """GPT-2's printable stand-ins of the 256 bytes, in byte order."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    extra = (chr(256 + i) for i in range(256 - len(plain)))
    return [chr(b) if b in plain else next(extra) for b in range(256)]


def metadata(shape: Shape, kind: str, name: str) -> dict[str, object]:
    merged = ["th", "he"]
    filler = shape.vocab - 256 - len(merged) - 2
    tokens = byte_tokens() + merged + [f"<filler{i}>" for i in range(filler)]
    tokens += ["<|begin_of_text|>", "<|eot_id|>"]
    types = [1] * (shape.vocab - 2) + [3, 3]
    family = shape.family
    counts = {
        "expert_count": shape.experts,
        "expert_used_count": shape.experts_used,
        "attention.sliding_window": shape.window,
    }
    some_have = {f"{family}.{key}": count for key, count in counts.items() if count}
    return some_have | {
        "general.architecture": family,
        "general.name": name,
        "general.file_type": FILE_TYPES[kind],
        f"{family}.block_count": shape.layers,
        f"{family}.context_length": shape.context,
        f"{family}.embedding_length": shape.hidden,
        f"{family}.feed_forward_length": shape.ffn,
        f"{family}.attention.head_count": shape.heads,
        f"{family}.attention.head_count_kv": shape.kv_heads,
        f"{family}.attention.key_length": shape.head_dim,
        f"{family}.attention.value_length": shape.head_dim,
        f"{family}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{family}.rope.freq_base": 500000.0,
        f"{family}.rope.dimension_count": shape.head_dim,
        f"{family}.vocab_size": shape.vocab,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": ["t h", "h e"],
        "tokenizer.ggml.bos_token_id": shape.vocab - 2,
        "tokenizer.ggml.eos_token_id": shape.vocab - 1,
    }


def write(shape_name: str, kind: str, path: Path, seed: int = 0) -> None:
    """Writes the file; the bytes depend on the arguments alone."""
    shape = SHAPES[shape_name]
    writer = GGUFWriter(path, metadata(shape, kind, f"synthetic {shape_name} {kind}"))
    rng = np.random.default_rng(seed)

    def matrix(name: str, dims: tuple[int, ...]) -> None:
        quant = type_of(kind, name, dims[-1], shape)
        stream = np.random.default_rng(rng.integers(2**63))
        rows, columns = math.prod(dims[:-1]), dims[-1]
        writer.add_tensor(name, dims, quant, lambda: random_blocks(quant, rows, columns, stream))

    def norm(name: str, width: int = shape.hidden) -> None:
        ones = np.ones(width, np.float32)
        writer.add_tensor(name, (width,), QuantType.F32, ones.view(np.uint8))

    embedding = (shape.vocab, shape.hidden)
    matrix("token_embd.weight", embedding)
    norm("output_norm.weight")
    for layer in range(shape.layers):
        norm(f"blk.{layer}.attn_norm.weight")
        norm(f"blk.{layer}.ffn_norm.weight")
        if shape.family == "gemma3":
            norm(f"blk.{layer}.post_attention_norm.weight")
            norm(f"blk.{layer}.post_ffw_norm.weight")
            norm(f"blk.{layer}.attn_q_norm.weight", shape.head_dim)
            norm(f"blk.{layer}.attn_k_norm.weight", shape.head_dim)
        for name, dims in layer_matrices(shape, layer):
            matrix(name, dims)
    writer.write()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("type", help="a mixture such as Q4_K_M, or a format such as Q8_0 or BF16")
    parser.add_argument("path", type=Path)
    arguments = parser.parse_args()
    write(arguments.shape, arguments.type, arguments.path)


if __name__ == "__main__":
    main()
