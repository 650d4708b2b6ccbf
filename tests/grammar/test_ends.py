"""Ends of grammars whose last letters are no syntax: found, and answers are led to them."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import jsonschema
import numpy as np
import pytest

from grammar.vocabulary import EOS, TOKENS, compiler, text_of
from invar import StructuredOutputs
from invar.grammar.guide import Guide
from invar.grammar.pattern_ends import ends_of, pattern_ends

REGEXES = (
    "v+y",
    "[a-m]+z",
    "h+e+lp",
    "[0-9]+(pr|em)",
    "v+w+y+z",
    "(a|b)*c{3}",
    "[^z]+z",
    "[^z]+zy",
)


@pytest.mark.parametrize("regex", REGEXES)
def test_what_ends_a_repetition_is_found(regex: str) -> None:
    grammar = compiler().check(StructuredOutputs(regex=regex).normalised())
    assert grammar.end is not None
    assert re.fullmatch(regex, text_of(list(grammar.end)))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("regex", REGEXES)
def test_an_answer_ends_within_its_limit(regex: str, seed: int) -> None:
    grammar = compiler().check(StructuredOutputs(regex=regex).normalised())
    assert grammar.end is not None
    limit, random = len(grammar.end) + 12, np.random.default_rng(seed)
    guide = Guide(grammar, len(TOKENS), max_tokens=limit)
    answer = guide.replay([])
    while len(answer) < limit and not guide.finished and answer[-1:] != [EOS]:
        guide.write_mask()
        assert guide.mask is not None
        bits = np.unpackbits(guide.mask[:-1].view(np.uint8), bitorder="little")
        answer += guide.take(int(random.choice(np.flatnonzero(bits))))
        assert guide.error is None
    assert len(answer) <= limit
    assert re.fullmatch(regex, text_of([one for one in answer if one != EOS]))


@pytest.mark.parametrize(
    "schema",
    [
        {"pattern": "z$"},
        {"pattern": "^[^z]{3,}z$"},
        {"pattern": "^[^=]+=[0-9]{2}$"},  # as the @ of an address
        {"pattern": "^he.*:no$"},
        {"pattern": r"^\S+:\S+-\S{3,}$"},
        {"minLength": 30},
    ],
)
def test_what_ends_a_text_in_json_is_found(schema: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", **schema}, "b": {}}}
    schema["required"] = ["a", "b"]
    grammar = compiler().check(StructuredOutputs(json=schema).normalised())
    assert grammar.end is not None
    jsonschema.validate(json.loads(text_of(list(grammar.end))), schema)


@pytest.mark.parametrize(("pattern", "ends"), [
    (r"^https?://.*\.com$", ["m", "om", "com", ".com", "/.com"]),
    (r"(jpg|png)", ["g", "ng", "pg", "jpg", "png"]), (r"[0-9]{3}", ["0", "00", "000"]),
    (r"a(?:bc){2}", ["c", "bc", "cbc", "bcbc", "abcbc"]), (r"\S+x\d", ["0", "x0", "ax0"]),
    (r"[^a0]", ["A"]), (r"\p{L}x", []), ("(", []), ("(?=a)b", []), ("x" * 5000, []),
    ("[^\\x00-\\x7f]", []), ("a{999}", ["a" * count for count in range(1, 6)]),
])  # fmt: skip
def test_ends_of_a_pattern(pattern: str, ends: list[str]) -> None:
    assert ends_of(pattern)[:5] == ends


@pytest.mark.parametrize(
    "pattern",
    ["((((a{99}){99}){99}){99}){99}", "((((a*){99}){99}){99}){99}", "|".join(["abc"] * 60),
     "(a|b" * 50 + ")" * 50, "(" * 84 + "a" + ")*" * 84, "(((a|b){9}|c){9}|d){9}" * 11],
)  # fmt: skip
def test_looking_at_a_pattern_costs_little(pattern: str) -> None:
    began = time.thread_time()
    several = [{"pattern": f"{pattern}{number}"} for number in range(99)]
    assert all(len(text) <= 64 for text in pattern_ends(several))
    assert time.thread_time() - began < 1


def test_what_nothing_fits_later_on_says_so() -> None:
    """Other texts fit, so that this shows only where the answer gets there."""
    lark = 'start: /[ab]/ x | "no"\nx: x'
    grammar = compiler().check(StructuredOutputs(grammar=lark).normalised())
    guide = Guide(grammar, len(TOKENS), max_tokens=200)  # near the limit it would be led away
    guide.take(TOKENS.index(b"a"))
    guide.write_mask()
    assert guide.error == "no text fits it"
    assert not guide.is_broken
