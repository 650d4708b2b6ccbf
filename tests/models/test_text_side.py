"""Models that see too: their language model runs, with one notice, whatever weights are called."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from golden.families import family_directory
from golden.hf_form import write_hf_directory
from golden.safetensors_writer import Tensor, safetensors_bytes

from invar.models.gemma3 import HF
from invar.models.metadata import ConfigError
from invar.models.registry import build, open_directory
from invar.weights.safetensors import SafetensorsFile

OUTER = "model.language_model."


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    file = SafetensorsFile(folder / "model.safetensors")
    return {
        key: (info.dtype, info.shape, file.raw(key).tobytes()) for key, info in file.tensors.items()
    }


def write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    return folder


def published(name: str) -> str:
    """As files of 2025 call it."""
    if name.startswith(OUTER):
        return name.replace(OUTER, "language_model.model.")
    return name.removeprefix("model.")


def test_older_names_are_the_same_model(tmp_path: Path) -> None:
    folder = family_directory("gemma3_vision")
    tensors = {published(name): tensor for name, tensor in stored_tensors(folder).items()}
    assert "language_model.model.embed_tokens.weight" in tensors
    config = json.loads((folder / "config.json").read_text())
    older = write(tmp_path / "x", config, tensors)
    with open_directory(older) as source, open_directory(folder) as usual:
        assert build(source) == build(usual)
        assert source.tensors.keys() == usual.tensors.keys()
        assert not any("vision" in name for name in source.tensors)


def test_what_the_configuration_leaves_out_is_as_by_default(tmp_path: Path) -> None:
    """Gemma 3's published models that see tell little of their text model."""
    folder = family_directory("gemma3_vision")
    config = json.loads((folder / "config.json").read_text())
    text, defaults = config["text_config"], dict(HF.defaults)
    shapes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    kept = {name: text[name] for name in (*shapes, "num_key_value_heads", "head_dim")}
    kept |= {"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    full = kept | defaults | kept | {"layer_types": text["layer_types"]}
    del full["rope_scaling"], full["rope_theta"]
    full["rope_parameters"] = text["rope_parameters"]
    tensors = stored_tensors(folder)
    brief = write(tmp_path / "brief", {"model_type": "gemma3", "text_config": kept}, tensors)
    told = write(tmp_path / "told", {"model_type": "gemma3", "text_config": full}, tensors)
    with open_directory(brief) as source, open_directory(told) as usual:
        assert build(source) == build(usual)


def test_one_notice_says_that_images_are_not_supported(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING, "invar"),
        open_directory(family_directory("gemma3_vision")) as source,
    ):
        build(source)
    assert [record.getMessage() for record in caplog.records] == [
        "gemma3_vision: images are not supported yet; of this model that sees too, the language "
        "model is run"
    ]


def test_mistral3_is_the_mistral_inside(tmp_path: Path) -> None:
    folder = write_hf_directory("mistral_window", tmp_path / "text")
    text = json.loads((folder / "config.json").read_text()) | {"model_type": "mistral"}
    tensors = {
        re.sub("^", "language_model.", name): tensor
        for name, tensor in stored_tensors(folder).items()
    }
    tensors["vision_tower.patch_conv.weight"] = ("F32", (1,), b"\0\0\0\0")
    tensors["multi_modal_projector.norm.weight"] = ("F32", (1,), b"\0\0\0\0")
    config = {"model_type": "mistral3", "text_config": text, "vision_config": {}}
    with (
        open_directory(write(tmp_path / "whole", config, tensors)) as source,
        open_directory(folder) as alone,
    ):
        assert build(source) == build(alone)
        for name in alone.tensors:
            assert source.raw(name).tobytes() == alone.raw(name).tobytes()


def test_a_model_that_does_not_see_is_what_its_configuration_says(tmp_path: Path) -> None:
    folder = write_hf_directory("llama_gqa", tmp_path / "text")
    config = json.loads((folder / "config.json").read_text())
    inner = {"text_config": {"hidden_size": 8, "rope_theta": 5.0}}
    tensors = stored_tensors(folder)
    with (
        open_directory(write(tmp_path / "x", config | inner, tensors)) as source,
        open_directory(folder) as alone,
    ):
        assert source.metadata == alone.metadata
        assert build(source) == build(alone)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"text_config": {"model_type": "qwen9"}}, "text_config: model_type 'qwen9' is not supp"),
        ({"text_config": {"model_type": ["x"]}}, "text_config: model_type .* is not supported"),
        (
            {"text_config": {"model_type": "gemma3_text", "use_bidirectional_attention": True}},
            "use_bidirectional_attention is not supported",
        ),
    ],
)
def test_what_is_not_built_is_named(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    tensors = stored_tensors(family_directory("gemma3_vision"))
    folder = write(tmp_path / "x", {"model_type": "gemma3", **config}, tensors)
    with pytest.raises(ConfigError, match=message):
        open_directory(folder)
