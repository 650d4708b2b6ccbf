"""Granite 4: what its configuration may ask for beside the dense model, and what GGUF calls it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from golden.families import family_config, family_directory
from models.memory_source import MemorySource

from invar.graph.operations import ApplyRope
from invar.models.metadata import ConfigError
from invar.models.registry import build, open_directory


def changed(folder: Path, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(family_config("granite4") | changes))
    weights = family_directory("granite4") / "model.safetensors"
    (folder / weights.name).write_bytes(weights.read_bytes())
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["mamba", "attention"]}, r"layer_types are \['mamba', .* attention"),
        ({"layer_types": None}, "layer_types are None"),
        ({"num_local_experts": 8}, "num_local_experts is 8; .* without experts alone"),
    ],
)
def test_other_models_of_the_family_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_directory(changed(tmp_path, **changes))


@pytest.mark.parametrize("word", [None, "nope"])
def test_positions_are_left_out_unless_the_configuration_has_rope(
    word: str | None, tmp_path: Path
) -> None:
    path = changed(tmp_path, position_embedding_type=word, layer_types=["attention"] * 2)
    with open_directory(path) as source:
        assert not any(isinstance(op, ApplyRope) for op in build(source).ops)


def test_the_hybrid_of_gguf_is_refused_with_its_near_ones() -> None:
    with pytest.raises(ConfigError, match="'granitehybrid' is not supported; near ones: granite"):
        build(MemorySource({"general.architecture": "granitehybrid"}, {}))
