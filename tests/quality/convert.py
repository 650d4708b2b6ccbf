"""A GGUF model of the Llama family as quantised checkpoints in Hugging Face layout.

    PYTHONPATH=tests:. python tests/quality/convert.py MODEL.gguf FOLDER 'awq 64' 'gptq 4 64' …

Weights are those of the file, dequantised, and quantised again without calibration, in the forms of
`golden/quantised_form.py` ("bf16": not at all); embedding, norms and head stay in bf16. The
tokenizer is the file's: pass it as `tokenizer`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from golden.hf_form import hf_tensors
from golden.quantised_form import FORMS
from golden.safetensors_writer import Tensor, stored, write_sharded

from invar.weights.gguf import GGUFFile

PLAIN = "bf16"


def llama_config(source: GGUFFile) -> dict[str, Any]:
    def key(name: str) -> Any:
        value = source.metadata[f"llama.{name}"]
        return value.item() if isinstance(value, np.generic) else value

    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": key("embedding_length"),
        "intermediate_size": key("feed_forward_length"),
        "num_hidden_layers": key("block_count"),
        "num_attention_heads": key("attention.head_count"),
        "num_key_value_heads": key("attention.head_count_kv"),
        "max_position_embeddings": key("context_length"),
        "rms_norm_eps": key("attention.layer_norm_rms_epsilon"),
        "rope_theta": key("rope.freq_base"),
        "vocab_size": source.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in source.tensors,
        "hidden_act": "silu",
    }


def convert(model: Path, folder: Path, names: list[str]) -> list[Path]:
    """A directory for each form; those that are there already are left alone."""
    written = []
    with GGUFFile(model) as source:
        config, values = llama_config(source), hf_tensors(source)
    for name in names:
        target = folder / name.replace(" ", "-")
        written.append(target)
        if (target / "config.json").exists():
            continue
        target.mkdir(parents=True, exist_ok=True)
        tensors: dict[str, Tensor] = {}
        for tensor, array in values.items():
            if name == PLAIN or "_proj.weight" not in tensor:
                tensors[tensor] = stored(array, "BF16")
            else:
                tensors |= FORMS[name].write(tensor.removesuffix(".weight"), array).tensors
        write_sharded(target, tensors, 1)
        settings = {} if name == PLAIN else {"quantization_config": dict(FORMS[name].settings)}
        (target / "config.json").write_text(json.dumps(config | settings))
    return written


if __name__ == "__main__":
    for path in convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]):
        print(path)
