"""Tokenizers without tokenizer.json: ids of `transformers` (and tiktoken), and what is damaged."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from golden.tokenizer_forms import HERE, NAMES, SPECIALS, TEXTS, expected_ids
from text.llama_cpp_vectors import read_vectors
from tokenizers.normalizers import Precompiled

from invar.engine.model_files import HFText
from invar.text import byte_level_files, sentencepiece_model
from invar.text.errors import TokenizerError
from invar.text.sentencepiece_model import is_charsmap, read_sentencepiece
from invar.text.tokenizer import Tokenizer
from invar.weights.gguf import GGUFFile
from invar.weights.hf_directory import text_files
from invar.weights.safetensors import SafetensorsError

PIECES = ("llama", "gemma", "normalized", "unigram", "unigram_bytes")
WHOLE = ("llama", "gemma", "gpt2", "qwen2", "llama3")  # every byte has a token
# A mark of a space that stands in the text itself: for us it is no space to what users defined.
EXCEPT = {("gemma", "▁marks▁▁of spaces")}


def tokenizer_of(name: str) -> Tokenizer:
    return HFText(HERE / name).tokenizer()


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of the tokenizer that a test is given."""
    return Path(shutil.copytree(HERE / request.param, tmp_path / "tokenizer"))


def configure(folder: Path, **changes: Any) -> Path:
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))
    return folder


def test_all_forms_are_there() -> None:
    assert set(NAMES) == {*PIECES, "gpt2", "qwen2", "llama3"}
    for name in NAMES:
        assert not (HERE / name / "tokenizer.json").exists()


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_those_of_the_reference(name: str) -> None:
    tokenizer = tokenizer_of(name)
    for text, ids in zip(TEXTS, expected_ids(name), strict=True):
        if (name, text) not in EXCEPT:
            assert tokenizer.encode(text, add_special_tokens=False).tolist() == ids, text


@pytest.mark.parametrize("name", WHOLE)
def test_decoding_gives_the_text_back(name: str) -> None:
    tokenizer = tokenizer_of(name)
    for text in TEXTS:
        if name == "llama" and text.startswith((" ", "▁")):
            continue  # the first space stands for the one that is put before words
        ids = tokenizer.encode(text, add_special_tokens=False)
        expected = text.replace("▁", " ") if name in PIECES else text
        if name == "qwen2":  # composes
            expected = expected.replace("e\u0301", "é")
        assert tokenizer.decode(ids, skip_special_tokens=False) == expected


@pytest.mark.parametrize("name", NAMES)
def test_text_alone_never_becomes_a_control_token(name: str) -> None:
    tokenizer = tokenizer_of(name)
    for text in (*TEXTS, "<s></s><bos><unk><|endoftext|><|begin_of_text|>"):
        ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        controls = {*map(int, ids)} & tokenizer.control_ids
        assert {tokenizer.token_text(token_id) for token_id in controls} <= {"<unk>"}, text


@pytest.mark.parametrize(
    ("folder", "changes", "opening"),
    [
        ("llama", {}, ["<s>"]),
        ("llama", {"add_bos_token": "absent"}, ["<s>"]),
        ("llama", {"add_bos_token": False}, []),
        ("gemma", {"add_bos_token": "absent"}, ["<bos>"]),
        ("normalized", {}, []),
        ("gpt2", {}, []),
        ("qwen2", {}, []),
        ("llama3", {}, ["<|begin_of_text|>"]),
    ],
    indirect=["folder"],
)
def test_bos_is_put_in_front_as_the_class_does(
    folder: Path, changes: dict[str, Any], opening: list[str]
) -> None:
    tokenizer = HFText(configure(folder, **changes)).tokenizer()
    plain = tokenizer.encode("word", add_special_tokens=False).tolist()
    ids = tokenizer.encode("word").tolist()
    front = ids[: len(ids) - len(plain)]
    assert [tokenizer.token_text(token_id) for token_id in front] == opening


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_a_legacy_tokenizer_puts_a_space_before_every_text(folder: Path) -> None:
    """As SentencePiece itself does."""
    usual = HFText(folder).tokenizer()
    legacy = HFText(configure(folder, legacy=True)).tokenizer()

    def pieces(tokenizer: Tokenizer, text: str) -> str:
        ids = tokenizer.encode(text, add_special_tokens=False)
        return "|".join(tokenizer.token_text(int(token_id)) for token_id in ids)

    assert pieces(usual, "<|im_start|>word") == "<|im_start|>|w|or|d"
    assert pieces(legacy, "<|im_start|>word") == "<|im_start|>| w|or|d"
    assert (pieces(usual, " word"), pieces(legacy, " word")) == (" w|or|d", " | w|or|d")
    assert legacy.encode_inside("word") == usual.encode_inside("word")
    assert pieces(HFText(configure(folder, add_prefix_space=False)).tokenizer(), "word") == "w|or|d"


