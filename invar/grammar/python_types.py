"""Python types as JSON Schema: classes, dataclasses, TypedDicts, and plain shapes of types.

A shape is written as the value would be: ``{"name": str, "tags": [str], "kind": ("a", "b")}``. A
key that ends in ``?`` may be missing.
"""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

Schema = dict[str, Any]

MAX_DEPTH = 64
BY_NAME: Mapping[object, Schema] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    None: {"type": "null"},
    type(None): {"type": "null"},
    list: {"type": "array"},
    tuple: {"type": "array"},
    dict: {"type": "object"},
    Any: {},
    object: {},
}


def is_json(value: object, depth: int = 0) -> bool:
    """Whether a value is data (a JSON Schema) rather than a shape of types."""
    if depth > MAX_DEPTH:
        return True  # too deep for a shape; the schema's own limit answers
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and is_json(one, depth + 1) for key, one in value.items())
    if isinstance(value, list):
        return all(is_json(one, depth + 1) for one in value)
    return value is None or isinstance(value, str | int | float | bool)


def schema_of(kind: object) -> Schema:
    """The JSON Schema of a type or of a shape. Raises ValueError for what has none."""
    if hasattr(kind, "model_json_schema"):  # pydantic, which is not imported here
        return dict(kind.model_json_schema())
    named: dict[str, Schema] = {}
    schema = _Types(named).schema(kind, 0)
    return schema | ({"$defs": named} if named else {})


class _Types:
    """Classes with fields stand once under ``$defs``, so that they may hold each other."""

    def __init__(self, named: dict[str, Schema]) -> None:
        self._named = named
        self._names: dict[type, str] = {}

    def schema(self, kind: Any, depth: int) -> Schema:
        if depth > MAX_DEPTH:
            raise ValueError(f"types are nested more than {MAX_DEPTH} deep")
        if isinstance(kind, Mapping):
            return self._shape(kind, depth)
        if isinstance(kind, tuple):
            return {"enum": [_plain(one) for one in kind]}
        if isinstance(kind, list):
            if len(kind) != 1:
                raise ValueError(f"a list of types holds one, as [str]; this one holds {len(kind)}")
            return {"type": "array", "items": self.schema(kind[0], depth + 1)}
        if isinstance(kind, typing.Hashable) and kind in BY_NAME:
            return dict(BY_NAME[kind])
        if typing.get_origin(kind) is not None:
            return self._generic(kind, depth)
        if isinstance(kind, type):
            return self._class(kind, depth)
        raise ValueError(f"{kind!r:.80} is no type that has a JSON Schema")

    def _shape(self, fields: Mapping[Any, Any], depth: int) -> Schema:
        names = [str(name) for name in fields]
        return _object(
            {
                name.removesuffix("?"): self.schema(kind, depth + 1)
                for name, kind in zip(names, fields.values(), strict=True)
            },
            [name for name in names if not name.endswith("?")],
        )

    def _generic(self, kind: Any, depth: int) -> Schema:
        origin, arguments = typing.get_origin(kind), typing.get_args(kind)
        if origin is typing.Literal:
            return {"enum": [_plain(one) for one in arguments]}
        if origin in (typing.Annotated, typing.Required, typing.NotRequired):
            return self.schema(arguments[0], depth + 1)
        if origin in (typing.Union, types.UnionType):
            return {"anyOf": [self.schema(one, depth + 1) for one in arguments]}
        if origin is tuple and arguments[-1:] != (...,):
            items = [self.schema(one, depth + 1) for one in arguments]
            count = len(items)
            return {"type": "array", "prefixItems": items, "minItems": count, "maxItems": count}
        if isinstance(origin, type) and issubclass(origin, Mapping):
            if arguments[0] is not str:
                raise ValueError(f"{kind!r:.80}: the keys of an object are strings")
            return {"type": "object", "additionalProperties": self.schema(arguments[1], depth + 1)}
        if isinstance(origin, type) and issubclass(origin, Sequence | set | frozenset):
            return {"type": "array", "items": self.schema(arguments[0], depth + 1)}
        raise ValueError(f"{kind!r:.80} is no type that has a JSON Schema")

    def _class(self, kind: type, depth: int) -> Schema:
        if hasattr(kind, "model_json_schema"):
            raise ValueError(f"{kind.__name__}: a pydantic class stands alone or in another one")
        if issubclass(kind, enum.Enum):
            return {"enum": [_plain(one.value) for one in kind]}
        if typing.is_typeddict(kind):
            extras = typing.get_type_hints(kind, include_extras=True)
            keys: frozenset[str] = getattr(kind, "__required_keys__", frozenset())
            # Annotations that are text hide the marks from the class itself.
            required = [
                name
                for name, hint in extras.items()
                if name in keys and typing.get_origin(hint) is not typing.NotRequired
            ]
        elif dataclasses.is_dataclass(kind):
            missing = dataclasses.MISSING
            required = [
                one.name
                for one in dataclasses.fields(kind)
                if one.default is missing and one.default_factory is missing
            ]
        else:
            raise ValueError(f"{kind.__name__} has no JSON Schema (dataclass, TypedDict, Enum, …)")
        if kind not in self._names:
            name = kind.__name__
            while name in self._named:
                name += "_"
            self._names[kind], self._named[name] = name, {}
            hints = typing.get_type_hints(kind)
            fields = {name: self.schema(hint, depth + 1) for name, hint in hints.items()}
            self._named[name] = _object(fields, required)
        return {"$ref": f"#/$defs/{self._names[kind]}"}


def _object(properties: Schema, required: list[str]) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _plain(value: object) -> object:
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise ValueError(f"{value!r:.80} is no text, number, true, false or null")
