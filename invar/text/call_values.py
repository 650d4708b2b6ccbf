"""Arguments that a model does not write as JSON, as JSON."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from invar.text.scanner import Sink

MAX_SCHEMA_DEPTH = 16  # of alternatives and references followed for a value's type
JSON_TYPES: Mapping[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}
PYTHON_NAMES = {"true": True, "false": False, "null": None}


class TypedValue:
    """One argument that came as text: what it is depends on its schema.

    A string is told as it comes, anything else when it is complete.
    """

    def __init__(
        self, schema: Mapping[str, Any], key: str, is_text: str | None, sink: Sink
    ) -> None:
        """``is_text``: where the format says it, whether the value is a string."""
        self._types = types_of(schema, key)
        if is_text is not None:
            texts = is_text in ("true", "string")
            self._types = {"string"} if texts else self._types - {"string"}
        self._sink = sink
        self._pieces: list[str] = []
        self._streams = self._types == {"string"}
        if self._streams:
            sink('"')

    def take(self, text: str) -> None:
        if self._streams:
            self._sink(escaped(text))
        else:
            self._pieces.append(text)

    def close(self) -> None:
        self._sink('"' if self._streams else written("".join(self._pieces), self._types))

    def cut(self) -> None:
        """The answer ended inside of it."""
        self._sink("".join(self._pieces))


def escaped(text: str) -> str:
    """The inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def types_of(schema: Mapping[str, Any], key: str) -> set[str]:
    """JSON's names of the types that an argument may have; empty: nothing is known."""
    properties = schema.get("properties")
    found = properties.get(key) if isinstance(properties, Mapping) else None
    return _types(schema, found, MAX_SCHEMA_DEPTH)


def _types(root: Mapping[str, Any], schema: Any, depth: int) -> set[str]:
    if not isinstance(schema, Mapping) or depth == 0:
        return set()
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: Any = root
        for part in reference[2:].split("/"):
            target = target.get(part) if isinstance(target, Mapping) else None
        return _types(root, target, depth - 1)
    named = schema.get("type")
    if isinstance(named, str):
        return {named}
    if isinstance(named, list):
        return {name for name in named if isinstance(name, str)}
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return {JSON_TYPES.get(type(value), "object") for value in values}
    for alternatives in ("anyOf", "oneOf", "allOf"):
        branches = schema.get(alternatives)
        if isinstance(branches, list):
            # Eight branches of eight each, sixteen deep, would never end.
            found = [_types(root, branch, depth // 2) for branch in branches[:32]]
            return set().union(*found)
    return {"object"} if "properties" in schema else set()


def written(text: str, types: set[str]) -> str:
    """The value as JSON: as it stands where it is JSON of a type that it may have."""
    stripped = text.strip()
    fits, value = _parsed(stripped, types, json_value)
    if fits:
        return stripped
    if "string" in types or not types:
        return json.dumps(text, ensure_ascii=False)
    fits, value = _parsed(stripped, types, python_value)
    if fits:
        return json.dumps(value, ensure_ascii=False)
    if _parsed(stripped, set(), json_value)[0]:
        return stripped  # of another type: whoever runs the tool decides
    return json.dumps(text, ensure_ascii=False)


def json_value(text: str) -> Any:
    def refused(constant: str) -> Any:
        raise ValueError(constant)

    return json.loads(text, parse_constant=refused)


def python_value(text: str) -> Any:
    return _literal(ast.parse(text, mode="eval").body)


def _parsed(text: str, types: set[str], parse: Any) -> tuple[bool, Any]:
    try:
        value = parse(text)
        json.dumps(value)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return False, None
    kind = JSON_TYPES[type(value)]
    whole = kind == "integer" or (kind == "number" and value.is_integer())
    fits = not types or kind in types or ("number" in types and whole)
    return fits or ("integer" in types and whole), value


def python_arguments(text: str) -> str | None:
    """``(a=1, b="x")`` as a JSON object; None where Python cannot read it."""
    try:
        tree = ast.parse(f"f{text}", mode="eval").body
        if not isinstance(tree, ast.Call) or tree.args:
            return None
        values = {word.arg: _literal(word.value) for word in tree.keywords if word.arg}
        return json.dumps(values, ensure_ascii=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def _literal(node: ast.expr) -> Any:
    """`ast.literal_eval` that knows JSON's names too."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and inner.id not in PYTHON_NAMES:
            raise ValueError(f"{inner.id} is no literal")
    return ast.literal_eval(_JsonNames().visit(node))


class _JsonNames(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(PYTHON_NAMES[node.id])


_BARE_KEY = re.compile(r"([A-Za-z_][\w.\-]*)\s*:")
_PYTHON_WORDS = re.compile(r"\b(None|True|False)\b")


def unquoted_object(text: str) -> str:
    """Structure between strings, with keys and constants as JSON writes them."""
    words = {"None": "null", "True": "true", "False": "false"}
    with_keys = _BARE_KEY.sub(r'"\1":', text)
    return _PYTHON_WORDS.sub(lambda found: words[found.group()], with_keys)
