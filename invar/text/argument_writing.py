"""How arguments are written that are no JSON: in tags, as Python, with bare keys."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from invar.text.call_values import types_of
from invar.text.call_writing import (
    BLANK,
    Hand,
    Schema,
    Spec,
    WrittenTool,
    const,
    either,
    optional,
    own_arguments,
    sequence,
    star,
)

MAX_DEPTH = 8  # of a value that is not written as JSON
MAX_REFERENCES = 16
ANNOTATIONS = frozenset(
    (
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$schema",
        "$id",
        "$comment",
        "$defs",
        "definitions",
        "$anchor",
    )
)
OF_OBJECTS = frozenset(("type", "properties", "required", "additionalProperties"))
KEY: Spec = {"type": "regex", "pattern": "[A-Za-z_][A-Za-z0-9_]{0,63}"}


@dataclass(frozen=True)
class Parameter:
    key: str
    schema: Schema
    required: bool


def parameters(tool: WrittenTool, hand: Hand) -> tuple[list[Parameter], Schema | None]:
    """Those that are described; where none is and any may be given, what their values are."""
    schema = resolved(tool.schema, tool)
    return members(own_arguments(schema), tool, hand)


def members(schema: Schema, tool: WrittenTool, hand: Hand) -> tuple[list[Parameter], Schema | None]:
    ignore_others(schema, OF_OBJECTS, tool, hand)
    properties = schema.get("properties") or {}
    required = schema.get("required") or []
    others = schema.get("additionalProperties", True)
    every = {**properties, **{key: {} for key in required if key not in properties}}
    found = [Parameter(key, schema_of(value), key in required) for key, value in every.items()]
    if found or others is False:
        return found, None
    return [], schema_of(others)


def schema_of(value: Any) -> Schema:
    return value if isinstance(value, Mapping) else {}


def resolved(schema: Schema, tool: WrittenTool) -> Schema:
    """What a reference stands for, and what is alone in an `allOf`."""
    for _ in range(MAX_REFERENCES):
        reference, whole = schema.get("$ref"), schema.get("allOf")
        if isinstance(reference, str):
            target: Any = tool.schema
            for part in reference.removeprefix("#").strip("/").split("/"):
                target = target.get(part) if part and isinstance(target, Mapping) else target
            others = {key: value for key, value in schema.items() if key != "$ref"}
            schema = {**schema_of(target), **others}
        elif isinstance(whole, list) and len(whole) == 1 and isinstance(whole[0], Mapping):
            schema = {**{key: value for key, value in schema.items() if key != "allOf"}, **whole[0]}
        else:
            return schema
    raise ValueError(f"{tool.name}: a parameter's $ref leads to itself")


def embedded(schema: Schema, tool: WrittenTool) -> dict[str, Any]:
    """A part of a tool's schema that stands alone: with what its references lead to."""
    text = json.dumps(schema)
    own = dict(schema)
    for reference in re.findall(r'"\$ref": "([^"]*)"', text):
        place = reference.split("/")
        if place[0] != "#" or len(place) < 3 or place[1] not in ("$defs", "definitions"):
            raise ValueError(
                f"{tool.name}: {reference}: this model's form of calls allows only references to "
                f"#/$defs and #/definitions"
            )
        own[place[1]] = tool.schema.get(place[1], {})
    return own


def keywords(schema: Schema) -> set[str]:
    return set(schema) - ANNOTATIONS


def pattern_of(schema: Schema, tool: WrittenTool, hand: Hand) -> str | None:
    """A regex of the strings that a schema allows; None: all."""
    pattern, least, most = (schema.get(name) for name in ("pattern", "minLength", "maxLength"))
    ignore_others(schema, {"type", "pattern", "minLength", "maxLength"}, tool, hand)
    if pattern is not None and (least is not None or most is not None):
        hand.ignore(tool, "a length beside a pattern")
    if isinstance(pattern, str):
        whole = pattern.startswith("^") and pattern.endswith("$") and not pattern.endswith(r"\$")
        if whole and "|" not in pattern:
            return pattern[1:-1]
        if "|" in pattern or "^" in pattern or "$" in pattern:
            inner = pattern.removeprefix("^(").removesuffix(")$")
            if f"^({inner})$" == pattern and not set("()^$") & set(inner):
                return inner
            hand.ignore(tool, f"pattern {pattern[:60]}")
            return None
        return f"(?s:.*)({pattern})(?s:.*)"
    if least is None and most is None:
        return None
    return f"(?s:.{{{least or 0},{'' if most is None else most}}})"


def constants(schema: Schema, tool: WrittenTool, hand: Hand) -> list[Any] | None:
    """The values of an enum or a const, if these are all that there are."""
    name = "enum" if "enum" in schema else "const"
    values = schema.get("enum", [schema.get("const")])
    if name not in schema or not isinstance(values, list):
        return None
    ignore_others(schema, {"type", name}, tool, hand)
    return values


