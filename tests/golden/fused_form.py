"""Tensors of several weights as directories have them, from one tensor for each weight.

The opposite of what `gguf_names.py` does; the layouts are those of `transformers`' models.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Tensors = dict[str, Floats]


def fused(tensors: Tensors, architecture: str) -> Tensors:
    """tensors: of single weights, named as in most families."""
    if architecture == "gpt-oss":
        return gpt_oss(tensors)
    if architecture == "llama4":
        return llama4(tensors)
    if architecture == "deepseek2":
        return deepseek(tensors)
    return tensors


def gpt_oss(tensors: Tensors) -> Tensors:
    """Rows of gate and up alternate; matrices are [in, out]."""
    found: Tensors = {}
    for name, values in tensors.items():
        if name.endswith("sinks.weight"):
            found[name.removesuffix(".weight")] = values
        elif ".experts.gate_proj." in name:
            up = tensors[name.replace(".gate_proj.", ".up_proj.")]
            together = np.stack([values, up], axis=2).reshape(len(values), -1, *values.shape[2:])
            found[expert_name(name, "gate_up_proj")] = turned(together)
        elif ".experts.down_proj." in name:
            found[expert_name(name, "down_proj")] = turned(values)
        elif ".experts.up_proj." not in name:
            found[name.replace(".mlp.gate.", ".mlp.router.")] = values
    return found


def llama4(tensors: Tensors) -> Tensors:
    """Rows of gate before those of up; matrices are [in, out]."""
    found: Tensors = {}
    for name, values in tensors.items():
        theirs = name.replace(".mlp.gate.", ".mlp.router.").replace(".mlp.", ".feed_forward.")
        if ".experts.gate_proj." in name:
            up = tensors[name.replace(".gate_proj.", ".up_proj.")]
            found[expert_name(theirs, "gate_up_proj")] = turned(np.concatenate([values, up], 1))
        elif ".experts.down_proj." in name:
            found[expert_name(theirs, "down_proj")] = turned(values)
        elif ".experts.up_proj." not in name:
            found[theirs] = values
    return found


def deepseek(tensors: Tensors) -> Tensors:
    """A head's rows for its key and then those for its value; a tensor for each expert."""
    found: Tensors = {}
    for name, values in tensors.items():
        theirs = name.replace(".shared_expert.", ".shared_experts.")
        if ".k_b_proj." in name:
            by_head = [values.swapaxes(1, 2), tensors[name.replace(".k_b_", ".v_b_")]]
            together = np.concatenate(by_head, axis=1)
            theirs = name.replace(".k_b_", ".kv_b_")
            found[theirs] = together.reshape(-1, together.shape[-1])
        elif ".experts." in name:
            for expert, matrix in enumerate(values):
                found[name.replace(".experts.", f".experts.{expert}.")] = matrix
        elif ".v_b_proj." not in name:
            found[theirs] = values
    return found


def expert_name(name: str, part: str) -> str:
    """`….experts.gate_proj.bias` → `….experts.gate_up_proj_bias`."""
    stem, _, kind = name.rpartition(".")
    ending = "_bias" if kind == "bias" else ""
    return f"{stem.rpartition('.')[0]}.{part}{ending}"


def turned(values: Floats) -> Floats:
    return values if values.ndim < 3 else np.ascontiguousarray(values.swapaxes(1, 2))
