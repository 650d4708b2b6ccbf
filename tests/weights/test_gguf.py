"""Reading and writing GGUF files that are in order: round trips, `gguf` package, real models."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_bytes import array, small_file, strings, tensor, write
from gguf_bytes import gguf as gguf_file

from invar import _native
from invar.weights.formats import ENCODERS, QuantType, dequantize, quantize
from invar.weights.gguf import GGUFError, GGUFFile
from invar.weights.gguf_writer import GGUFWriter
from invar.weights.sources import resolve

METADATA = {
    "general.architecture": "llama",
    "a.uint": 5,
    "a.int": -5,
    "a.large": 1 << 40,
    "a.byte": np.uint8(3),
    "a.float": 1.5,
    "a.bool": True,
    "a.strings": ["x", "", "▁yz"],
    "a.ints": [1, -2, 3],
    "a.floats": [1.0, 2.5],
    "a.bools": [True, False],
}

GGUF_FORMATS = [form for form in ENCODERS if form.in_gguf]


def weights(rows: int = 6, columns: int = 256) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(path, METADATA)
    for quant_type in GGUF_FORMATS:
        writer.add_tensor(f"{quant_type.name}.weight", (6, 256), quant_type, weights())
    writer.add_tensor("norm.weight", (7,), QuantType.F32, weights()[0, :7])
    writer.add_tensor("experts.weight", (2, 3, 256), QuantType.Q8_0, weights())
    writer.write()
    return path


def plain(value: object) -> object:
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


def test_metadata_round_trip(written: Path) -> None:
    with GGUFFile(written) as model:
        assert {key: plain(value) for key, value in model.metadata.items()} == {
            key: plain(value) for key, value in METADATA.items()
        }
        assert model.version == 3
        assert "a.int" in model.metadata
        assert "a.missing" not in model.metadata
        assert type(model.metadata["a.bool"]) is bool


def test_tensors_round_trip(written: Path) -> None:
    with GGUFFile(written) as model:
        assert model.tensors["experts.weight"].shape == (2, 3, 256)
        assert model.raw("experts.weight").shape == (6 * 272,)
        assert model.raw("norm.weight").shape == (28,)
        np.testing.assert_array_equal(model.dequantize("norm.weight"), weights()[0, :7])
        for quant_type in GGUF_FORMATS:
            name = f"{quant_type.name}.weight"
            info = model.tensors[name]
            assert (info.name, info.shape, info.type) == (name, (6, 256), quant_type)
            raw = model.raw(name)
            assert raw.shape == (6, quant_type.row_bytes(256))
            assert not raw.flags.writeable
            np.testing.assert_array_equal(raw, quantize(weights(), quant_type))
            expected = dequantize(raw, quant_type, (6, 256))
            np.testing.assert_array_equal(model.dequantize(name), expected)


def test_gguf_package_reads_what_we_write(written: Path) -> None:
    reader = gguf.GGUFReader(written)
    for key, value in METADATA.items():
        field = reader.get_field(key)
        assert field is not None
        assert field.contents() == plain(value)
    with GGUFFile(written) as model:
        assert [tensor.name for tensor in reader.tensors] == list(model.tensors)
        for theirs in reader.tensors:
            ours = model.tensors[theirs.name]
            assert tuple(theirs.shape.tolist()) == ours.shape[::-1]
            stored = np.asarray(theirs.data).view(np.uint8).reshape(-1)
            np.testing.assert_array_equal(stored, model.raw(theirs.name).reshape(-1))


def test_we_read_what_the_gguf_package_writes(tmp_path: Path) -> None:
    path = tmp_path / "theirs.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_token_list(["a", "b"])
    writer.add_custom_alignment(128)
    writer.add_tensor("w", weights())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GGUFFile(path) as model:
        assert model.get_int("llama.block_count") == 2
        assert model.get_strs("tokenizer.ggml.tokens") == ["a", "b"]
        np.testing.assert_array_equal(model.dequantize("w"), weights())


def test_version_2_and_scalar_shape_and_nested_arrays(tmp_path: Path) -> None:
    nested = array(9, 2, array(4, 1, struct.pack("<I", 7)) + strings("x", "y"))
    keys = [b"\x01\0\0\0\0\0\0\0k" + struct.pack("<I", 9) + nested]
    content = gguf_file(keys, [tensor("s", ())], struct.pack("<f", 2.5), version=2)
    with GGUFFile(write(tmp_path / "v2.gguf", content)) as model:
        assert model.version == 2
        assert [plain(part) for part in model.metadata["k"]] == [[7], ["x", "y"]]
        assert model.dequantize("s") == np.float32(2.5)


def test_views_outlive_close(tmp_path: Path) -> None:
    model = GGUFFile(write(tmp_path / "m.gguf", small_file()))
    view = model.raw("a")
    model.close()
    assert view.view("<f4").reshape(-1).tolist() == list(range(8))
    del view
    model.close()
    with pytest.raises(GGUFError, match=r"m\.gguf: tensor a: the file is closed"):
        model.raw("a")
    with pytest.raises(
        GGUFError, match=r"m\.gguf: key tokenizer\.ggml\.tokens: the file is closed"
    ):
        model.metadata["tokenizer.ggml.tokens"]


def test_writer_streams_chunks_and_aligns(tmp_path: Path) -> None:
    path = tmp_path / "stream.gguf"
    writer = GGUFWriter(path, {"general.architecture": "llama"}, alignment=4096)

    def rows() -> Iterator[np.ndarray]:
        yield weights()[:2]
        yield quantize(weights()[2:], QuantType.Q4_0)

    writer.add_tensor("first", (1,), QuantType.F32, np.ones(1, np.float32))
    writer.add_tensor("w", (6, 256), QuantType.Q4_0, rows)
    writer.write()
    with GGUFFile(path) as model:
        np.testing.assert_array_equal(model.raw("w"), quantize(weights(), QuantType.Q4_0))
    reader = gguf.GGUFReader(path)
    assert [tensor.data_offset % 4096 for tensor in reader.tensors] == [0, 0]


def test_writer_refuses_what_does_not_fit(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "w.gguf", {"general.architecture": "llama"})
    with pytest.raises(ValueError, match="not a whole number of Q4_K blocks"):
        writer.add_tensor("w", (2, 32), QuantType.Q4_K, weights())
    writer.add_tensor("w", (6, 256), QuantType.F32, weights()[:5])
    with pytest.raises(ValueError, match="added twice"):
        writer.add_tensor("w", (6, 256), QuantType.F32, weights())
    with pytest.raises(ValueError, match=r"tensor w: F32 of shape \(6, 256\) takes 6144 bytes"):
        writer.write()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="empty list has no element type"):
        GGUFWriter(tmp_path / "w.gguf", {"k": []}).write()
    with pytest.raises(ValueError, match="power of two"):
        GGUFWriter(tmp_path / "w.gguf", {}, alignment=48)


@pytest.fixture(scope="module")
def smollm2() -> Iterator[GGUFFile]:
    with GGUFFile(resolve("smollm2")) as model:
        yield model


@pytest.mark.alone
def test_whole_file_opens_fast(smollm2: GGUFFile) -> None:
    """The vocabulary is 49,152 strings, the merges as many; a quarter of a second is ten times more
    than the machine needs, and a tenth of what a reader that builds an object per string takes."""
    start = time.perf_counter()
    with GGUFFile(smollm2.path) as model:
        tokens = model.get_strs("tokenizer.ggml.tokens", length=49_152)
        model.get_ints("tokenizer.ggml.token_type", length=len(tokens))
    assert time.perf_counter() - start < 0.25
    assert tokens[:2] == ["<|endoftext|>", "<|im_start|>"]


def test_whole_file_equals_the_gguf_package(smollm2: GGUFFile) -> None:
    reader = gguf.GGUFReader(smollm2.path)
    assert {tensor.name for tensor in reader.tensors} == set(smollm2.tensors)
    for theirs in reader.tensors:
        ours = smollm2.tensors[theirs.name]
        assert (theirs.tensor_type.name, theirs.n_bytes) == (ours.type.name, ours.nbytes)
        stored = np.asarray(theirs.data).view(np.uint8).reshape(-1)
        np.testing.assert_array_equal(stored, smollm2.raw(theirs.name).reshape(-1))
    for name in ("token_embd.weight", "blk.0.ffn_down.weight", "blk.29.attn_norm.weight"):
        theirs = next(tensor for tensor in reader.tensors if tensor.name == name)
        expected = gguf.quants.dequantize(theirs.data, theirs.tensor_type)
        np.testing.assert_array_equal(smollm2.dequantize(name), expected)
    for key in ("general.name", "tokenizer.ggml.merges", "llama.rope.freq_base"):
        field = reader.get_field(key)
        assert field is not None
        assert field.contents() == smollm2.metadata[key]


def test_strings_are_stepped_over_and_decoded_within_their_bytes() -> None:
    texts = ["", "a", "naïve", "\U0001f600" * 9]
    raw = b"".join(struct.pack("<Q", len(t.encode())) + t.encode() for t in texts)
    assert _native.skip_strings(b"__" + raw, 2, 4) == 2 + len(raw)
    assert _native.decode_strings(b"__" + raw + b"x", 2, 4) == (texts, 2 + len(raw))
    assert _native.skip_strings(raw, 0, 5) is None
    assert _native.skip_strings(raw[:-1], 0, 4) is None
    assert _native.skip_strings(raw, len(raw) + 9, 1) is None
    for length in (2**64 - 1, 2**63, 2):  # sums that wrap around are no way back into the buffer
        assert _native.skip_strings(struct.pack("<Q", length) + b"x", 0, 1) is None
    with pytest.raises(UnicodeDecodeError):
        _native.decode_strings(struct.pack("<Q", 1) + b"\xff", 0, 1)
    with pytest.raises(ValueError, match="pass the buffer"):
        _native.decode_strings(raw, 0, 5)


def test_a_file_that_shrinks_is_not_read_any_further(written: Path) -> None:
    with GGUFFile(written) as model:
        size = written.stat().st_size
        os.truncate(written, size - 64)
        with pytest.raises(GGUFError, match=rf"tensor norm\.weight: the file had {size} bytes"):
            model.raw("norm.weight")
        with pytest.raises(GGUFError, match=r"key general\.architecture: the file had"):
            model.metadata["general.architecture"]
