"""The tiny models as Hugging Face directories: the tensors of their GGUF files, as they were.

config.json beside each model is the one that `transformers` saved; the rest undoes here what
`gguf_names.py` did when the GGUF file was made.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
from golden.fused_form import fused
from golden.gguf_names import IN_BLOCK, NORMS_IN_BLOCK, TOP_LEVEL
from golden.safetensors_writer import stored, write_sharded
from golden.tiny_models import HERE, model_path
from golden.tiny_tokenizer import hf_files

from invar.weights.gguf import GGUFFile

Floats = npt.NDArray[np.float32]


def hf_name(name: str, architecture: str) -> str:
    """`blk.0.attn_q.weight` → `model.layers.0.self_attn.q_proj.weight`."""
    stem, _, kind = name.rpartition(".")
    top = {ours: theirs for theirs, ours in TOP_LEVEL.items()}
    if stem in top:
        return f"{top[stem]}.{kind}"
    if stem.endswith("exp_probs_b"):
        return f"model.layers.{stem.split('.')[1]}.mlp.gate.e_score_correction_bias"
    inside = {ours: theirs for theirs, ours in (IN_BLOCK | NORMS_IN_BLOCK[architecture]).items()}
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{inside[part]}.{kind}"


def halves(rows: Floats, heads: int) -> Floats:
    """Rows of q or k whose rotated pairs are neighbours, in the order of Hugging Face again."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def hf_tensors(source: GGUFFile) -> dict[str, Floats]:
    architecture = str(source.metadata["general.architecture"])
    counts = {
        "attn_q": source.get_int(f"{architecture}.attention.head_count"),
        "attn_k": source.get_int(f"{architecture}.attention.head_count_kv"),
    }
    found = {}
    for name in source.tensors:
        if name == "rope_freqs.weight":
            continue  # config.json says it
        values = source.dequantize(name).copy()
        part = name.split(".")[-2]
        if architecture == "llama" and part in counts:
            values = halves(values, counts[part])
        if architecture == "gemma3" and name.endswith("norm.weight"):
            values -= 1
        theirs = hf_name(name, architecture)
        if ".experts." in theirs and architecture not in FUSED:
            for expert, matrix in enumerate(values):
                found[expert_name(theirs, expert, architecture)] = matrix
        elif architecture == "llama":
            found[theirs.replace(".mlp.gate.", ".block_sparse_moe.gate.")] = values
        elif ".shared_expert_gate." in theirs:
            found[theirs] = values.reshape(1, -1)
        else:
            found[theirs] = values
    return fused(found, architecture)


FUSED = ("deepseek2", "gpt-oss", "llama4")  # whose experts `fused_form.py` writes
MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def expert_name(name: str, expert: int, architecture: str) -> str:
    """Each expert has matrices of its own; Mixtral has its own names for them."""
    name = name.replace(".experts.", f".experts.{expert}.")
    if architecture != "llama":
        return name
    stem, part, kind = name.replace(".mlp.", ".block_sparse_moe.").rsplit(".", 2)
    return f"{stem}.{MIXTRAL[part]}.{kind}"


def write_hf_directory(name: str, folder: Path, dtype: str = "F32", shards: int = 1) -> Path:
    """The tiny model `name` in `folder`, which is made; returns it."""
    folder.mkdir(parents=True)
    with GGUFFile(model_path(name)) as source:
        tensors = {key: stored(v, dtype) for key, v in hf_tensors(source).items()}
    write_sharded(folder, tensors, shards)
    (folder / "config.json").write_bytes((HERE / f"{name}.json").read_bytes())
    for file, content in hf_files().items():
        (folder / file).write_text(json.dumps(content))
    return folder
