"""`StructuredOutputs`: what an answer must look like, with vLLM's names, and its normalised form.

The normalised form is one string that a grammar engine compiles: llguidance's list of grammars as
JSON, with the hints of whoever wrote it (`structural_tag.Hints`) beside the list. It travels in the
engine request, and the same string always means the same language.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any

from invar.config import check_names
from invar.grammar.finite_schemas import without_endless
from invar.grammar.pattern_ends import ends_of, pattern_ends
from invar.grammar.python_types import is_json, schema_of
from invar.grammar.structural_tag import Hints, tag_grammar, terminal

MAX_SCHEMA_CHARACTERS = 1 << 19  # of a JSON Schema as text
MAX_GRAMMAR_CHARACTERS = 1 << 16  # of a regex or a grammar: compiling may take its square
MAX_CHOICES = 4096
MAX_DEPTH = 120  # of a schema; the engine's own reader ends at 128

# Models love blanks; where JSON allows some, these are enough for any pretty printer. Each
# alternative ends, so that no model loops in them (vllm#38696).
WHITESPACE = r"\x0A[\x20\x09]{0,24}|\x20{1,2}"

SUFFIX = re.compile(r'\[suffix=("(?:[^"\\]|\\.)*")')  # of a rule of Lark

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass
class StructuredOutputs:
    r"""Exactly one of the first six says what an answer must look like.

    json: a JSON Schema (dict or text), a pydantic class, a dataclass, a TypedDict, or plain types
    such as ``{"name": str, "tags": [str]}``. regex: Rust's syntax, `\d` is 0 to 9. choice: one of
    these texts. grammar: Lark or GBNF. structural_tag: text with constrained parts. Raises
    ValueError naming the field for a bad value, TypeError for an unknown name.
    """

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False  # none between the tokens of JSON
    disable_additional_properties: bool = False  # where a schema does not speak of them
    whitespace_pattern: str | None = None  # regex of what may stand between the tokens of JSON
    strict: bool = False  # a keyword that cannot be enforced is an error; else it is ignored
    complete_at_limit: bool = True  # near max_tokens the answer is led to its shortest end

    def __new__(cls, *args: Any, **options: Any) -> StructuredOutputs:
        check_names(options, (field.name for field in fields(cls)), "StructuredOutputs")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ValueError(f"exactly one of {', '.join(KINDS)} is needed, got {given or 'none'}")
        self.kind = given[0]
        for name in (
            "disable_any_whitespace",
            "disable_additional_properties",
            "strict",
            "complete_at_limit",
        ):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}: expected true or false, got {getattr(self, name)!r:.60}")
        for name in ("regex", "grammar", "whitespace_pattern"):
            _check_text(name, getattr(self, name))
        if self.choice is not None:
            _check_choice(self.choice)

    @classmethod
    def of(cls, value: object) -> StructuredOutputs:
        """From what a user passes: one already, its fields as a dict, or a type of answers."""
        if isinstance(value, cls):
            return value
        names = {field.name for field in fields(cls)}
        if isinstance(value, Mapping) and set(value) & set(KINDS) and set(value) <= names:
            # A shape may have such a key too: {"regex": str}.
            is_shape = "json" not in value and not is_json(value)
            return cls(json=value) if is_shape else cls(**value)
        return cls(json=value)

    def normalised(self, *, leading_space: bool = False) -> str:
        """The one string. leading_space: JSON may begin with a blank, as the words of some
        tokenizers do. Raises ValueError naming the field."""
        hints = Hints()
        if self.is_json:
            rule = self._json_rule(self.json_schema())
            lark = (
                f"%llguidance {{}}\nstart: {'/ ?/ ' if leading_space else ''}json\njson: {rule}\n"
            )
        elif self.kind == "choice":
            assert self.choice is not None
            options = " | ".join(json.dumps(one, ensure_ascii=False) for one in self.choice)
            lark = f"%llguidance {{}}\nstart: {options}\n"
        elif self.kind == "regex":
            lark = f"%llguidance {{}}\nstart: {terminal(self.regex)}\n"
        elif self.kind == "grammar":
            assert self.grammar is not None
            lark = _lark(self.grammar)
            hints = Hints(_suffixes(lark))
        else:
            lark, hints = tag_grammar(
                _parsed("structural_tag", self.structural_tag), self._json_rule
            )
        hints = replace(hints, tails=self._tails())
        given = {"grammars": [{"lark_grammar": lark}], "hints": vars(hints)}
        return json.dumps(given, ensure_ascii=False)

    def _tails(self) -> list[str]:
        """`Hints.tails` of the regular expressions in it."""
        if self.kind == "regex":
            return ends_of(self.regex or "")
        if self.kind == "structural_tag":
            return pattern_ends(_parsed("structural_tag", self.structural_tag))
        return pattern_ends(self.json_schema()) if self.is_json else []

    def with_defaults(self, switches: Mapping[str, bool]) -> StructuredOutputs:
        """With what a server says of all forms; a pattern for blanks of its own goes before."""
        on: dict[str, Any] = dict(switches)
        if self.whitespace_pattern is not None:
            on.pop("disable_any_whitespace", None)
        return replace(self, **on) if on else self

    @property
    def is_json(self) -> bool:
        return self.kind in ("json", "json_object")

    def json_schema(self) -> Any:
        """Of the kinds ``json`` and ``json_object``: the schema as data."""
        if self.json_object:
            return {"type": "object"}
        if isinstance(self.json, str | bool) or is_json(self.json):
            return _parsed("json", self.json)
        try:
            return schema_of(self.json)
        except ValueError as error:
            raise ValueError(f"json: {error}") from None

    def _json_rule(self, schema: Any, strict: bool | None = None) -> str:
        """What stands for a schema in a rule of Lark. strict: for this one alone."""
        strict = self.strict if strict is None else strict
        if isinstance(schema, bool):
            schema = {} if schema else {"enum": []}
        if not isinstance(schema, Mapping):
            raise ValueError(f"json: a schema is an object, got {schema!r:.60}")
        check_depth(schema)
        if strict:
            _check_ids(schema)
        if self.disable_additional_properties:
            schema = _closed(schema)
        options: dict[str, Any] = {"lenient": not strict, "coerce_one_of": not strict}
        if self.disable_any_whitespace:
            options["whitespace_flexible"] = False
        else:
            options["whitespace_pattern"] = self.whitespace_pattern or WHITESPACE
        text = json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)
        if len(text) > MAX_SCHEMA_CHARACTERS:
            raise ValueError(
                f"json: the schema has {len(text)} characters, at most {MAX_SCHEMA_CHARACTERS} "
                f"are accepted"
            )
        if '"$ref"' not in text:
            return f"%json {text}"
        finite = without_endless(schema)
        if isinstance(finite, bool):
            raise ValueError("json: no finite value fits the schema")
        return f"%json {json.dumps({**finite, 'x-guidance': options}, ensure_ascii=False)}"


def check_depth(schema: object) -> None:
    """Without recursion: what comes may be nested as deeply as a body can be."""
    level: list[object] = [schema]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for one in level
            if isinstance(one, Mapping | list | tuple)
            for child in (one.values() if isinstance(one, Mapping) else one)
        ]
        if not level:
            return
    raise ValueError(f"json: the schema is nested more than {MAX_DEPTH} deep")


def _check_ids(schema: Any) -> None:
    """What a `$ref` beside an `$id` is relative to differs between drafts."""
    children = schema.values() if isinstance(schema, Mapping) else schema
    both = isinstance(schema, Mapping) and {"$id", "$ref"} <= set(schema)
    if both and not str(schema["$ref"]).startswith("#"):
        raise ValueError("json: a $ref beside an $id is not supported, unless it begins with #")
    for child in children:
        if isinstance(child, Mapping | list):
            _check_ids(child)


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    closed = {name: _closed(value) for name, value in schema.items()}
    if isinstance(schema.get("properties"), Mapping):
        closed.setdefault("additionalProperties", False)
    return closed


def _lark(grammar: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(any_to_lark(grammar))
    except Exception as error:  # the converter raises whatever comes
        raise ValueError(f"grammar: GBNF that cannot be read: {error}") from None


def _suffixes(lark: str) -> list[str]:
    """What a grammar says that its texts end with."""
    found = []
    for one in SUFFIX.findall(lark):
        with suppress(ValueError):
            found.append(str(json.loads(one)))
    return found


def _parsed(name: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except RecursionError:
        raise ValueError(f"{name}: nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{name}: no valid JSON: {error}") from None


def _check_text(name: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name}: expected a text that is not empty, got {value!r:.60}")
    if len(value) > MAX_GRAMMAR_CHARACTERS:
        raise ValueError(
            f"{name}: {len(value)} characters, at most {MAX_GRAMMAR_CHARACTERS} are accepted"
        )


def _check_choice(choice: object) -> None:
    if not isinstance(choice, list | tuple) or not choice:
        raise ValueError(f"choice: expected a list of texts, got {choice!r:.60}")
    if len(choice) > MAX_CHOICES:
        raise ValueError(f"choice: {len(choice)} texts, at most {MAX_CHOICES} are accepted")
    for one in choice:
        if not isinstance(one, str) or not one:
            raise ValueError(f"choice: expected texts that are not empty, got {one!r:.60}")
    if sum(map(len, choice)) > MAX_GRAMMAR_CHARACTERS:
        raise ValueError(f"choice: more than {MAX_GRAMMAR_CHARACTERS} characters in all")
