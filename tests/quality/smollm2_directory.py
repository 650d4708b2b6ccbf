"""SmolLM2 as a Hugging Face directory in bfloat16, made of what its GGUF file holds.

PYTHONPATH=.:tests python tests/quality/smollm2_directory.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from golden.hf_form import hf_tensors
from golden.safetensors_writer import stored, write_sharded

from invar.weights.gguf import GGUFFile
from invar.weights.sources import resolve

CONTROL = 3  # tokenizer.ggml.token_type


def config_of(source: GGUFFile) -> dict[str, Any]:
    hidden = source.get_int("llama.embedding_length")
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": source.get_int("llama.feed_forward_length"),
        "num_hidden_layers": source.get_int("llama.block_count"),
        "num_attention_heads": source.get_int("llama.attention.head_count"),
        "num_key_value_heads": source.get_int("llama.attention.head_count_kv"),
        "max_position_embeddings": source.get_int("llama.context_length"),
        "rms_norm_eps": source.get_float("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": source.get_float("llama.rope.freq_base"),
        "tie_word_embeddings": "output.weight" not in source.tensors,
    }


def tokenizer_of(source: GGUFFile) -> dict[str, Any]:
    """tokenizer.json as SmolLM2 has it: single digits, then GPT-2's splitting."""
    tokens = source.metadata["tokenizer.ggml.tokens"]
    types = source.metadata["tokenizer.ggml.token_type"].tolist()
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {"id": i, "content": token, "special": True, **flags}
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind == CONTROL
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False}
    byte_level |= {"trim_offsets": True, "use_regex": True}
    splitting = [{"type": "Digits", "individual_digits": True}, byte_level]
    return {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splitting},
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": source.metadata["tokenizer.ggml.merges"],
        },
    }


def write_smollm2_directory(folder: Path) -> Path:
    folder.mkdir(parents=True)
    with GGUFFile(resolve("smollm2")) as source:
        tokens = source.metadata["tokenizer.ggml.tokens"]
        texts = {
            f"{name}_token": tokens[source.get_int(f"tokenizer.ggml.{name}_token_id")]
            for name in ("bos", "eos")
        }
        texts["chat_template"] = source.get_str("tokenizer.chat_template")
        files = {
            "config.json": config_of(source),
            "tokenizer.json": tokenizer_of(source),
            "tokenizer_config.json": texts,
        }
        write_sharded(
            folder, {name: stored(v, "BF16") for name, v in hf_tensors(source).items()}, 2
        )
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


if __name__ == "__main__":
    print(write_smollm2_directory(Path(sys.argv[1])))
