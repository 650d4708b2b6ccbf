"""Damaged and hostile GGUF files: one clear error, at once, in little memory."""

from __future__ import annotations

import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_bytes import (
    ARRAY,
    BOOL,
    F32,
    I32,
    STRING,
    U8,
    U16,
    array,
    gguf,
    key,
    small_file,
    strings,
    tensor,
    text,
    u32,
    write,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from invar.weights.formats import QuantType
from invar.weights.gguf import GGUFError, GGUFFile
from invar.weights.gguf_writer import GGUFWriter

TIME_LIMIT_S = 1.0
MEMORY_LIMIT_BYTES = 4 << 20

DATA = bytes(256)


def refuse(path: Path, content: bytes, match: str) -> None:
    """Opening fails with one GGUFError that starts with the file name, soon, in little memory."""
    write(path, content)
    tracemalloc.start()
    start = time.perf_counter()
    try:
        with pytest.raises(GGUFError, match=match) as caught:
            GGUFFile(path)
        seconds = time.perf_counter() - start
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert str(caught.value).startswith(f"{path.name}: ")
    assert len(str(caught.value)) < 1000
    assert seconds < TIME_LIMIT_S
    assert peak_bytes < MEMORY_LIMIT_BYTES


def alignment(value: int) -> list[bytes]:
    return [u32("general.alignment", value)]


B59_FILES: dict[str, tuple[bytes, str]] = {
    "f32 product wraps to 2^64 - 4": (
        gguf([], [tensor("w", (2147483647, 2147483649))], DATA),
        "tensor w: shape .* does not fit",
    ),
    "i8 product is negative in 64 bits": (
        gguf([], [tensor("w", (1 << 62, 3), kind=24)], DATA),
        "tensor w: shape .* does not fit",
    ),
    "four dimensions of 2^63": (
        gguf([], [tensor("w", (1 << 63,) * 4)], DATA),
        "tensor w: shape .* does not fit",
    ),
    "a dimension of zero": (gguf([], [tensor("w", (0, 4))], DATA), r"tensor w: shape \(4, 0\)"),
    "2^60 tensors": (gguf([], [], DATA, tensor_count=1 << 60), "announces 1152921504606846976 ten"),
    "2^60 keys": (gguf([], [], DATA, key_count=1 << 60), "announces 1152921504606846976 keys"),
    "offset past the end": (
        gguf([], [tensor("w", offset=1 << 20)], DATA),
        "tensor w: its data end at byte .*cut short",
    ),
    "offset that wraps": (
        gguf([], [tensor("w", offset=(1 << 64) - 32)], DATA),
        "tensor w: its data end at byte",
    ),
    "offset not aligned": (
        gguf([], [tensor("w", offset=8)], DATA),
        "tensor w: offset 8 is not a multiple of the alignment 32",
    ),
    "overlap": (
        gguf([], [tensor("v", (16,)), tensor("w", (16,), offset=32)], DATA),
        "tensor w overlaps tensor v",
    ),
    "same bytes twice": (gguf([], [tensor("v"), tensor("w")], DATA), "tensor w overlaps tensor v"),
    "alignment 0": (gguf(alignment(0), [tensor("w")], DATA), "key general.alignment: 0 is not"),
    "alignment 3": (gguf(alignment(3), [tensor("w")], DATA), "key general.alignment: 3 is not"),
    "alignment 2^31": (
        gguf(alignment(1 << 31), [tensor("w")], DATA),
        "key general.alignment: 2147483648 is not",
    ),
    "tensor twice": (gguf([], [tensor("w"), tensor("w", offset=32)], DATA), "tensor w is there tw"),
    "long key twice": (gguf([u32("k" * 65535, 1)] * 2, [], DATA), "key kkk.* … .*k is there twice"),
    "key twice": (gguf([u32("k", 1), u32("k", 2)], [], DATA), "key k is there twice"),
}


@pytest.mark.parametrize(("content", "match"), B59_FILES.values(), ids=B59_FILES)
def test_b59_sizes_that_wrap_or_lie(tmp_path: Path, content: bytes, match: str) -> None:
    refuse(tmp_path / "hostile.gguf", content, match)


B60_KEYS: dict[str, tuple[bytes, Callable[[GGUFFile], Any], str]] = {
    "scores as uint8": (
        key("tokenizer.ggml.scores", ARRAY, array(U8, 3, b"abc")),
        lambda model: model.get_floats("tokenizer.ggml.scores"),
        r"tokenizer\.ggml\.scores: expected an array of floats, found array of uint8 \(3 entries\)",
    ),
    "token types as strings": (
        key("tokenizer.ggml.token_type", ARRAY, strings("a", "b")),
        lambda model: model.get_ints("tokenizer.ggml.token_type"),
        r"token_type: expected an array of integers, found array of string \(2 entries\)",
    ),
    "tokens as int array": (
        key("tokenizer.ggml.tokens", ARRAY, array(I32, 1, bytes(4))),
        lambda model: model.get_strs("tokenizer.ggml.tokens"),
        r"tokens: expected an array of strings, found array of int32 \(1 entries\)",
    ),
    "tokens as one string": (
        key("tokenizer.ggml.tokens", STRING, text("a")),
        lambda model: model.get_strs("tokenizer.ggml.tokens"),
        "tokens: expected an array of strings, found string",
    ),
    "fewer types than tokens": (
        key("tokenizer.ggml.token_type", ARRAY, array(I32, 2, bytes(8))),
        lambda model: model.get_ints("tokenizer.ggml.token_type", length=3),
        r"expected an array of integers \(3 entries\), found array of int32 \(2 entries\)",
    ),
    "a float for an integer": (
        key("k", F32, struct.pack("<f", 2)),
        lambda model: model.get_int("k"),
        "key k: expected an integer, found float32",
    ),
    "an integer for a bool": (
        u32("k", 1),
        lambda model: model.get_bool("k"),
        "key k: expected a bool, found uint32",
    ),
    "a bool of 2": (
        key("k", BOOL, b"\2"),
        lambda model: model.get_bool("k"),
        "key k: bool is stored as 2",
    ),
    "a bool array with 255": (
        key("k", ARRAY, array(BOOL, 2, b"\1\xff")),
        lambda model: model.get_bools("k"),
        "key k: bool is stored as 255",
    ),
    "a token that is not UTF-8": (
        key("k", ARRAY, strings("a", b"\xff\xfe")),
        lambda model: model.get_strs("k"),
        r"key k: b'\\xff\\xfe' is not UTF-8",
    ),
}


@pytest.mark.parametrize(("record", "get", "match"), B60_KEYS.values(), ids=B60_KEYS)
def test_b60_typed_access_names_key_expected_and_found(
    tmp_path: Path, record: bytes, get: Callable[[GGUFFile], Any], match: str
) -> None:
    with (
        GGUFFile(write(tmp_path / "m.gguf", gguf([record], []))) as model,
        pytest.raises(GGUFError, match=match) as caught,
    ):
        get(model)
    assert str(caught.value).startswith("m.gguf: key ")


def test_b60_alignment_as_a_float(tmp_path: Path) -> None:
    record = key("general.alignment", F32, struct.pack("<f", 32))
    refuse(tmp_path / "m.gguf", gguf([record], []), "alignment: expected an integer, found float32")


NESTED = array(ARRAY, 1, b"") * 100_000 + array(U8, 0, b"")

B61_FILES: dict[str, tuple[bytes, str]] = {
    "5 dimensions": (gguf([], [tensor("w", (1,) * 5)], DATA), "tensor w: 5 dimensions"),
    "10^6 dimensions": (gguf([], [tensor("w", n_dims=10**6)], DATA), "w: 1000000 dimensions"),
    "2^32 - 1 dimensions": (
        gguf([], [tensor("w", n_dims=(1 << 32) - 1)], DATA),
        "tensor w: 4294967295 dimensions",
    ),
    "string of 2^63 bytes": (
        gguf([key("k", STRING, struct.pack("<Q", 1 << 63))], [], DATA),
        "the file ends at byte .*, inside key k",
    ),
    "key of 2^63 bytes": (
        gguf([struct.pack("<Q", 1 << 63)], [], DATA),
        "the name of key 0 is 9223372036854775808 bytes long",
    ),
    "key of no bytes": (gguf([u32("", 1)], [], DATA), "the name of key 0 is 0 bytes long"),
    "key not UTF-8": (gguf([key(b"\xff", U8, b"1")], [], DATA), "name of key 0 is not UTF-8"),
    "tensor name of 2^63 bytes": (
        gguf([], [struct.pack("<Q", 1 << 63)], DATA),
        "the name of tensor 0 is 9223372036854775808",
    ),
    "array of 2^63 floats": (
        gguf([key("k", ARRAY, array(F32, 1 << 63, b""))], [], DATA),
        "key k: an array of 9223372036854775808 float32 does not fit",
    ),
    "array of 2^63 strings": (
        gguf([key("k", ARRAY, array(STRING, 1 << 63, b""))], [], DATA),
        "key k: an array of 9223372036854775808 string does not fit",
    ),
    "string in an array of 2^64 - 1 bytes": (
        gguf([key("k", ARRAY, array(STRING, 2, struct.pack("<Q", (1 << 64) - 1)))], [], DATA),
        "the file ends at byte .*, inside key k",
    ),
    "arrays 10^5 deep": (gguf([key("k", ARRAY, NESTED)], [], DATA), "key k: arrays are nested"),
    "unknown value type": (
        gguf([key("k", 13, b"")], [], DATA),
        "key k: value type 13 is not known",
    ),
    "unknown element type": (
        gguf([key("k", ARRAY, array(99, 1, b""))], [], DATA),
        "key k: value type 99 is not known",
    ),
    "version 1": (gguf([], [], version=1), "version 1 is not supported"),
    "version 4": (gguf([], [], version=4), "version 4 is not supported"),
    "big-endian": (gguf([], [], version=3 << 24), r"is a big-endian GGUF file \(version 3\)"),
    "unknown tensor type": (
        gguf([], [tensor("w", kind=42)], DATA),
        r"tensor w: type 42 is not known \(known: F32, F16, Q4_0",
    ),
    "row is not whole blocks": (
        gguf([], [tensor("w", (33, 2), kind=QuantType.Q4_0)], DATA),
        "tensor w: a row of 33 weights is not a whole number of Q4_0 blocks of 32",
    ),
}


@pytest.mark.parametrize(("content", "match"), B61_FILES.values(), ids=B61_FILES)
def test_b61_headers_beyond_all_limits(tmp_path: Path, content: bytes, match: str) -> None:
    refuse(tmp_path / "hostile.gguf", content, match)


def test_b61_many_empty_strings_are_bounded(tmp_path: Path) -> None:
    """A file may really hold the bytes of millions of strings: walking them is limited as well."""
    count = (1 << 22) + 1
    path = tmp_path / "strings.gguf"
    write(path, gguf([key("k", ARRAY, array(STRING, count, b""))], []))
    with path.open("r+b") as file:
        file.truncate(8 * count + 100)  # sparse
    with pytest.raises(GGUFError, match=r"strings\.gguf: key k: more than 4194304 strings"):
        GGUFFile(path)


def test_b61_cut_at_every_byte(tmp_path: Path) -> None:
    whole = small_file()
    path = tmp_path / "cut.gguf"
    GGUFFile(write(path, whole)).close()
    for length in range(len(whole)):
        write(path, whole[:length])
        with pytest.raises(GGUFError, match=r"^cut\.gguf: "):
            GGUFFile(path)


def read_everything(path: Path) -> None:
    with GGUFFile(path) as model:
        for name in model.metadata:
            _ = model.metadata[name]
        for name, info in model.tensors.items():
            assert model.raw(name).size == info.nbytes
            if info.type in (QuantType.F32, QuantType.F16, QuantType.Q4_0):
                assert model.dequantize(name).shape == info.shape


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    edits=st.lists(
        st.tuples(st.integers(0, len(small_file()) - 1), st.binary(min_size=1, max_size=8)),
        min_size=1,
        max_size=4,
    )
)
def test_b61_fuzzed_files_are_read_or_refused(
    tmp_path: Path, edits: list[tuple[int, bytes]]
) -> None:
    content = bytearray(small_file())
    for position, patch in edits:
        content[position : position + len(patch)] = patch
    path = write(tmp_path / "fuzz.gguf", bytes(content))
    message = "fuzz.gguf: "
    try:
        read_everything(path)
    except GGUFError as error:
        message = str(error)
    assert message.startswith("fuzz.gguf: ")


