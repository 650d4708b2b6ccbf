"""References that no finite value fits: `a` that is `a`, a list whose every node needs a next one.

A grammar would follow them for ever, or to a place where no token fits. What they lead to is empty,
which JSON Schema writes `false`: put in their place, it leaves what is around them as it was.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from typing import Any

# Keywords that hold a schema or a list of schemas, and those that hold schemas by name. All else is
# data, such as `const`, which may look like a schema.
SCHEMAS = frozenset(
    (
        "items", "prefixItems", "additionalItems", "unevaluatedItems", "contains",
        "additionalProperties", "unevaluatedProperties", "propertyNames",
        "allOf", "anyOf", "oneOf", "not", "if", "then", "else",
    )
)  # fmt: skip
NAMED = frozenset(("properties", "patternProperties", "dependentSchemas", "$defs", "definitions"))
INDEX = re.compile("0|[1-9][0-9]{0,8}")  # each place has one name: no target is looked at twice
PASSES = 8  # over all references; what is not known by then is taken to have values


def without_endless(schema: Mapping[str, Any]) -> Mapping[str, Any] | bool:
    """The same language; `False` where it is empty. Follows references by JSON Pointer alone."""
    endless = _endless(schema)
    if not endless:
        return schema
    found: Mapping[str, Any] | bool = _replaced(schema, endless)
    return found if _fits(found, endless, {}) else False


def _endless(schema: Mapping[str, Any]) -> frozenset[str]:
    """The least set of references that have values is grown; the others are returned."""
    targets = dict[str, Any]()
    for one in _schemas(schema):
        if "$id" in one and one is not schema:
            return frozenset()  # pointers within it are its own
        reference = one.get("$ref")
        if isinstance(reference, str) and reference not in targets:
            targets[reference] = _target(schema, reference)
    unknown = list(targets)
    for _ in range(PASSES):
        endless, known = frozenset(unknown), dict[int, bool]()
        # Each pass goes the other way, so that a chain is followed in whichever order it stands.
        unknown = [one for one in reversed(unknown) if not _fits(targets[one], endless, known)]
        if len(unknown) == len(endless):
            return endless
    return frozenset()


def _fits(schema: Any, endless: Set[str], known: dict[int, bool]) -> bool:
    """Whether a finite value may fit, if none fits the references in `endless`.

    known: the answer for each schema that has been looked at, by its id.
    """
    if not isinstance(schema, Mapping):
        return schema is not False
    place = id(schema)
    if place not in known:
        known[place] = not _leads_to(schema, endless) and all(
            any(_fits(one, endless, known) for one in choice) for choice in _choices(schema)
        )
    return known[place]


def _choices(schema: Mapping[str, Any]) -> Iterator[list[Any]]:
    """Schemas of which one each must fit, for every value."""
    for keyword in ("anyOf", "oneOf"):
        if branches := _list(schema.get(keyword)):
            yield branches
    for one in (*_list(schema.get("allOf")), *_parts(schema)):
        yield [one]


def _parts(schema: Mapping[str, Any]) -> Iterator[Any]:
    """Schemas of what every value holds."""
    if schema.get("type") in ("object", ["object"]):
        properties = schema.get("properties")
        if isinstance(properties, Mapping):
            required = {name for name in _list(schema.get("required")) if isinstance(name, str)}
            yield from (value for name, value in properties.items() if name in required)
    elif schema.get("type") in ("array", ["array"]):
        items, least = schema.get("items", True), schema.get("minItems", 0)
        first = _list(schema.get("prefixItems") or items)
        if isinstance(least, int):
            yield from first[:least]
            if least > len(first) and not isinstance(items, list):
                yield items


def _replaced(schema: Any, endless: Set[str]) -> Any:
    if isinstance(schema, list):
        return [_replaced(one, endless) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    if _leads_to(schema, endless):
        return False
    return {
        keyword: {name: _replaced(one, endless) for name, one in value.items()}
        if keyword in NAMED and isinstance(value, Mapping)
        else _replaced(value, endless)
        if keyword in SCHEMAS
        else value
        for keyword, value in schema.items()
    }


def _schemas(schema: Any) -> Iterator[Mapping[str, Any]]:
    """A schema and all within it."""
    if isinstance(schema, list):
        for one in schema:
            yield from _schemas(one)
    elif isinstance(schema, Mapping):
        yield schema
        for keyword, value in schema.items():
            if keyword in SCHEMAS:
                yield from _schemas(value)
            elif keyword in NAMED and isinstance(value, Mapping):
                yield from _schemas(list(value.values()))


def _target(schema: Any, reference: str) -> Any:
    """True where a reference is not understood: it may have values."""
    if reference != "#" and not reference.startswith("#/"):
        return True
    target = schema
    for part in reference.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and INDEX.fullmatch(name) and int(name) < len(target):
            target = target[int(name)]
        elif isinstance(target, Mapping) and name in target:
            target = target[name]
        else:
            return True
    return target


def _leads_to(schema: Mapping[str, Any], endless: Set[str]) -> bool:
    reference = schema.get("$ref")
    return isinstance(reference, str) and reference in endless


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
