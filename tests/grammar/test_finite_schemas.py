"""References that no finite value fits are found, and nothing else is."""

from __future__ import annotations

import time
from typing import Any

import jsonschema
import pytest

from grammar.vocabulary import compiler
from invar.grammar.compiler import GrammarError
from invar.grammar.finite_schemas import without_endless
from invar.grammar.structured_outputs import StructuredOutputs


def referring(target: Any, around: Any = None, **others: Any) -> dict[str, Any]:
    around = {"$ref": "#/$defs/a"} if around is None else around
    return {**around, "$defs": {"a": target, **others}}


A, B = {"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}


def holding(value: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"x": value}, "required": ["x"], **fields}


EMPTY = {
    "itself": referring(A),
    "the whole": {"$ref": "#"},
    "in turn": referring(B, b=A),
    "the only branch": referring({"anyOf": [A, {"oneOf": [B]}]}, b=A),
    "one of all": referring({"allOf": [{"type": "string"}, B]}, b=A),
    "a list without an end": referring(holding(A)),
    "by another place": holding({"$ref": "#/properties/x"}),
    "an array that is never empty": referring({"type": "array", "minItems": 1, "items": A}),
    "its first place": referring({"type": ["array"], "minItems": 2, "prefixItems": [{}, A]}),
    "nothing": referring(False),
    "escaped": {"$ref": "#/$defs/a~1b~0", "$defs": {"a/b~": {"$ref": "#/$defs/a~1b~0"}}},
}
WITH_VALUES = {
    "a list": referring(holding({"anyOf": [A, {"type": "null"}]})),
    "a tree": referring({"type": "array", "items": A}),
    "not needed": referring({"type": "object", "properties": {"x": A}}),
    "of any type": referring({"properties": {"x": A}, "required": ["x"]}),
    "fewer places": referring({"type": "array", "minItems": 1, "prefixItems": [{}, A]}),
    "an anchor": {"$ref": "#a", "$defs": {"a": {"$anchor": "a"}}},
    "elsewhere": {"$ref": "https://json-schema.org/draft/2020-12/schema"},
    "no place": {"anyOf": [{"$ref": "#/nowhere/0"}, {"type": "null"}]},
    "a chain": {"$ref": "#/$defs/0", "$defs": {
        **{str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(50)}, "50": {"type": "null"}}},
    "data": {"const": {"$ref": "#"}, "properties": {"$ref": {"$ref": "#/$defs/a"}},
             "$defs": {"a": {"type": "null"}}},
    "a document within": {"$id": "http://x/", **referring({"$id": "b", "items": {"$ref": "#"}})},
    "nonsense": {"$ref": {}, "required": [[]], "properties": 3, "anyOf": 7, "minItems": "x"},
}  # fmt: skip


@pytest.mark.parametrize("schema", EMPTY.values(), ids=EMPTY)
def test_what_nothing_fits_is_refused(schema: dict[str, Any]) -> None:
    assert without_endless(schema) is False
    with pytest.raises(ValueError, match="no finite value fits"):
        StructuredOutputs(json=schema).normalised()


@pytest.mark.parametrize("schema", WITH_VALUES.values(), ids=WITH_VALUES)
def test_what_has_values_stays_as_it_is(schema: dict[str, Any]) -> None:
    assert without_endless(schema) is schema


def test_a_branch_without_values_is_left_out() -> None:
    schema = referring(A, {"anyOf": [A, {"type": "integer"}]})
    assert without_endless(schema) == {
        "anyOf": [False, {"type": "integer"}],
        "$defs": {"a": False},
    }
    optional = referring(A, {"type": "object", "properties": {"x": A, "y": {"const": A}}})
    found = without_endless(optional)
    assert isinstance(found, dict)
    assert found["properties"] == {"x": False, "y": {"const": A}}
    jsonschema.validate({"y": A}, found)
    compiler().check(StructuredOutputs(json=optional).normalised())


def chain(length: int, order: int) -> dict[str, Any]:
    links = [(f"d{i}", {"$ref": f"#/$defs/d{i + 1}"}) for i in range(length)]
    return {"$ref": "#/$defs/d0", "$defs": dict([*links, (f"d{length}", {})][::order])}


def nested(depth: int) -> dict[str, Any]:
    """Every level needs the next one many times over, and is referred to."""
    schema: dict[str, Any] = {"enum": [1]}
    place, places = "#", ["#"]
    for _ in range(depth):
        schema = {"type": "object", "properties": {"x": schema}, "required": ["x"] * 100}
        place += "/properties/x"
        places.append(place)
    return {**schema, "$defs": {str(i): {"$ref": one} for i, one in enumerate(places)}}


@pytest.mark.parametrize(
    "schema",
    [chain(10_000, 1), chain(10_000, -1), nested(50),
     {"$ref": "#/anyOf/9999", "anyOf": [{"$ref": f"#/anyOf/{i:05d}"} for i in range(10_000)]}],
    ids=["chain", "chain back", "nested", "spelt otherwise"],
)  # fmt: skip
def test_what_looking_costs_is_bounded(schema: dict[str, Any]) -> None:
    began = time.thread_time()
    without_endless(schema)
    assert time.thread_time() - began < 2


@pytest.mark.parametrize(
    "lark", ['start: "abc" x\nx: x "d"', 'start: "abc" x\nx: x', 'start: /[ab]/ x\nx: "c" y\ny: y']
)
def test_a_grammar_that_no_text_fits_is_refused(lark: str) -> None:
    with pytest.raises(GrammarError, match="no text fits it"):
        compiler().check(StructuredOutputs(grammar=lark).normalised())