# B62: split models.


def write_split(directory: Path, name: str = "m", tensors: int = 5, shards: int = 3) -> list[Path]:
    metadata = {"general.architecture": "llama", "general.name": name}
    writer = GGUFWriter(directory / "m.gguf", metadata, shards=shards)
    for index in range(tensors):
        values = np.full((2, 32), index, np.float32)
        writer.add_tensor(f"{name}.{index}", (2, 32), QuantType.F32, values)
    return writer.write()


@pytest.mark.parametrize("opened", [0, 1, 2])
def test_b62_opens_from_any_shard(tmp_path: Path, opened: int) -> None:
    paths = write_split(tmp_path)
    assert [path.name for path in paths][1] == "m-00002-of-00003.gguf"
    with GGUFFile(paths[opened]) as model:
        assert model.get_str("general.architecture") == "llama"
        assert model.shard_paths == tuple(paths)
        assert len(model.tensors) == 5
        for index in range(5):
            assert (model.dequantize(f"m.{index}") == index).all()


def test_b62_missing_shards_are_listed(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    paths[0].unlink()
    paths[2].unlink()
    with pytest.raises(
        GGUFError,
        match=r"^m-00002-of-00003\.gguf: 2 of 3 shards are missing: "
        r"m-00001-of-00003\.gguf, m-00003-of-00003\.gguf; put",
    ):
        GGUFFile(paths[1])


def test_b62_shard_of_another_model(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    (tmp_path / "other").mkdir()
    other = write_split(tmp_path / "other", tensors=8)
    paths[1].write_bytes(other[1].read_bytes())
    with pytest.raises(
        GGUFError, match=r"^m-00002-of.*split\.tensors\.count differs .* another mod"
    ):
        GGUFFile(paths[0])
    paths[1].write_bytes(paths[2].read_bytes())
    with pytest.raises(GGUFError, match=r"^m-00002-of.*key split\.no says 3"):
        GGUFFile(paths[0])


def second_shard(*names: str) -> bytes:
    """Shard 2 of 3 of a model of six tensors, with these tensors in it."""
    keys = [
        key("split.no", U16, struct.pack("<H", 1)),
        key("split.count", U16, struct.pack("<H", 3)),
        key("split.tensors.count", I32, struct.pack("<i", 6)),
    ]
    return gguf(keys, [tensor(name, offset=32 * at) for at, name in enumerate(names)], DATA)


def test_b62_tensors_that_do_not_add_up(tmp_path: Path) -> None:
    paths = write_split(tmp_path, tensors=6)
    write(paths[1], second_shard("m.2", "m.0"))
    with pytest.raises(GGUFError, match=r"^m-00002-of.*tensor m\.0 is also in m-00001-of"):
        GGUFFile(paths[2])
    write(paths[1], second_shard("m.2"))
    with pytest.raises(
        GGUFError, match=r"^m-00001-of.*has 6 tensors, its 3 shards hold 5; .*\(1\)"
    ):
        GGUFFile(paths[0])
    write(paths[1], second_shard("m.2", "m.3"))
    GGUFFile(paths[0]).close()


def test_b62_renamed_shards(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    alone = paths[0].rename(tmp_path / "model.gguf")
    with pytest.raises(GGUFError, match=r"^model\.gguf: is one of 3 shards .* not named so"):
        GGUFFile(alone)
    whole = write(tmp_path / "w-00001-of-00002.gguf", small_file())
    with pytest.raises(
        GGUFError, match=r"named as one of 2 shards, but it has no key split\.count"
    ):
        GGUFFile(whole)


def test_b62_glued_shards(tmp_path: Path) -> None:
    glued = b"".join(path.read_bytes() for path in write_split(tmp_path))
    for name in ("glued.gguf", "m-00001-of-00003.gguf"):
        refuse(tmp_path / name, glued, "split files were glued together")


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "the file is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "is a Git LFS pointer"),
        (b"<!DOCTYPE html><html>", "is a web page"),
        (b"PK\x03\x04" + bytes(60), "is a zip archive"),
        (b"tjgg" + bytes(60), "is a GGJT file, older than GGUF"),
        (b"\x80\x02pickle", "is not a GGUF file: it starts with"),
    ],
)
def test_b62_files_that_are_something_else(tmp_path: Path, content: bytes, match: str) -> None:
    refuse(tmp_path / "stub.gguf", content, match)


def test_b62_no_file_and_no_regular_file(tmp_path: Path) -> None:
    with pytest.raises(GGUFError, match=r"^absent\.gguf: there is no file /"):
        GGUFFile(tmp_path / "absent.gguf")
    with pytest.raises(GGUFError, match="cannot be read: Is a directory"):
        GGUFFile(tmp_path)


# B64: what is absent is named, or has the default that the caller documents.


def test_b64_missing_keys_are_named_with_the_nearest(tmp_path: Path) -> None:
    with GGUFFile(write(tmp_path / "m.gguf", small_file())) as model:
        with pytest.raises(
            GGUFError,
            match=r"^m\.gguf: key llama\.blocks_count is missing \(expected an integer\); "
            r"the nearest key present is llama\.block_count",
        ):
            model.get_int("llama.blocks_count")
        for get in (model.get_float, model.get_str, model.get_bool, model.get_ints):
            with pytest.raises(
                GGUFError, match=r"^m\.gguf: key no\.such\.key is missing \(expected a"
            ):
                get("no.such.key")
        with pytest.raises(GGUFError, match=r"^m\.gguf: tensor c is missing"):
            model.raw("c")


def test_b64_defaults(tmp_path: Path) -> None:
    with GGUFFile(write(tmp_path / "m.gguf", small_file())) as model:
        assert model.get_int("llama.block_count", 7) == 2
        assert model.get_int("absent", 7) == 7
        assert model.get_float("absent", None) is None
        assert model.get_strs("absent", []) == []
        assert model.get_floats("tokenizer.ggml.scores", length=3) == [0, -1, -2]
        # A default is for a key that is absent, not for one of the wrong type.
        with pytest.raises(GGUFError, match="expected a float, found uint32"):
            model.get_float("llama.block_count", 1.0)


def test_b64_per_layer_value_as_scalar_and_as_array(tmp_path: Path) -> None:
    name = "llama.attention.head_count_kv"
    per_layer = key(name, ARRAY, array(I32, 2, struct.pack("<2i", 4, 8)))
    with GGUFFile(write(tmp_path / "scalar.gguf", gguf([u32(name, 4)], []))) as model:
        assert model.get_ints_per_layer(name, 3) == [4, 4, 4]
        assert model.get_ints_per_layer("absent", 2, None) is None
    with GGUFFile(write(tmp_path / "array.gguf", gguf([per_layer], []))) as model:
        assert model.get_ints_per_layer(name, 2) == [4, 8]
        with pytest.raises(
            GGUFError, match=r"an array of integers \(3 entries\), found array of i"
        ):
            model.get_ints_per_layer(name, 3)