# ---------------------------------------------------------------- added tokens


@pytest.mark.parametrize("folder", ["gpt2"], indirect=True)
def test_added_tokens_are_special_if_a_configuration_says_so(folder: Path) -> None:
    plain = HFText(folder).tokenizer()
    start = int(plain.encode(SPECIALS[0])[0])
    assert not plain.is_control(start)
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"additional_special_tokens": [SPECIALS[0], {"content": SPECIALS[1]}]})
    )
    assert HFText(folder).tokenizer().is_control(start)


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_places_kept_free_in_training_have_their_names_in_the_configuration(folder: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    decoder = config["added_tokens_decoder"]
    decoder["300"] = {"content": "<|tool|>", "special": True}
    tokenizer = HFText(configure(folder, added_tokens_decoder=decoder)).tokenizer()
    assert tokenizer.encode("<|tool|>", add_special_tokens=False).tolist() == [300]


# ---------------------------------------------------------------- what is wrong is named


def refused(folder: Path, message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        HFText(folder).tokenizer()


@pytest.mark.parametrize("folder", ["llama", "unigram"], indirect=True)
def test_a_file_that_is_cut_short_is_refused(folder: Path) -> None:
    file = folder / "tokenizer.model"
    data = file.read_bytes()
    wholes = 0
    for end in (0, 1, 7, 100, *range(len(data) - 40, len(data))):
        file.write_bytes(data[:end])
        with contextlib.suppress(TokenizerError):
            HFText(folder).tokenizer()
            wholes += 1  # between two fields
    assert wholes < 10


def field(number: int, value: bytes | int) -> bytes:
    """Of a protobuf."""
    if isinstance(value, int):
        return bytes([number << 3 & 0x7F | 0x80, number >> 4, value])
    return bytes([number << 3 | 2, len(value)]) + value


PIECE = field(1, field(1, b"a"))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", "damaged"),
        (b"\x0b\x00", "damaged"),
        (b"\x08\x01", "damaged"),
        (PIECE[:-1], "damaged"),
        (field(1, field(1, b"\xff")), "piece 0 is not text in UTF-8"),
        (field(1, b""), "piece 0 '' has no text"),
        (field(1, field(1, b"a") + b"\x18\x09"), "piece 0 has type 9, which is not known"),
        (PIECE + PIECE, "1 of its pieces are not unique"),
        (PIECE + field(2, b"\x18\x03"), r"words or characters \(3\) is not supported"),
        (PIECE + field(2, field(24, 1)), "treat_whitespace_as_suffix"),
        (field(3, b""), "has no pieces"),
    ],
)
def test_what_is_no_sentencepiece_model_is_named(data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(data)
    refused(tmp_path, rf"tokenizer\.model: .*{message}")


def test_damaged_characters_are_refused_or_harmless() -> None:
    """The library that looks them up ends the process's thread for a step out of bounds."""
    model = read_sentencepiece((HERE / "normalized" / "tokenizer.model").read_bytes())
    assert is_charsmap(model.charsmap)
    random, harmless = np.random.default_rng(7), 0
    for _ in range(500):
        data = bytearray(model.charsmap)
        for place in random.integers(0, len(data), random.integers(1, 4)):
            data[place] = random.integers(0, 256)
        if is_charsmap(bytes(data)):
            harmless += 1
            normalize = Precompiled(bytes(data)).normalize_str
            for text in (*TEXTS, "".join(map(chr, range(1, 700)))):
                normalize(text)
    assert 0 < harmless < 500


def test_damaged_characters_of_a_gguf_file_are_refused() -> None:
    model = read_sentencepiece((HERE / "unigram" / "tokenizer.model").read_bytes())
    metadata = {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": model.pieces,
        "tokenizer.ggml.scores": np.array(model.scores, np.float32),
        "tokenizer.ggml.unknown_token_id": model.unknown_id,
        "tokenizer.ggml.precompiled_charsmap": np.frombuffer(model.charsmap, np.uint8),
    }
    assert len(Tokenizer.from_gguf(metadata).encode("ﬁne", add_special_tokens=False)) > 1
    metadata["tokenizer.ggml.precompiled_charsmap"] = np.full(1037, 255, np.uint8)
    with pytest.raises(TokenizerError, match=r"tokenizer\.ggml\.precompiled_charsmap: is damaged"):
        Tokenizer.from_gguf(metadata)


def test_a_model_with_damaged_characters_is_refused(tmp_path: Path) -> None:
    data = (HERE / "normalized" / "tokenizer.model").read_bytes()
    charsmap = read_sentencepiece(data).charsmap
    (tmp_path / "tokenizer.model").write_bytes(data.replace(charsmap[:8], b"\xff" * 8))
    refused(tmp_path, "precompiled_charsmap is damaged")


@pytest.mark.parametrize(
    ("folder", "name", "change", "message"),
    [
        ("gpt2", "merges.txt", "#version: 0.2\nqqq x", r"merges.txt: line 2, 'qqq x'.*no 'qqq'"),
        ("gpt2", "merges.txt", "t h e", r"merges.txt: line 1, 't h e'"),
        ("gpt2", "vocab.json", '{"a": "b"}', "vocab.json: token 'a' has id b"),
        ("gpt2", "added_tokens.json", '{"<x>": null}', "added_tokens.json: '<x>' has id None"),
        ("gpt2", "tokenizer_config.json", '{"tokenizer_class": "CTRLTokenizer"}', "CTRLTokenizer"),
        ("gpt2", "tokenizer_config.json", "{}", "an unnamed tokenizer_class"),
        ("llama", "tokenizer_config.json", '{"added_tokens_decoder": {"x": {}}}', "'x' is no id"),
        ("llama", "tokenizer_config.json", '{"added_tokens_decoder": 7}', "must be an object"),
        ("llama3", "tokenizer_config.json", "{}", "say nothing of special tokens"),
        ("llama3", "config.json", '{"model_type": "qwen2"}', "Llama 3 alone"),
        ("llama3", "tokenizer.model", "YQ== 0\nYg== x", "line 2, b'Yg== x'"),
        ("llama3", "tokenizer.model", "YQ== 0\nYg== 2", "ranks of 2 tokens are not 0, 1"),
        ("llama3", "tokenizer.model", "YQ 0", "line 1, b'YQ 0'"),
        ("llama3", "tokenizer.model", "YQ== 1\nYQ== 0", "line 2, b'YQ== 0': .* twice"),
        ("llama3", "tokenizer.model", "YQ== 0\n 1", "line 2: a token of 0 bytes, expected 1 to"),
        ("llama3", "tokenizer.model", "YQ== 0\n\nYg== 1", "line 2, b''"),
        ("llama3", "tokenizer.model", "YWFh" * 27000 + " 0", "line 1: a token of 81000 bytes"),
    ],
    indirect=["folder"],
)
def test_what_is_wrong_with_other_forms_is_named(
    folder: Path, name: str, change: str, message: str
) -> None:
    (folder / name).write_text(change)
    refused(folder, message)


@pytest.mark.parametrize(
    ("folder", "module", "message"),
    [
        ("llama", sentencepiece_model, "piece 20: more than 20 are not supported"),
        ("llama3", byte_level_files, "line 21: more than 20 are not supported"),
    ],
    indirect=["folder"],
)
def test_a_vocabulary_past_the_largest_is_refused_before_it_is_read(
    folder: Path, module: ModuleType, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LARGEST_VOCABULARY", 20)
    refused(folder, rf"tokenizer\.model: {message}")


def test_a_vocabulary_of_words_is_refused(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\nword\n")
    refused(tmp_path, "vocab.txt: a vocabulary of WordPiece")


def test_a_directory_without_a_tokenizer_says_which_files_it_may_have(tmp_path: Path) -> None:
    refused(tmp_path, "no tokenizer.json .nor tokenizer.model, nor vocab.json with merges.txt")


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_other_files_are_not_read_beside_tokenizer_json(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    assert "tokenizer.model" not in text_files(folder)


def test_a_pointer_in_place_of_the_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(SafetensorsError, match="pointer of Git LFS"):
        HFText(tmp_path).tokenizer()


# ---------------------------------------------------------------- at full size


def varint(number: int) -> bytes:
    low, high = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + varint(high) if high else bytes([low])


def long_field(number: int, value: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(value)) + value


def write_sentencepiece(folder: Path, metadata: Mapping[str, Any]) -> None:
    columns = (metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type"))
    pieces = []
    for text, score, kind in zip(*columns, strict=True):
        data = long_field(1, text.encode()) + b"\x15" + struct.pack("<f", score)
        pieces.append(long_field(1, data + field(3, int(kind))))
    trainer, normalizer = b"\x18\x02" + field(35, 1), b"\x18\x01\x20\x00"  # BPE; keeps spaces
    model = b"".join(pieces) + field(2, trainer) + field(3, normalizer)
    (folder / "tokenizer.model").write_bytes(model)
    config = {"tokenizer_class": "LlamaTokenizer", "legacy": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_merges(folder: Path, metadata: Mapping[str, Any], name: str) -> None:
    tokens = metadata["tokenizer.ggml.tokens"]
    vocab = {text: token_id for token_id, text in enumerate(tokens)}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    merges = ["#version: 0.2", *metadata["tokenizer.ggml.merges"], ""]
    (folder / "merges.txt").write_text("\n".join(merges))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))


def write_ranks(folder: Path, metadata: Mapping[str, Any]) -> None:
    tokens = Tokenizer.from_gguf(metadata)
    names = metadata["tokenizer.ggml.tokens"]
    size = names.index("<|begin_of_text|>")
    lines = [
        f"{base64.b64encode(tokens.token_bytes(rank)).decode()} {rank}" for rank in range(size)
    ]
    (folder / "tokenizer.model").write_text("\n".join(lines))
    decoder = {
        str(token_id): {"content": names[token_id], "special": True}
        for token_id in range(size, len(names))
    }
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))
    (folder / "config.json").write_text('{"model_type": "llama"}')


@pytest.mark.parametrize("name", ["llama-spm", "phi-3", "gpt-2", "qwen2", "llama-bpe"])
def test_real_vocabularies_in_their_older_files_give_the_models_own_ids(
    name: str, llama_cpp_data: Path, tmp_path: Path
) -> None:
    metadata = GGUFFile(llama_cpp_data / f"ggml-vocab-{name}.gguf").metadata
    if metadata["tokenizer.ggml.model"] == "llama":
        write_sentencepiece(tmp_path, metadata)
    elif name == "llama-bpe":
        write_ranks(tmp_path, metadata)
    else:
        write_merges(tmp_path, metadata, {"gpt-2": "GPT2", "qwen2": "Qwen2"}[name] + "Tokenizer")
    tokenizer = HFText(tmp_path).tokenizer()
    for vector in read_vectors(llama_cpp_data / f"ggml-vocab-{name}.gguf"):
        ids = tokenizer.encode(vector.text, add_special_tokens=False, parse_special=False)
        assert ids.tolist() == vector.ids, vector.text
