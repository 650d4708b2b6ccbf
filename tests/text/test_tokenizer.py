"""Tokenizers on tiny vocabularies: public bug reports, broken metadata, merging by definition."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from text.tiny_vocabularies import CONTROL, NORMAL, byte_level, sentence_piece
from tokenizers import AddedToken, models, normalizers

from invar.text.tokenizer import Tokenizer, TokenizerError
from invar.weights.gguf import GGUFFile

TokenizerByName = Callable[[str], Tokenizer]


def encode(tokenizer: Tokenizer, text: str, **options: bool) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False, **options).tolist()


@pytest.mark.parametrize("metadata", [byte_level(), sentence_piece()])
@pytest.mark.parametrize("broken", [b"\xe4\xb8", b"\xff", "a\ud83d", "\udcff", None, 7])
def test_b03_broken_text_is_a_clean_error(metadata: dict[str, Any], broken: Any) -> None:
    tokenizer = Tokenizer.from_gguf(metadata)
    with pytest.raises(TokenizerError, match="text to encode"):
        tokenizer.encode(broken)
    # Undecodable bytes that were decoded with replacement are ordinary text.
    assert tokenizer.decode(encode(tokenizer, "\ufffd")) == "\ufffd"


def library_twin(metadata: Any, space_prefix: bool) -> Callable[[str], list[int]]:
    """The same SentencePiece vocabulary run by `tokenizers`, merges made up from the scores."""
    tokens = list(metadata["tokenizer.ggml.tokens"])
    types = np.asarray(metadata["tokenizer.ggml.token_type"]).tolist()
    scores = np.asarray(metadata["tokenizer.ggml.scores"]).tolist()
    ids = {token: index for index, token in enumerate(tokens)}
    merges = [
        (-scores[whole], ids[token[:cut]], ids[token[cut:]], token[:cut], token[cut:])
        for whole, token in enumerate(tokens)
        if types[whole] == NORMAL
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    pairs = [(left, right) for *_, left, right in sorted(merges)]
    model = models.BPE(ids, pairs, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    twin = tokenizers.Tokenizer(model)
    steps: list[normalizers.Normalizer] = [normalizers.Prepend("▁")] if space_prefix else []
    twin.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    twin.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    return lambda text: list(twin.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("space_prefix", [True, False])
def test_b04_space_prefix_after_special_tokens(space_prefix: bool, llama_cpp_data: Path) -> None:
    metadata = dict(GGUFFile(llama_cpp_data / "ggml-vocab-llama-spm.gguf").metadata)
    metadata["tokenizer.ggml.add_space_prefix"] = space_prefix
    tokenizer = Tokenizer.from_gguf(metadata)
    reference = library_twin(metadata, space_prefix)
    for text in ("<s>word", "<s> word", "word", " word", "a<s>  b</s>c", "", "▁", "é 中 🎉", "<s>"):
        ids = encode(tokenizer, text)
        assert ids == reference(text), text
    for text in ("word", " word", "  two  spaces ", "é 中 🎉"):
        assert tokenizer.decode(encode(tokenizer, text)) == text
    if not space_prefix:
        ids = encode(tokenizer, "<s> word")
        assert tokenizer.decode(ids, skip_special_tokens=False) == "<s> word"


def test_b07_ignore_merges_takes_whole_words() -> None:
    # "hi!" cannot be reached by merging; only whole-word lookup finds "hi".
    words = {"words": ("he", "hi"), "merges": ("h e",)}
    with_lookup = Tokenizer.from_gguf(byte_level(pre="llama-bpe", **words))
    without = Tokenizer.from_gguf(byte_level(pre="gpt-2", **words))
    assert [with_lookup.token_text(i) for i in encode(with_lookup, "hi")] == ["hi"]
    assert [without.token_text(i) for i in encode(without, "hi")] == ["h", "i"]


def test_b07_whole_word_lookup_never_finds_a_control_token() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level(pre="llama-bpe", control=("<|bos|>", "stop")))
    assert encode(tokenizer, "stop") == [1]
    assert not any(map(tokenizer.is_control, encode(tokenizer, "stop", parse_special=False)))


def test_b08_raw_text_keeps_what_the_caller_asked_for() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level(add_bos_token=True))
    assert tokenizer.encode("<|bos|>h").tolist()[:2] == [0, 0]
    assert tokenizer.encode("<|bos|>h", add_special_tokens=False).tolist()[0] == 0
    assert tokenizer.encode("").tolist() == [0]


@pytest.mark.parametrize("token_id", [-1, 263, 2**40])
def test_b10_ids_beyond_the_vocabulary_are_a_clean_error(token_id: int) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level())
    for call in (tokenizer.token_bytes, tokenizer.token_text, tokenizer.is_control):
        with pytest.raises(TokenizerError, match=f"{token_id} is outside the vocabulary of"):
            call(token_id)
    with pytest.raises(TokenizerError, match="outside the vocabulary"):
        tokenizer.decode([0, token_id])


def test_special_tokens_are_the_longest_leftmost() -> None:
    tokenizer = Tokenizer.from_gguf(
        byte_level(control=("<a>", "<a><b>"), user_defined=("b><", "  ", "<think>"))
    )
    assert encode(tokenizer, "<a><b>") == [1]
    assert encode(tokenizer, "<a>x<a")[0] == 0
    assert encode(tokenizer, "  ") == [3]
    # Without parse_special only control tokens become text.
    assert 1 not in encode(tokenizer, "<a><b>", parse_special=False)
    assert encode(tokenizer, "<think>", parse_special=False) == [4]


@given(st.text(alphabet="<>|im_startend ah", max_size=40))
def test_plain_text_never_yields_control_tokens(text: str) -> None:
    for metadata in (byte_level(), sentence_piece(control=("<s>", "</s>", "<|im_end|>"))):
        tokenizer = Tokenizer.from_gguf(metadata)
        ids = encode(tokenizer, text, parse_special=False)
        assert not any(tokenizer.is_control(token_id) for token_id in ids)
        assert tokenizer.decode(ids) == text


def merged_by_definition(text: str, scores: dict[str, float]) -> list[str]:
    """Again and again the best-scored neighbours, the leftmost first."""
    pieces = list(text)
    while True:
        pairs = [
            (-scores[a + b], i)
            for i, (a, b) in enumerate(itertools.pairwise(pieces))
            if a + b in scores
        ]
        if not pairs:
            return pieces
        at = min(pairs)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


@settings(max_examples=300)
@given(
    st.dictionaries(st.text("ab▁", min_size=2, max_size=4), st.integers(-5, 0), max_size=20),
    st.text("ab ", max_size=30),
)
def test_piece_merging_equals_its_definition(pieces: dict[str, int], text: str) -> None:
    scores = {"a": -9.0, "b": -9.0, "▁": -9.0} | {k: float(v) for k, v in pieces.items()}
    tokenizer = Tokenizer.from_gguf(sentence_piece(pieces=scores, add_space_prefix=False))
    expected = merged_by_definition(text.replace(" ", "▁"), scores)
    found = encode(tokenizer, text)
    assert [tokenizer.token_text(token_id) for token_id in found] == [
        piece.replace("▁", " ") for piece in expected
    ]


def test_long_words_take_linear_time() -> None:
    tokenizer = Tokenizer.from_gguf(sentence_piece())
    assert len(encode(tokenizer, "ab" * 50_000)) == 50_000


_KEY = "tokenizer.ggml."


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": None}, "tokenizer.ggml.model: missing"),
        ({"model": "rwkv"}, "'rwkv' is not supported .known: gpt2"),
        ({"model": 3}, "tokenizer.ggml.model: expected str, found int"),
        ({"pre": "llama-bpx"}, "'llama-bpx' is not known .nearest known: llama-bpe"),
        ({"tokens": None}, "tokenizer.ggml.tokens: missing"),
        ({"tokens": np.arange(5)}, "tokens: expected an array of strings, found elements of int"),
        ({"tokens": "abc"}, "tokens: expected an array of strings, found str"),
        ({"token_type": ["a", "b"]}, "token_type: expected an array of integers, found"),
        ({"token_type": np.ones(3, np.int32)}, "token_type: 3 entries, but .* has 263"),
        ({"merges": None}, "tokenizer.ggml.merges: missing"),
        ({"merges": ["he"]}, "merges: entry 0 is 'he'"),
        ({"merges": ["h q"]}, "merges: .*hq"),
        ({"bos_token_id": 263}, "bos_token_id: id 263 is outside the vocabulary of 263"),
        ({"bos_token_id": "x"}, "bos_token_id: expected int, found str"),
        ({"eos_token_id": True}, "eos_token_id: expected int, found bool"),
        ({"add_bos_token": 1}, "add_bos_token: expected bool, found int"),
    ],
)
def test_b60_b64_broken_metadata_names_the_key(change: dict[str, Any], message: str) -> None:
    metadata = byte_level() | {_KEY + name: value for name, value in change.items()}
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_gguf({key: value for key, value in metadata.items() if value is not None})


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (None, "scores: missing"),
        (np.zeros(264, np.uint8), "scores: expected an array of floats, found uint8"),
        (np.zeros(4, np.float32), "scores: 4 entries, but .* has 264"),
        ([[0.0], [1.0, 2.0]], "scores: expected an array of floats"),
    ],
)
def test_b60_scores_are_checked(scores: Any, message: str) -> None:
    metadata = sentence_piece() | {"tokenizer.ggml.scores": scores}
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_gguf({key: value for key, value in metadata.items() if value is not None})


def test_b64_absent_keys_have_documented_defaults(caplog: pytest.LogCaptureFixture) -> None:
    metadata = byte_level()
    for name in ("eos_token_id", "bos_token_id", "token_type", "pre"):
        del metadata[_KEY + name]
    tokenizer = Tokenizer.from_gguf(metadata)
    assert "tokenizer.ggml.pre: missing" in caplog.text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (None, None)
    assert not tokenizer.add_bos
    assert {tokenizer.token_text(i) for i in tokenizer.stop_token_ids} == {"<|im_end|>"}
    spm = Tokenizer.from_gguf(sentence_piece())
    assert (spm.bos_token_id, spm.eos_token_id, spm.add_bos, spm.add_eos) == (1, 2, True, False)


def test_harmony_end_of_message_ends_no_answer() -> None:
    control = ("<|bos|>", "<|end|>", "<|return|>", "<|call|>")
    assert Tokenizer.from_gguf(byte_level(control=control)).stop_token_ids == {0, 2, 3}
    assert 1 in Tokenizer.from_gguf(byte_level(control=control[:3])).stop_token_ids


def test_mistyped_stop_tokens_are_control_tokens() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level(user_defined=("<|eot_id|>", "<think>")))
    assert tokenizer.is_control(3)
    assert not tokenizer.is_control(4)
    assert 3 in tokenizer.stop_token_ids
    # One that ordinary text merges into is ordinary text.
    words = {"words": ("[E", "[EO", "[EOT", "[EOT]"), "merges": ("[ E", "[E O", "[EO T", "[EOT ]")}
    tokenizer = Tokenizer.from_gguf(byte_level(**words))
    assert not any(map(tokenizer.is_control, range(3, tokenizer.vocab_size)))


def test_phi3_control_tokens_swallow_the_blanks_after_them() -> None:
    metadata = sentence_piece(control=("<s>", "</s>", "<|user|>"))
    plain = Tokenizer.from_gguf(metadata)
    phi3 = Tokenizer.from_gguf(metadata | {"general.name": "Phi-3 mini"})
    assert encode(phi3, "<|user|>\n ab") == encode(plain, "<|user|>ab")
    assert encode(phi3, "<s> ab") == encode(plain, "<s> ab") != encode(plain, "<s>ab")


def test_unigram_vocabulary_normalizes_and_adds_both_ends(
    vocabulary_tokenizer: TokenizerByName,
) -> None:
    # Ids of XLM-RoBERTa's tokenizer, https://huggingface.co/FacebookAI/xlm-roberta-base
    ids = vocabulary_tokenizer("nomic-bert-moe").encode("Hello World")
    assert ids.tolist() == [0, 35378, 6661, 2]


def test_missing_bytes_fall_back_to_one_unknown_token() -> None:
    metadata = sentence_piece()
    metadata["tokenizer.ggml.token_type"][3:259] = NORMAL
    tokenizer = Tokenizer.from_gguf(metadata)
    assert encode(tokenizer, "éé")[1:] == [0]


def test_every_token_has_its_bytes(vocabulary_tokenizer: TokenizerByName) -> None:
    tokenizer = vocabulary_tokenizer("llama-spm")
    assert tokenizer.token_bytes(1) == b""
    assert tokenizer.token_bytes(3 + 0xE4) == b"\xe4"
    word = int(tokenizer.encode("word", add_special_tokens=False)[0])
    assert tokenizer.token_bytes(word) == b" word"
    assert tokenizer.token_bytes(tokenizer.vocab_size - 1)
