"""Ends of grammars whose last letters are no syntax: found, and answers are led to them."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import numpy as np
import pytest

from grammar.vocabulary import EOS, TOKENS, compiler, text_of
from invar import StructuredOutputs
from invar.grammar.guide import Guide

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
        {"minLength": 30},
    ],
)
def test_what_ends_a_text_in_json_is_found(schema: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", **schema}, "b": {}}}
    schema["required"] = ["a", "b"]
    grammar = compiler().check(StructuredOutputs(json=schema).normalised())
    assert grammar.end is not None
    jsonschema.validate(json.loads(text_of(list(grammar.end))), schema)


def test_what_nothing_fits_later_on_says_so() -> None:
    """Other texts fit, so that this shows only where the answer gets there."""
    lark = 'start: /[ab]/ x | "no"\nx: x'
    grammar = compiler().check(StructuredOutputs(grammar=lark).normalised())
    guide = Guide(grammar, len(TOKENS), max_tokens=200)  # near the limit it would be led away
    guide.take(TOKENS.index(b"a"))
    guide.write_mask()
    assert guide.error == "no text fits it"
    assert not guide.is_broken