def ignore_others(schema: Schema, enforced: Collection[str], tool: WrittenTool, hand: Hand) -> None:
    for keyword in sorted(keywords(schema).difference(enforced)):
        hand.ignore(tool, keyword)


def raw_string(
    schema: Schema, tool: WrittenTool, hand: Hand, end: str, excludes: Sequence[str] = ()
) -> Spec:
    """A string as it stands and the marker that ends it."""
    hand.spend(tool)
    schema = resolved(schema, tool)
    for alternatives in ("anyOf", "oneOf"):
        if isinstance(schema.get(alternatives), list):
            ignore_others(schema, {"type", alternatives}, tool, hand)
            branches = [schema_of(one) for one in schema[alternatives]]
            return either([raw_string(one, tool, hand, end, excludes) for one in branches])
    values = constants(schema, tool, hand)
    if values is None:
        return hand.until(end, pattern_of(schema, tool, hand), excludes)
    texts = [value for value in values if isinstance(value, str)]
    if any(marker in text for text in texts for marker in (end.strip("\n"), *excludes)):
        raise ValueError(f"{tool.name}: an enum of a parameter holds a marker of this model")
    written = [const(text) for text in texts if text]
    value = [either(written)] if written else []
    if "" in texts and written:
        value = [optional(value[0])]
    return sequence(*value, *hand.marked(end))


def is_any_text(schema: Schema, tool: WrittenTool) -> bool:
    """Any text is a value: a string without further keywords, perhaps null; or anything at all."""
    schema = resolved(schema, tool)
    branches = schema.get("anyOf")
    if keywords(schema) == {"anyOf"} and isinstance(branches, list):
        inner = [resolved(schema_of(one), tool) for one in branches]
        kinds = [one.get("type") for one in inner if keywords(one) == {"type"}]
        return sorted(map(str, kinds)) == ["null", "string"] and len(inner) == 2
    if keywords(schema) == {"type"}:
        return schema["type"] in ("string", ["string", "null"], ["null", "string"])
    return not keywords(schema)


def comma_list(items: Sequence[tuple[Spec, bool]], comma: str = ",") -> Spec | None:
    """Items in their order, each with whether it must be there; None: there can be none."""
    if not items:
        return None
    between = [sequence(const(comma), BLANK, item) for item, _ in items]
    rests = [
        one if required else optional(one)
        for one, (_, required) in zip(between, items, strict=True)
    ]
    firsts: list[Spec] = []
    for index, (item, required) in enumerate(items):
        firsts.append(sequence(item, *rests[index + 1 :]))
        if required:
            return either(firsts)
    return optional(either(firsts))


def listed(open_: str, items: Spec | None, close: str) -> Spec:
    return sequence(const(open_), *([] if items is None else [items]), const(close))


# ------------------------------------------------------------------------------------- Python

BOOLEAN = either([const("True"), const("False")])


def python_arguments_of(tool: WrittenTool, hand: Hand) -> Spec:
    """``a=1, b="x"``: JSON's values are Python's too, as they are read."""

    def item(key: Spec, schema: Schema) -> Spec:
        plain = keywords(schema) == {"type"}
        if plain and schema["type"] == "boolean":
            value = BOOLEAN
        else:
            value = hand.json(tool, embedded(schema, tool))
        return sequence(key, const("="), value)

    found, others = parameters(tool, hand)
    for one in found:
        if not re.fullmatch(r"[^\W\d][\w.\-]*", one.key):
            raise ValueError(f"{tool.name}: {one.key!r:.60} cannot be a parameter in Python")
    items = [(item(const(one.key), one.schema), one.required) for one in found]
    if others is not None:
        items = [(item(KEY, others), False)]
    return comma_list(items) or BLANK


# ----------------------------------------------------------------------------------- bare keys

KEYS = re.compile(r"[A-Za-z_][\w.\-]*")
PLAIN = frozenset(("integer", "number", "boolean", "null"))
EVERY = ("string", *sorted(PLAIN))


