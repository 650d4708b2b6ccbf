"""The text of a choice: tokens in, deltas out, cut at the right token."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text.tiny_vocabularies import byte_level

from invar.text.output import TextAssembler, TextDelta
from invar.text.tokenizer import Tokenizer

WORDS = ("ab", "EN", "D_", "HERE", "zz", "axb", " “", "hell")
TOKENIZER = Tokenizer.from_gguf(
    byte_level(words=WORDS, merges=("a b", "E N", "D _", "z z", "l l"))
    | {"tokenizer.ggml.merges": ["a b"]}
)
FIRST_BYTE = 3
IDS = {word: FIRST_BYTE + 256 + index for index, word in enumerate(WORDS)}
IM_END = 2


def ids_of(*words: str) -> list[int]:
    return [IDS[word] for word in words]


def byte_ids(text: str) -> list[int]:
    return [FIRST_BYTE + byte for byte in text.encode()]


def run(ids: list[int], sizes: list[int], **options: Any) -> tuple[str, Any, int, list[int]]:
    """Push in groups of the given sizes; text, stop reason, tokens used, offsets."""
    assembler = TextAssembler(TOKENIZER, **options)
    text, used, offsets = "", 0, []
    rest = list(ids)
    delta = TextDelta("", False, None, 0)
    while rest:
        size = sizes.pop(0) if sizes else 1
        group, rest = rest[:size], rest[size:]
        delta = assembler.push(group)
        text, used = text + delta.text, used + delta.tokens_used
        offsets += delta.token_offsets
        if delta.finished:
            return text, delta.stop_reason, used, offsets
    delta = assembler.finish()
    return text + delta.text, delta.stop_reason, used, offsets


@pytest.mark.parametrize("sizes", [[], [2], [5], [3, 2]])
def test_b15_the_answer_ends_at_the_token_that_completes_a_stop(sizes: list[int]) -> None:
    ids = ids_of("ab", "EN", "D_", "HERE", "zz")
    assert run(ids, sizes, stop=["END_HERE"]) == ("ab", "END_HERE", 4, [0, 2, 4, 6])


def test_b16_stop_inside_a_token_and_hidden_stop_tokens() -> None:
    assert run(ids_of("axb"), [], stop=["x"])[:3] == ("a", "x", 1)
    for skip in (True, False):
        for include in (True, False):
            text, reason, used, _ = run(
                [*ids_of("ab"), IM_END, *ids_of("zz")],
                [],
                stop_token_ids={IM_END},
                skip_special_tokens=skip,
                include_stop_str_in_output=include,
            )
            assert text == ("ab<|im_end|>" if include and not skip else "ab")
            assert (reason, used) == (IM_END, 2)


def test_b16_a_stop_token_releases_held_text() -> None:
    ids = [*ids_of("ab", "EN"), IM_END]
    assert run(ids, [], stop=["END"], stop_token_ids={IM_END})[:3] == ("abEN", IM_END, 3)


def test_nothing_ends_an_answer_before_min_tokens() -> None:
    ids = [*ids_of("EN"), IM_END, *ids_of("EN", "D_")]
    options = {"stop": ["EN"], "stop_token_ids": {IM_END}, "min_tokens": 2}
    assert run(ids, [], **options)[:3] == ("EN", "EN", 3)


def test_b01_an_answer_cut_inside_a_character_ends_in_one_replacement() -> None:
    ids = byte_ids("a🎉")[:-1]
    for sizes in ([], [9], [2, 2]):
        assert run(ids, sizes)[0] == "a\ufffd"


def test_b28_bytes_of_tokens_give_the_text() -> None:
    ids = [*ids_of("ab"), *byte_ids("“中”")]
    text, _, used, offsets = run(ids, [])
    assert b"".join(TOKENIZER.token_bytes(token_id) for token_id in ids).decode() == text
    assert used == len(ids)
    assert offsets == [0, 2, 2, 2, 3, 3, 3, 4, 4, 4]
    # A token decoded on its own: half a character shows as U+FFFD, its bytes stay exact.
    assert TOKENIZER.token_text(ids[1]) == "\ufffd"
    assert TOKENIZER.token_bytes(ids[1]) == b"\xe2"


def test_pushing_after_the_end_adds_nothing() -> None:
    assembler = TextAssembler(TOKENIZER, stop=["a"])
    assert assembler.push(ids_of("ab")).finished
    assert assembler.push(ids_of("ab")) == TextDelta("", True, None, 0)
    assert assembler.finish() == TextDelta("", True, None, 0)


@given(
    ids=st.lists(st.integers(0, TOKENIZER.vocab_size - 1) | st.sampled_from(sorted(IDS.values()))),
    sizes=st.lists(st.integers(1, 5)),
    stop=st.lists(st.sampled_from(["END", "ab", "abE", "z", "\ufffd", "HEREa"]), max_size=2),
    min_tokens=st.integers(0, 3),
    skip=st.booleans(),
    include=st.booleans(),
)
def test_streamed_text_equals_text_at_once(
    ids: list[int], sizes: list[int], stop: list[str], min_tokens: int, skip: bool, include: bool
) -> None:
    options: dict[str, Any] = {
        "stop": stop,
        "stop_token_ids": {IM_END},
        "min_tokens": min_tokens,
        "skip_special_tokens": skip,
        "include_stop_str_in_output": include,
    }
    assert run(ids, list(sizes), **options) == run(ids, [len(ids)], **options)
