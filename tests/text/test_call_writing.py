"""Calls that must be made: a model that finds every token equally likely writes calls that the
format's own reader finds, with arguments that fit the tools' schemas."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest

from invar.grammar.compiler import CompiledGrammar, GrammarCompiler
from invar.grammar.guide import Guide
from invar.grammar.structured_outputs import StructuredOutputs
from invar.text.call_writing import Hand, Spec, WrittenTool, calls_only, text_with_calls
from invar.text.model_formats import CALL_FORMATS, WHOLE_FORMATS
from invar.text.reply import CallFormat, MarkedFormat, ReplyFormat, ReplyMessage
from invar.text.reply_detection import read

EOS = 256
PIECES = (
    '{"',
    '":',
    '","',
    '"}',
    "[]",
    "{}",
    "true",
    "false",
    "  ",
    "\n ",
    "ab",
    "12",
    "</",
    "weather",
)
SEEDS = range(2)
PROMPT_ENDS = {"openai": "<|start|>assistant", "functionary_v32": ">>>"}
NOT_WRITTEN = "muse_glimmer"  # read alone
FORMATS = sorted({*CALL_FORMATS, *WHOLE_FORMATS} - {NOT_WRITTEN})

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "A city."},
        "days": {"type": "integer", "minimum": 1, "maximum": 30},
        "unit": {"type": "string", "enum": ["celsius", "kelvin"]},
        "near": {"type": "array", "items": {"type": "string"}},
        "exact": {"type": "boolean"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "place": {"$ref": "#/$defs/place"},
    },
    "required": ["city", "unit", "place"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "label": {"type": "string"}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}}
CODE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "code": {"type": "string", "pattern": "^[A-Z]{2}[0-9]{3}$"},
        "short": {"type": "string", "minLength": 2, "maxLength": 6},
        "level": {"type": ["integer", "null"]},
    },
    "required": ["code", "short", "level"],
    "additionalProperties": False,
}
OPEN: dict[str, Any] = {"type": "object", "additionalProperties": {"type": "integer"}}
SCHEMAS = {"weather": WEATHER, "now": NOTHING, "find_code": CODE, "counts": OPEN}
TOOLS = tuple(WrittenTool(name, schema, strict=True) for name, schema in SCHEMAS.items())


@dataclass(frozen=True)
class MarkerTokenizer:
    """Every byte, some pieces of text, an end, and control tokens for markers."""

    control: tuple[str, ...] = ()
    bos_token_id: None = None
    stop_token_ids: frozenset[int] = frozenset({EOS})
    tokens: tuple[bytes, ...] = field(init=False)

    def __post_init__(self) -> None:
        pieces = [one.encode() for one in (*PIECES, *self.control)]
        tokens = (*(bytes([one]) for one in range(256)), b"<eos>", *pieces)
        object.__setattr__(self, "tokens", tokens)

    @property
    def vocab_size(self) -> int:
        return len(self.tokens)

    @property
    def control_ids(self) -> dict[str, int]:
        first = len(self.tokens) - len(self.control)
        return {one: first + index for index, one in enumerate(self.control)}

    def is_control(self, token_id: int) -> bool:
        return token_id == EOS or token_id >= len(self.tokens) - len(self.control)

    def visible_bytes(self, token_id: int, *, skip_special_tokens: bool) -> bytes:
        return self.tokens[token_id]

    def encode_inside(self, text: str) -> list[int]:
        return list(text.encode())


def form_of(name: str) -> ReplyFormat:
    whole = WHOLE_FORMATS.get(name)
    return MarkedFormat(None, CALL_FORMATS[name]) if whole is None else whole


@cache
def tokenizer(name: str, with_control: bool) -> MarkerTokenizer:
    """Markers in bars or capital letters in brackets are control tokens of most vocabularies."""
    found = re.findall(
        r"<[|｜][^<>]*?[|｜]>|<\|?tool_call\|?>|\[[A-Z_]+\]", " ".join(form_of(name).markers)
    )
    return MarkerTokenizer(tuple(dict.fromkeys(found)) if with_control else ())


@cache
def compiler(tokens: MarkerTokenizer) -> GrammarCompiler:
    return GrammarCompiler(lambda: tokens, tokens.vocab_size)


def compiled(tokens: MarkerTokenizer, spec: Spec) -> CompiledGrammar:
    form = StructuredOutputs(structural_tag=spec)
    return compiler(tokens).check(form.normalised())


def walk(tokens: MarkerTokenizer, grammar: CompiledGrammar, seed: int, room: int = 320) -> str:
    """An answer that is led to its end before its limit."""
    assert grammar.end is not None
    chance, limit = random.Random(seed), room + len(grammar.end)
    guide = Guide(grammar, tokens.vocab_size, max_tokens=limit)
    said = guide.replay([])
    while not guide.finished and len(said) < limit and said[-1:] != [EOS]:
        if guide.mask_is_due:
            guide.write_mask()
            guide.mask_is_due = False
        assert guide.error is None
        bits = np.unpackbits(guide.mask[:-1].view(np.uint8), bitorder="little")
        said += guide.take(chance.choice(np.flatnonzero(bits).tolist()))
    assert guide.error is None
    return b"".join(tokens.tokens[one] for one in said if one != EOS).decode("utf-8", "replace")


def check(message: ReplyMessage, text: str) -> None:
    for call in message.calls:
        assert call.complete, text
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


CASES = [
    pytest.param(name, control, id=f"{name}-{'control' if control else 'text'}")
    for name in FORMATS
    for control in ((False, True) if tokenizer(name, True).control else (False,))
]


def written(
    name: str, with_control: bool, tools: tuple[WrittenTool, ...], seed: int, parallel: bool
) -> list[tuple[ReplyMessage, str]]:
    """What is said by each of a format's writers."""
    tokens, form, end = tokenizer(name, with_control), form_of(name), PROMPT_ENDS.get(name, "")
    found = []
    for writer in form.writers:
        reader = MarkedFormat(None, (writer,)) if isinstance(writer, CallFormat) else form
        hand = Hand(tokens.control_ids)
        spec = calls_only(writer, tools, hand, parallel=parallel, prompt_end=end)
        assert not hand.ignored
        text = walk(tokens, compiled(tokens, spec), seed)
        message = read(reader, text, SCHEMAS, end)
        assert message.content == "", text
        assert message.calls, text
        check(message, text)
        found.append((message, text))
    return found