@dataclass(frozen=True)
class BareKeyHand:
    """Objects without quotes around keys, and strings between ``quote`` and ``quote``."""

    tool: WrittenTool
    hand: Hand
    quote: str

    def object_of(self, schema: Schema, depth: int = 0) -> Spec:
        found, others = members(schema, self.tool, self.hand)
        for one in found:
            if not KEYS.fullmatch(one.key):
                raise ValueError(
                    f"{self.tool.name}: {one.key!r:.60} cannot be a key without quotes"
                )
        if others is not None:
            return listed("{", comma_list([(self._item(KEY, others, depth), False)]), "}")
        items = [(self._item(const(one.key), one.schema, depth), one.required) for one in found]
        return listed("{", comma_list(items), "}")

    def _item(self, key: Spec, schema: Schema, depth: int) -> Spec:
        return sequence(key, const(":"), self.value(schema, depth + 1))

    def value(self, schema: Schema, depth: int) -> Spec:
        self.hand.spend(self.tool)
        if depth > MAX_DEPTH:
            raise ValueError(
                f"{self.tool.name}: parameters are nested more than {MAX_DEPTH} deep, which this "
                f"model's form of calls does not allow"
            )
        schema = resolved(schema, self.tool)
        for alternatives in ("anyOf", "oneOf"):
            branches = schema.get(alternatives)
            if isinstance(branches, list):
                ignore_others(schema, {"anyOf"}, self.tool, self.hand)
                return either([self.value(schema_of(one), depth + 1) for one in branches])
        values = constants(schema, self.tool, self.hand)
        if values is not None:
            return either([self._constant(one) for one in values])
        kinds = schema.get("type", "object" if "properties" in schema else EVERY)
        kinds = [kinds] if isinstance(kinds, str) else list(kinds)
        options = [self._of_kind(kind, schema, depth) for kind in kinds if kind not in PLAIN]
        plain = [kind for kind in kinds if kind in PLAIN]
        if plain:
            options.append(self.hand.json(self.tool, {**schema, "type": plain}))
        return either(options)

    def _of_kind(self, kind: str, schema: Schema, depth: int) -> Spec:
        if kind == "string":
            text = raw_string({**schema, "type": kind}, self.tool, self.hand, self.quote)
            return sequence(*self.hand.marked(self.quote), text)
        if kind == "array":
            ignore_others(schema, {"type", "items", "minItems"}, self.tool, self.hand)
            item = self.value(schema_of(schema.get("items")), depth + 1)
            least = int(schema.get("minItems", 0))
            if least > 16:
                self.hand.ignore(self.tool, "minItems")
            more = star(sequence(const(","), BLANK, item))
            must = [sequence(const(","), BLANK, item)] * (min(least, 16) - 1)
            rest = sequence(item, *must, more)
            return listed("[", rest if least else optional(rest), "]")
        return self.object_of(schema, depth)

    def _constant(self, value: Any) -> Spec:
        if isinstance(value, str):
            text = raw_string({"const": value}, self.tool, self.hand, self.quote)
            return sequence(*self.hand.marked(self.quote), text)
        return self.hand.json(self.tool, {"const": value})


# ---------------------------------------------------------------------------------------- tags


@dataclass(frozen=True, kw_only=True)
class Tags:
    """Arguments as tagged texts: ``open`` HEAD ``head_end`` VALUE ``close``."""

    open: str
    head_end: str
    close: str
    key: str = r"(?P<key>.+)"  # of the head; a group `text` says whether the value is a string
    writes: str = "$key"  # a head; `$text` is whether the value is a string, `$type` its type
    trims: bool = False  # one line break on either side of a value
    cdata: bool = False

    def write(self, tool: WrittenTool, hand: Hand) -> Spec:
        found, others = parameters(tool, hand)
        parts = []
        for one in found:
            written = self._argument(tool, hand, one.key, one.schema)
            parts.append(written if one.required else optional(written))
        if others is not None:
            parts.append(star(self._argument(tool, hand, None, others)))
        return sequence(*parts) if parts else BLANK

    def _argument(self, tool: WrittenTool, hand: Hand, key: str | None, schema: Schema) -> Spec:
        """``key`` None: any."""
        any_text = is_any_text(schema, tool)
        types = types_of(tool.schema, key) if key is not None else set()
        if "$text" in self.writes or "$type" in self.writes:
            is_text = types == {"string"}
        else:
            is_text = types == {"string"} or any_text
        if key is None:
            is_text = any_text and not keywords(resolved(schema, tool))
        kind = "string" if is_text else "".join(sorted(types)[:1]) or "object"
        values = {
            "$key": KEY if key is None else const(key),
            "$text": const("true" if is_text else "false"),
            "$type": const("number" if kind == "integer" else kind),
        }
        head: list[Spec] = []
        for piece in re.split(r"(\$(?:key|text|type|blank))", self.writes):
            head += [values[piece]] if piece in values else hand.filled(piece, {"$blank": BLANK})
        if key is not None:
            self._check_key(tool, key)
        line = "\n" if self.trims else ""
        start = (BLANK, *hand.marked(self.open), *head, *hand.marked(self.head_end + line))
        if not is_text:
            value = hand.json(tool, embedded(schema, tool))
            return sequence(*start, value, *hand.marked(line + self.close))
        excludes = ["<![CDATA["] if self.cdata else []
        if any_text:
            # A line break before the end is no part of it.
            return sequence(*start, hand.until(self.close, None, excludes))
        return sequence(*start, raw_string(schema, tool, hand, line + self.close, excludes))

    def _check_key(self, tool: WrittenTool, key: str) -> None:
        told = self.writes.replace("$key", key).replace("$blank", "")
        head = re.fullmatch(self.key, told.replace("$text", "true").replace("$type", "string"))
        if head is None or head["key"] != key or self.head_end in told or "\n" in key:
            raise ValueError(
                f"{tool.name}: {key!r:.60} cannot be a parameter in this model's form of calls"
            )
