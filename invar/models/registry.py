"""From a model file to its graph, by the architecture that the file names."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from invar.graph.graph import Graph, GraphError
from invar.models.metadata import ConfigError, ModelSource, brief
from invar.models.rope import ROPE_TENSORS
from invar.models.text_side import TEXT_CONFIG, sees

if TYPE_CHECKING:
    from invar.models.gguf_source import Fused
    from invar.models.hf import Config, HFFamily
    from invar.models.hf_source import HFSource
    from invar.weights.gguf import GGUFFile

# Modules of this folder and what to take from them: a start reads the family of its model alone.
ARCHITECTURES: Mapping[str, str] = {
    "chatglm": "glm4.build_chatglm",
    "deepseek2": "deepseek2.build",
    "gemma": "gemma.build",
    "gemma2": "gemma2.build",
    "gemma3": "gemma3.build",
    "glm4": "glm4.build",
    "gpt-oss": "gpt_oss.build",
    "gpt2": "gpt2.build",
    "gptneox": "gpt_neox.build",
    "granite": "granite.build",
    "llama": "llama.build",
    "llama4": "llama4.build",
    "olmo2": "olmo2.build",
    "phi3": "phi3.build",
    "qwen2": "qwen.build_qwen2",
    "qwen2moe": "qwen_moe.build_qwen2",
    "qwen3": "qwen.build_qwen3",
    "qwen3moe": "qwen_moe.build_qwen3",
    "smollm3": "smollm3.build",
}
MODEL_TYPES: Mapping[str, str] = {
    "deepseek_v2": "deepseek2_files.HF",
    "deepseek_v3": "deepseek2_files.HF",
    "gemma": "gemma.HF",
    "gemma2": "gemma2.HF",
    "gemma3": "gemma3.HF",
    "gemma3_text": "gemma3.HF",
    "glm": "glm4.HF_GLM",
    "glm4": "glm4.HF",
    "gpt2": "gpt2.HF",
    "gpt_neox": "gpt_neox.HF",
    "gpt_oss": "gpt_oss.HF",
    "granite": "granite.HF",
    "granitemoehybrid": "granite.HF_GRANITE4",
    "llama": "llama.HF",
    "llama4": "llama4.HF",
    "llama4_text": "llama4.HF",
    "mistral": "llama.HF",
    "mistral3": "llama.HF",
    "mixtral": "llama.HF",
    "olmo2": "olmo2.HF",
    "phi3": "phi3.HF",
    "qwen2": "qwen.QWEN2",
    "qwen2_moe": "qwen_moe.HF_QWEN2",
    "qwen3": "qwen.QWEN3",
    "qwen3_moe": "qwen_moe.HF_QWEN3",
    "smollm3": "smollm3.HF",
}

FUSED: Mapping[str, str] = {
    "chatglm": "glm4.FUSED",
    "deepseek2": "deepseek2_files.FUSED",
    "glm4": "glm4.FUSED",
    "phi3": "phi3.FUSED",
}
"""Architectures whose GGUF files store several weights as one, besides `gguf_source.OF_ANY`."""

ARCHITECTURE_KEY = "general.architecture"


def open_directory(path: Path) -> HFSource:
    """A model in Hugging Face layout. Raises `SafetensorsError` or `ConfigError`."""
    from invar.models.hf_source import HFSource

    return HFSource(path, family_of)


def open_gguf(path: Path) -> GGUFFile:
    """A model in GGUF form. Raises `GGUFError`, or `ConfigError` where weights that are stored as
    one do not come apart."""
    from invar.models.gguf_source import GGUFSource

    return GGUFSource(path, lambda metadata: fused_of(metadata.get(ARCHITECTURE_KEY)))


def fused_of(architecture: object) -> Fused:
    """Tensors of GGUF that hold several weights of this architecture, and where these go."""
    if not isinstance(architecture, str) or architecture not in FUSED:
        return {}
    fused: Fused = named(FUSED[architecture])
    return fused


def named(place: str) -> Any:
    module, _, name = place.partition(".")
    return getattr(import_module(f"invar.models.{module}"), name)


def family_of(config: Config) -> HFFamily:
    """The family that a config.json is of, by its model_type."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ConfigError(f"config.json: model_type must be a string, found {brief(model_type)}")
    if model_type not in MODEL_TYPES:
        raise ConfigError(f"config.json: model_type {not_supported(model_type, MODEL_TYPES)}")
    if sees(config):
        inner = config[TEXT_CONFIG].get("model_type", model_type)
        if not isinstance(inner, str) or inner not in MODEL_TYPES:
            wrong = not_supported(str(inner), MODEL_TYPES)
            raise ConfigError(f"config.json: {TEXT_CONFIG}: model_type {wrong}")
        model_type = inner
    family: HFFamily = named(MODEL_TYPES[model_type])
    return family


def build(source: ModelSource) -> Graph:
    """The graph of a model.

    Raises `ConfigError` (architecture or metadata) or `GraphError` (a tensor that is missing, has
    the wrong shape or has no place in the architecture).
    """
    name = source.metadata.get(ARCHITECTURE_KEY)
    if name is None:
        raise ConfigError(
            f"the model's metadata has no {ARCHITECTURE_KEY}, expected a string; "
            "is this file a language model?"
        )
    if not isinstance(name, str):
        found = f"{type(name).__name__} {brief(name)}"
        raise ConfigError(f"{ARCHITECTURE_KEY} must be a string, found {found}")
    if name not in ARCHITECTURES:
        raise ConfigError(f"architecture {not_supported(name, ARCHITECTURES)}")
    build_family: Callable[[ModelSource], Graph] = named(ARCHITECTURES[name])
    graph = build_family(source)
    _refuse_unused_tensors(source, graph, name)
    return graph


def not_supported(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"; near ones: {', '.join(near)}" if near else ""
    return f"{brief(name)!r} is not supported{hint} (supported: {', '.join(known)})"


def _refuse_unused_tensors(source: ModelSource, graph: Graph, architecture: str) -> None:
    """A tensor that nothing reads means that the file is another model than it says."""
    used = graph.weight_names() | ROPE_TENSORS
    unused = sorted(source.tensors.keys() - used)
    if not unused:
        return
    near = difflib.get_close_matches(unused[0], used, n=1, cutoff=0.6)
    hint = f" (nearest that is known: {near[0]})" if near else ""
    others = f" and {len(unused) - 1} others" if len(unused) > 1 else ""
    raise GraphError(
        f"{unused[0]}{hint}{others}: the architecture {architecture!r} has no place for it; "
        "the file is of another model or was converted wrongly"
    )
