"""What users pass as a constraint, and the one string that it comes to."""

from __future__ import annotations

import dataclasses
import enum
import json
from typing import Any, Literal, NotRequired, TypedDict

import pydantic
import pytest
from llguidance import LLMatcher, LLTokenizer

from invar import SamplingParams, StructuredOutputs
from invar.grammar.python_types import schema_of


@dataclasses.dataclass
class Point:
    x: int
    label: str = ""
    next: Point | None = None


class Move(TypedDict):
    to: Point
    fast: NotRequired[bool]


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Person(pydantic.BaseModel):
    name: str


def closed(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


STRING, INTEGER = {"type": "string"}, {"type": "integer"}
SKILL = closed({"name": STRING, "level": STRING}, "name", "level")
POINT = closed(
    {"x": INTEGER, "label": STRING, "next": {"anyOf": [{"$ref": "#/$defs/Point"},
                                                       {"type": "null"}]}}, "x",
)  # fmt: skip


@pytest.mark.parametrize(("kind", "schema"), [
    ({"name": str, "age": int, "skills": [{"name": str, "level": str}], "verified": bool},
     closed({"name": STRING, "age": INTEGER, "skills": {"type": "array", "items": SKILL},
             "verified": {"type": "boolean"}}, "name", "age", "skills", "verified")),
    ({"kind": ("a", "b"), "boss?": float}, closed(
        {"kind": {"enum": ["a", "b"]}, "boss": {"type": "number"}}, "kind")),
    (list[int | None], {"type": "array", "items": {"anyOf": [INTEGER, {"type": "null"}]}}),
    (dict[str, Literal["x", 1]], {"type": "object", "additionalProperties": {"enum": ["x", 1]}}),
    (tuple[int, str], {"type": "array", "prefixItems": [INTEGER, STRING], "minItems": 2,
                       "maxItems": 2}),
    (Colour, {"enum": ["red", "blue"]}),
    (Point, {"$ref": "#/$defs/Point", "$defs": {"Point": POINT}}),
    (Move, {"$ref": "#/$defs/Move", "$defs": {
        "Move": closed({"to": {"$ref": "#/$defs/Point"}, "fast": {"type": "boolean"}}, "to"),
        "Point": POINT}}),
])  # fmt: skip
def test_python_types(kind: object, schema: dict[str, Any]) -> None:
    assert schema_of(kind) == schema
    assert StructuredOutputs.of(kind).json_schema() == schema


def test_pydantic_classes() -> None:
    assert StructuredOutputs.of(Person).json_schema() == Person.model_json_schema()
    assert StructuredOutputs(json=Person).json_schema() == Person.model_json_schema()


@pytest.mark.parametrize(
    "kind", [{"a": {1, 2}}, [int, str], {"a": print}, dict[int, str], Point(1)]
)
def test_what_is_no_type(kind: object) -> None:
    with pytest.raises(ValueError, match="json: "):
        StructuredOutputs.of({"x": kind}).normalised()


def test_fields_and_schemas_are_told_apart() -> None:
    assert StructuredOutputs.of({"regex": "a+"}).regex == "a+"
    assert StructuredOutputs.of({"regex": str}).kind == "json"
    assert StructuredOutputs.of({"type": "object"}).json_schema() == {"type": "object"}
    assert StructuredOutputs.of({"json": {"x": int}}).json_schema()["required"] == ["x"]
    assert StructuredOutputs(json='{"type": "null"}').json_schema() == {"type": "null"}


@pytest.mark.parametrize(("options", "why"), [
    ({}, "exactly one"),
    ({"regex": "a", "choice": ["b"]}, "exactly one"),
    ({"regex": ""}, "regex: "),
    ({"regex": "a" * 70_000}, "regex: 70000 characters"),
    ({"choice": []}, "choice: "),
    ({"choice": ["a", ""]}, "choice: "),
    ({"choice": ["a"] * 5000}, "choice: 5000"),
    ({"json_object": True, "strict": 1}, "strict: "),
])  # fmt: skip
def test_bad_fields(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        StructuredOutputs(**options)


def test_unknown_names() -> None:
    with pytest.raises(TypeError, match="whitespace_pattern"):
        StructuredOutputs(json={}, whitespace_patern="x")  # type: ignore[call-arg]


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(("options", "why"), [
    ({"json": "{"}, "json: no valid JSON"),
    ({"json": "[" * 100_000}, "json: nested too deeply"),
    ({"json": nested(200)}, "json: the schema is nested more than"),
    ({"json": {"enum": ["x" * 600_000]}}, "json: the schema has 6"),
    ({"json": "5"}, "json: a schema is an object"),
    ({"structural_tag": {"type": "structural_tag", "format": {"type": "what"}}}, "format.type"),
    ({"structural_tag": "{}"}, "structural_tag"),
])  # fmt: skip
def test_what_has_no_normalised_form(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        StructuredOutputs(**options).normalised()


def test_the_normalised_form_holds_all_that_matters() -> None:
    def text(**options: Any) -> str:
        return StructuredOutputs(json={"type": "object", "properties": {}}, **options).normalised()

    forms = [
        text(),
        text(strict=True),
        text(disable_any_whitespace=True),
        text(whitespace_pattern=" ?"),
        text(disable_additional_properties=True),
    ]
    assert len(set(forms)) == len(forms)
    assert all(list(json.loads(form)) == ["grammars", "hints"] for form in forms)
    assert StructuredOutputs(json={}).normalised(leading_space=True) != text()


def test_sampling_params_take_every_form() -> None:
    for given in (Person, Point, {"name": str}, {"regex": "a"}, StructuredOutputs(choice=["a"])):
        params = SamplingParams(structured_outputs=given)
        assert isinstance(params.structured_outputs, StructuredOutputs)
        assert params.clone().structured_outputs == params.structured_outputs
    older = SamplingParams(guided_decoding={"json": {"type": "object"}})
    assert older.structured_outputs.json == {"type": "object"}
    assert older.guided_decoding is None


@pytest.mark.parametrize("pattern", [r"\d{3}-\d", r"[\d-]+", r"[^\D]{3}-\d"])
def test_digits_of_a_regex_are_those_of_ascii(pattern: str) -> None:
    """In bytes: others begin with one that no text of ASCII has."""
    tokenizer = LLTokenizer("byte")
    for form in ({"regex": pattern}, {"structural_tag": tag_of(pattern)}):
        normalised = json.loads(StructuredOutputs(**form).normalised())
        del normalised["hints"]
        matcher = LLMatcher(tokenizer, json.dumps(normalised))
        for text, fits in (("123-4", 5), ("٣٣٣-٣", 0)):
            assert matcher.validate_tokens(tokenizer.tokenize_str(text)) == fits


def tag_of(pattern: str) -> dict[str, Any]:
    return {"type": "structural_tag", "format": {"type": "regex", "pattern": pattern}}
