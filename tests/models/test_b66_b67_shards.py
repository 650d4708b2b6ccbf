"""A directory of a whole model with something wrong in its shards, plain and quantised."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli.commands import invar
from golden.quantised_form import FORMS
from golden.safetensors_writer import Tensor, file_bytes, safetensors_bytes
from models.test_quantised_checkpoints import logits, write_form

from invar.models.registry import build, open_directory
from invar.weights.hf_directory import INDEX

SHARDS = 3
SECOND = "model-00002-of-00003.safetensors"
LOST = "model.layers.1.post_attention_layernorm.weight"
UP = "model.layers.0.mlp.up_proj"


def sharded(folder: Path, form: str) -> Path:
    """The tiny model in a form, in three shards with an index."""
    write_form(folder, FORMS[form], shards=SHARDS)
    return folder


def header_and_data(path: Path) -> tuple[dict[str, dict[str, Any]], bytes]:
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def edit_header(path: Path, change: Callable[[dict[str, dict[str, Any]]], None]) -> None:
    header, data = header_and_data(path)
    change(header)
    path.write_bytes(file_bytes(header, data))


def edit_index(folder: Path, change: Callable[[dict[str, str]], None]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def add_file(folder: Path, name: str, tensors: dict[str, Tensor]) -> None:
    """Another shard that the index names."""
    (folder / name).write_bytes(safetensors_bytes(tensors))
    edit_index(folder, lambda weights: weights.update(dict.fromkeys(tensors, name)))


def cut(folder: Path) -> None:
    path = folder / SECOND
    path.write_bytes(path.read_bytes()[:-1024])


def long_header(folder: Path) -> None:
    path = folder / SECOND
    path.write_bytes((1 << 40).to_bytes(8, "little") + path.read_bytes()[8:])


def same_offsets(folder: Path) -> None:
    def change(header: dict[str, dict[str, Any]]) -> None:
        alike: dict[str, dict[str, Any]] = {}
        for name, entry in header.items():
            key = str((entry.get("dtype"), entry.get("shape")))
            if name != "__metadata__" and key in alike:
                entry["data_offsets"] = alike[key]["data_offsets"]
                return
            alike[key] = entry

    edit_header(folder / SECOND, change)


def lose(folder: Path) -> None:
    """A tensor that neither the index nor a shard has."""
    for path in folder.glob("*.safetensors"):
        header, data = header_and_data(path)
        if LOST not in header:
            continue
        start, end = header.pop(LOST)["data_offsets"]
        for name, entry in header.items():
            if name != "__metadata__" and entry["data_offsets"][0] >= end:
                entry["data_offsets"] = [at - (end - start) for at in entry["data_offsets"]]
        path.write_bytes(file_bytes(header, data[:start] + data[end:]))
    edit_index(folder, lambda weights: weights.pop(LOST) and None)


def stray(name: str) -> Callable[[Path], None]:
    extra: dict[str, Tensor] = {name: ("F32", (64,), np.ones(64, "<f4").tobytes())}
    return lambda folder: add_file(folder, "model-00004-of-00004.safetensors", extra)


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a shard is not there": (
        lambda folder: (folder / SECOND).unlink(),
        rf"1 of 3 shards are missing: {SECOND}",
    ),
    "a shard is short of 1 KB": (cut, rf"{SECOND}: .*cut short"),
    "a header longer than the file": (long_header, rf"{SECOND}: .*header would have"),
    "two tensors at one place": (same_offsets, rf"{SECOND}: .*(overlaps|hole)"),
    "a tensor is nowhere": (lose, r"blk\.1\.ffn_norm\.weight: the model file has no such tensor"),
    "a tensor that no model wants": (
        stray("model.layers.0.mlp.side_proj.weight"),
        r"model\.layers\.0\.mlp\.side_proj",
    ),
    "a tensor that another shard has as well": (
        lambda folder: edit_index(folder, lambda weights: weights.update({LOST + "x": SECOND})),
        rf"promises are missing: {LOST}x",
    ),
}


@pytest.mark.parametrize("form", ["awq 32", "fp8 rows"])
@pytest.mark.parametrize("what", DAMAGE)
def test_b66_a_damaged_directory_is_one_error_that_says_what_and_where(
    what: str, form: str, tmp_path: Path
) -> None:
    damage, message = DAMAGE[what]
    folder = sharded(tmp_path / "model", form)
    damage(folder)
    with pytest.raises(ValueError, match=message), open_directory(folder) as source:
        build(source)


def test_b66_a_command_says_it_in_one_line(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "model", "awq 32")
    (folder / SECOND).unlink()
    result = invar("run", str(folder), "-p", "x", "-n", "1")
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert f"1 of 3 shards are missing: {SECOND}" in line


def test_b66_a_single_file_beside_the_index_is_not_read(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "model", "awq 32")
    other: dict[str, Tensor] = {"x": ("F32", (1,), bytes(4))}
    (folder / "model.safetensors").write_bytes(safetensors_bytes(other))
    with open_directory(folder) as source:
        assert np.isfinite(logits(source, "exact")).all()


def test_b66_every_parameter_is_read_from_a_shard(tmp_path: Path) -> None:
    """What the graph reads is what the shards hold, each tensor once, in any number of shards."""
    sharded(tmp_path / "three", "awq 32")
    write_form(tmp_path / "one", FORMS["awq 32"])
    with open_directory(tmp_path / "three") as three, open_directory(tmp_path / "one") as one:
        assert build(three).weight_names() == set(three.tensors) == set(one.tensors)
        for name in one.tensors:
            np.testing.assert_array_equal(three.raw(name), one.raw(name))


@pytest.mark.parametrize("names", [("a", "z"), ("z", "a")])
def test_b67_of_two_copies_the_one_that_the_index_names_counts(
    names: tuple[str, str], tmp_path: Path
) -> None:
    """Two shards hold the scales of a weight, with other values, whatever the files are called."""
    part, norm = f"{UP}.scales", "model.norm.weight"
    folder = tmp_path / "model"
    write_form(folder, FORMS["awq 32"])
    header, data = header_and_data(folder / "model.safetensors")
    first, second = (f"{name}.safetensors" for name in names)
    (folder / "model.safetensors").rename(folder / first)
    del header["__metadata__"]
    copies: dict[str, Tensor] = {}
    for name in (part, norm):
        start, end = header[name]["data_offsets"]
        copies[name] = (header[name]["dtype"], header[name]["shape"], data[start:end])
    scales = np.frombuffer(copies[part][2], "<f2")
    copies[part] = (*copies[part][:2], (scales * 3).astype("<f2").tobytes())
    (folder / second).write_bytes(safetensors_bytes(copies))
    weights = dict.fromkeys(header, first) | {norm: second}
    found = []
    for chosen in (first, second):
        for order in (1, -1):
            weight_map = {name: (weights | {part: chosen})[name] for name in list(weights)[::order]}
            (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
            with open_directory(folder) as source:
                found.append(source.dequantize("blk.0.ffn_up.weight"))
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[2], found[3])
    np.testing.assert_allclose(found[2], 3 * found[0], rtol=2e-3)
    assert found[0].any()