@pytest.mark.parametrize(("name", "with_control"), CASES)
def test_calls_that_must_be_made(name: str, with_control: bool) -> None:
    for seed in SEEDS:
        written(name, with_control, TOOLS, seed, parallel=True)
        for message, _ in written(name, with_control, TOOLS, seed, parallel=False):
            assert len(message.calls) == 1


@pytest.mark.parametrize(("name", "with_control"), CASES)
def test_several_calls_of_one_tool(name: str, with_control: bool) -> None:
    counts = set()
    for seed in range(40):
        for message, _ in written(name, with_control, TOOLS[1:2], seed, parallel=True):
            assert {call.name for call in message.calls} == {"now"}
            counts.add(len(message.calls))
        if max(counts) > 1:
            return
    assert name == "openai"  # a message to a function ends its replies


@pytest.mark.parametrize(("name", "with_control"), CASES)
def test_strict_tools_in_free_text(name: str, with_control: bool) -> None:
    """Text is free; what a format's own markers begin is a call that fits."""
    tokens, form, end = tokenizer(name, with_control), form_of(name), PROMPT_ENDS.get(name, "")
    hand = Hand(tokens.control_ids)
    begun = ">>>" if end == ">>>" else ""
    spec = text_with_calls(form.writers, form.markers, TOOLS, hand, parallel=True, begun=begun)
    grammar = compiled(tokens, spec)
    words = "all\nWords, <b>and</b> more." if begun else "Words, <b>and</b> more."
    assert fits(tokens, grammar, words)
    bare = any("" in writer.begins for writer in form.writers)
    for message, text in written(name, with_control, TOOLS, 0, parallel=False):
        told = text if bare or begun else f"So. {text}"
        assert fits(tokens, grammar, told), told
        (call,) = message.calls
        wrong = told.replace(call.name, "other", 1)
        assert not fits(tokens, grammar, wrong), wrong


@pytest.mark.parametrize("name", ["qwen3_xml", "gemma4"])
@pytest.mark.parametrize(
    ("schema", "lost"),
    [
        ({"type": "string", "enum": ["a", "bb"], "minLength": 2}, "minLength"),
        ({"type": "string", "const": "a", "pattern": "b"}, "pattern"),
        ({"anyOf": [{"const": "a"}, {"type": "string"}], "maxLength": 3}, "maxLength"),
    ],
)
def test_what_cannot_be_enforced_is_told(name: str, schema: dict[str, Any], lost: str) -> None:
    (writer,) = form_of(name).writers
    parameters = {"type": "object", "properties": {"a": schema}}
    hand = Hand({})
    writer.arguments(WrittenTool("f", parameters), hand)
    assert [one for one in hand.ignored if f"f: {lost} cannot" in one]
    with pytest.raises(ValueError, match=f"f: {lost} cannot be enforced"):
        writer.arguments(WrittenTool("f", parameters, strict=True), Hand({}))


def fits(tokens: MarkerTokenizer, grammar: CompiledGrammar, text: str) -> bool:
    control = "|".join(map(re.escape, tokens.control)) or "(?!)"
    ids: list[int] = []
    for piece in re.split(f"({control})", text):
        ids += [tokens.control_ids[piece]] if piece in tokens.control_ids else piece.encode()
    return bool(grammar.completer.ends_with(grammar.matcher(), ids))
