"""Incremental detokenizing: no half characters, no difference to decoding at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text.tiny_vocabularies import byte_level, sentence_piece

from invar.text.detokenizer import Detokenizer
from invar.text.tokenizer import Tokenizer, TokenizerError

BYTE_LEVEL = Tokenizer.from_gguf(byte_level(user_defined=("<think>",)))
PIECES = Tokenizer.from_gguf(sentence_piece())
FIRST_BYTE = {id(BYTE_LEVEL): 4, id(PIECES): 3}


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    first = FIRST_BYTE[id(tokenizer)]
    return [first + byte for byte in data]


def streamed(tokenizer: Tokenizer, ids: list[int], **options: bool) -> list[str]:
    detokenizer = Detokenizer(tokenizer, **options)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, PIECES])
def test_b01_characters_come_whole(tokenizer: Tokenizer) -> None:
    ids = byte_ids(tokenizer, "🎉中".encode())
    assert streamed(tokenizer, ids) == ["", "", "", "🎉", "", "", "中", ""]
    assert tokenizer.decode(ids) == "🎉中"


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, PIECES])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_b01_an_unfinished_character_is_one_replacement(tokenizer: Tokenizer, length: int) -> None:
    ids = byte_ids(tokenizer, b"a" + "🎉".encode()[:length])
    assert streamed(tokenizer, ids) == ["a"] + [""] * length + ["\ufffd"]
    assert tokenizer.decode(ids) == "a\ufffd"


def test_b40_lone_continuation_bytes_are_valid_unicode() -> None:
    ids = byte_ids(BYTE_LEVEL, b"\x80\xff\xc3a\xbf")
    text = "".join(streamed(BYTE_LEVEL, ids))
    assert text == BYTE_LEVEL.decode(ids) == "\ufffd\ufffd\ufffda\ufffd"
    text.encode("utf-8")


def test_control_tokens_are_silent_unless_asked_for() -> None:
    ids = [1, *byte_ids(BYTE_LEVEL, b"a"), 3, 2]
    assert "".join(streamed(BYTE_LEVEL, ids)) == "a<think>"
    shown = "".join(streamed(BYTE_LEVEL, ids, skip_special_tokens=False))
    assert shown == "<|im_start|>a<think><|im_end|>"
    # A hidden token does not break the character around it.
    first, *rest = byte_ids(BYTE_LEVEL, "é".encode())
    assert "".join(streamed(BYTE_LEVEL, [first, 1, *rest])) == "é"


def test_the_space_before_a_first_word_is_not_text() -> None:
    word = PIECES.encode("ab", add_special_tokens=False).tolist()
    assert [PIECES.token_text(token_id) for token_id in word] == [" ab"]
    assert "".join(streamed(PIECES, [1, *word, *word])) == "ab ab"
    assert "".join(streamed(PIECES, word, at_start=False)) == " ab"


def test_b10_an_id_out_of_range_is_a_clean_error() -> None:
    with pytest.raises(TokenizerError, match="outside the vocabulary"):
        Detokenizer(PIECES).push(PIECES.vocab_size)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, PIECES])
@pytest.mark.parametrize("skip", [True, False])
@given(data=st.data())
def test_chunks_joined_are_the_whole_text(
    tokenizer: Tokenizer, skip: bool, data: st.DataObject
) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    chunks = streamed(tokenizer, ids, skip_special_tokens=skip)
    assert "".join(chunks) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, PIECES])
@given(text=st.text(max_size=40))
def test_any_text_survives_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False).tolist()
    chunks = streamed(tokenizer, ids)
    assert "".join(chunks) == text
    if "\ufffd" not in text:
        assert all("\ufffd" not in chunk for chunk in chunks)
