"""Safetensors files and directories, well-formed and hostile (B66, B67)."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden.safetensors_writer import file_bytes, safetensors_bytes, stored, write_sharded

from invar.weights.hf_directory import INDEX, SINGLE, HFDirectory
from invar.weights.safetensors import BITS, SafetensorsError, SafetensorsFile, read_json

VALUES = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.array([0.5, -2.0, 3.0], np.float32),
    "c": np.array([[7.0]], np.float32),
}
TENSORS = {name: stored(values, "F32") for name, values in VALUES.items()}
ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.fixture
def opened(tmp_path: Path) -> Callable[[bytes], SafetensorsFile]:
    def open_bytes(content: bytes) -> SafetensorsFile:
        (tmp_path / "x.safetensors").write_bytes(content)
        return SafetensorsFile(tmp_path / "x.safetensors")

    return open_bytes


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_values_come_back(opened: Any, dtype: str) -> None:
    tensors = {name: stored(values, dtype) for name, values in VALUES.items()}
    file = opened(safetensors_bytes(tensors))
    assert list(file.tensors) == list(VALUES)
    for name, (_, shape, raw) in tensors.items():
        assert file.tensors[name].shape == tuple(shape)
        assert file.raw(name).tobytes() == raw


def test_a_tensor_is_aligned_to_its_elements_wherever_it_lies(opened: Any) -> None:
    tensors = {"byte": ("U8", [3], b"abc"), "f": TENSORS["b"]}
    found = opened(safetensors_bytes(tensors)).raw("f")
    assert found.ctypes.data % 4 == 0
    np.testing.assert_array_equal(found.view(np.float32), VALUES["b"])


def test_a_file_that_shrinks_is_not_read_any_further(opened: Any) -> None:
    file = opened(safetensors_bytes(TENSORS))
    os.truncate(file.path, 16)
    with pytest.raises(SafetensorsError, match=r"x.safetensors: tensor a: the file had \d+ bytes"):
        file.raw("a")


def with_entry(**changes: Any) -> bytes:
    return file_bytes({"x": ENTRY | changes}, bytes(8))


def without(key: str) -> bytes:
    return file_bytes({"x": {k: v for k, v in ENTRY.items() if k != key}}, bytes(8))


HUGE = 2**31
NESTED = b'{"x":' * 100_000

HOSTILE = {
    "empty": (b"", "empty"),
    "shorter than a length": (b"\x08\0\0", "header would have"),
    "header beyond the file": ((2**40).to_bytes(8, "little") + b"{}", "header would have"),
    "header of 2^64": (b"\xff" * 8 + b"{}", "header would have"),
    "no JSON": (file_bytes(b"{nonsense", b""), "is not JSON"),
    "not UTF-8": (file_bytes(b'{"\xff":1}', b""), "is not JSON"),
    "a list": (file_bytes(b"[]", b""), "no JSON object but list"),
    "nested deeply": (file_bytes(NESTED, b""), "nested too deeply"),
    "a name twice": (file_bytes(b'{"x":1,"x":2}', b""), "x stands there twice"),
    "an entry that is no object": (file_bytes({"x": 3}, b""), "expected dtype"),
    "no dtype": (without("dtype"), "expected dtype"),
    "no offsets": (without("data_offsets"), "expected dtype"),
    "an unknown dtype": (with_entry(dtype="Q4"), "dtype Q4 is not known"),
    "a dtype that is a list": (with_entry(dtype=["F32"]), r"dtype \['F32'\] is not known"),
    "a negative size": (with_entry(shape=[-2]), "is not a list of up to 8 sizes"),
    "a size that is true": (with_entry(shape=[True]), "is not a list of up to 8 sizes"),
    "a size of a float": (with_entry(shape=[2.0]), "is not a list of up to 8 sizes"),
    "too many dimensions": (with_entry(shape=[1] * 100), "is not a list of up to 8 sizes"),
    "a product that wraps": (with_entry(shape=[HUGE, HUGE, 4]), "takes"),
    "a shape larger than its bytes": (with_entry(shape=[3]), "takes 12 bytes"),
    "offsets that run backwards": (with_entry(data_offsets=[8, 0]), "takes 8 bytes"),
    "one offset": (with_entry(data_offsets=[8]), "not two offsets"),
    "bytes beyond the file": (with_entry(shape=[4], data_offsets=[0, 16]), "cut short"),
    "a hole at the start": (
        file_bytes({"x": ENTRY | {"shape": [1], "data_offsets": [4, 8]}}, bytes(8)),
        "leaves a hole behind the header",
    ),
    "overlapping tensors": (file_bytes({"x": ENTRY, "y": ENTRY}, bytes(8)), "y overlaps x"),
    "something behind": (file_bytes({"x": ENTRY}, bytes(12)), "4 bytes follow"),
    "glued": (safetensors_bytes(TENSORS) * 2, "bytes follow the last tensor"),
    "an LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid", "pointer of Git LFS"),
    "a web page": (b"<!DOCTYPE html><html>", "web page"),
    "a pickle": (b"\x80\x02}q\x00", "pickle"),
    "a zip of PyTorch": (b"PK\x03\x04" + bytes(60), "pickle"),
    "a GGUF file": (b"GGUF" + bytes(60), "GGUF"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_b66_a_hostile_file_gives_one_clear_error(opened: Any, what: str) -> None:
    content, message = HOSTILE[what]
    with pytest.raises(SafetensorsError, match=message) as caught:
        opened(content)
    assert "x.safetensors" in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_file_cut_anywhere_gives_one_clear_error(opened: Any) -> None:
    whole = safetensors_bytes(TENSORS)
    for length in range(len(whole)):
        with pytest.raises(SafetensorsError):
            opened(whole[:length])
    opened(whole)


def test_random_headers_give_a_tensor_or_one_kind_of_error(opened: Any) -> None:
    random = np.random.default_rng(0)
    whole = safetensors_bytes(TENSORS)
    length = int.from_bytes(whole[:8], "little")
    for _ in range(300):
        damaged = bytearray(whole)
        for place in random.integers(0, 8 + length, 3):
            damaged[place] = random.integers(256)
        try:
            file = opened(bytes(damaged))
        except SafetensorsError:
            continue
        for name, tensor in file.tensors.items():
            bits = int(np.prod(tensor.shape, dtype=object)) * BITS[tensor.dtype]
            assert file.raw(name).size == tensor.nbytes == bits // 8


# ---------------------------------------------------------------- directories


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def refused(folder: Path, message: str) -> None:
    with pytest.raises(SafetensorsError, match=message):
        HFDirectory(folder)


def rewrite_index(folder: Path, change: Callable[[dict[str, str]], None]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_tensors_of_all_shards(folder: Path, shards: int) -> None:
    write_sharded(folder, TENSORS, shards)
    directory = HFDirectory(folder)
    assert {name: directory.raw(name).tobytes() for name in directory.tensors} == {
        name: raw for name, (_, _, raw) in TENSORS.items()
    }
    assert len(directory.weight_paths) == shards
    directory.close()


def test_b66_missing_and_damaged_shards_are_listed(folder: Path) -> None:
    write_sharded(folder, TENSORS, 3)
    second = folder / "model-00002-of-00003.safetensors"
    content = second.read_bytes()
    second.write_bytes(content[:-1])
    refused(folder, f"{second.name}: .*cut short")
    second.unlink()
    refused(folder, f"1 of 3 shards are missing: {second.name}")


def test_b67_the_index_decides_which_copy_counts(folder: Path) -> None:
    """Two shards hold `a`; whatever their order, it is read from the one that is named."""
    first, second = stored(VALUES["a"], "F32"), stored(VALUES["a"] + 1, "F32")
    (folder / "one.safetensors").write_bytes(safetensors_bytes({"a": first, "b": TENSORS["b"]}))
    (folder / "two.safetensors").write_bytes(safetensors_bytes({"a": second}))
    for named, expected in (("one", first), ("two", second)):
        weight_map = {"b": "one.safetensors", "a": f"{named}.safetensors"}
        for order in (list(weight_map), list(weight_map)[::-1]):
            index = {"weight_map": {name: weight_map[name] for name in order}}
            (folder / INDEX).write_text(json.dumps(index))
            assert HFDirectory(folder).raw("a").tobytes() == expected[2]


def test_b66_tensors_that_are_missing_or_not_in_the_index(folder: Path) -> None:
    write_sharded(folder, TENSORS, 2)
    rewrite_index(folder, lambda found: found.update(z=found["a"]))
    refused(folder, rf"1 tensors that {INDEX} promises are missing: z")
    rewrite_index(folder, lambda found: found.pop("z") and found.pop("c") and None)
    refused(folder, rf"holds tensors that {INDEX} does not know: c")


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "x.bin", 7, None])
def test_an_index_cannot_point_elsewhere(folder: Path, name: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    refused(folder, "expected the name of a .safetensors file")


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": []}', '{"weight_map": {}}', ""])
def test_an_index_that_is_none(folder: Path, content: str) -> None:
    (folder / INDEX).write_text(content)
    refused(folder, INDEX)


def test_b66_a_single_file_beside_an_index_is_not_read_and_said(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_sharded(folder, TENSORS, 2)
    (folder / SINGLE).write_bytes(safetensors_bytes({"other": TENSORS["a"]}))
    with caplog.at_level(logging.WARNING, "invar"):
        assert set(HFDirectory(folder).tensors) == set(TENSORS)
    assert SINGLE in caplog.text


def test_directories_without_weights_say_what_they_lack(folder: Path) -> None:
    refused(folder, "there are no weights")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02")
    refused(folder, "pickles .pytorch_model.bin.*never opened")
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"")
    refused(folder, f"no {INDEX}")
    (folder / "config.json").write_text('{"a": 1, "a": 2}')
    refused(folder, "config.json.*stands there twice")
    (folder / "config.json").unlink()
    refused(folder, "there is no file")


def test_a_name_twice_behind_many_others_is_found_at_once() -> None:
    """In one pass: with a pass per name, a header of these would take minutes."""
    names = [*range(200_000), 199_999]
    header = "{" + ",".join(f'"{name}":1' for name in names) + "}"
    start = time.process_time()
    with pytest.raises(SafetensorsError, match="199999 stands there twice"):
        read_json(header.encode(), "x")
    assert time.process_time() - start < 10
