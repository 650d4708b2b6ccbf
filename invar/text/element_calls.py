"""Calls whose arguments are elements inside of elements (MiniMax M3)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from invar.text.argument_writing import (
    Parameter,
    embedded,
    is_any_text,
    parameters,
    raw_string,
)
from invar.text.call_formats import HeadedCalls
from invar.text.call_values import types_of, written
from invar.text.call_writing import BLANK, Hand, Spec, WrittenTool, optional, sequence
from invar.text.reply import Reply
from invar.text.scanner import Reading, stops

MAX_ELEMENT_DEPTH = 32
ITEM = "item"  # the name of an element of a list


@dataclass(frozen=True, kw_only=True)
class ElementCalls(HeadedCalls):
    """Each element between MARK<NAME> and MARK</NAME>; objects and lists hold others."""

    mark: str

    @property
    def closers(self) -> tuple[str, ...]:  # type: ignore[override]
        return (*super().closers, self.mark)

    def arguments(self, tool: WrittenTool, hand: Hand) -> Spec:
        """Strings as they stand, all else as JSON."""
        found, _ = parameters(tool, hand)
        parts = [self._written(tool, hand, one) for one in found]
        return sequence(*parts) if parts else BLANK

    def _written(self, tool: WrittenTool, hand: Hand, one: Parameter) -> Spec:
        if re.search(r"[<>\n/]", one.key):
            raise ValueError(f"{tool.name}: {one.key!r:.60} cannot be the name of an element")
        close = f"{self.mark}</{one.key}>"
        if is_any_text(one.schema, tool):
            value = hand.until(close, None, [self.mark])
        elif types_of(tool.schema, one.key) == {"string"}:
            value = raw_string(one.schema, tool, hand, close, [self.mark])
        else:
            inner = hand.json(tool, embedded(one.schema, tool))
            value = sequence(inner, *hand.marked(close))
        whole = sequence(BLANK, *hand.marked(f"{self.mark}<{one.key}>"), value)
        return whole if one.required else optional(whole)

    def _json(self, reply: Reply, call: int) -> Reading[bool]:
        """Told when all is there: what an element is shows at its end."""
        pieces: list[str] = []
        end = yield from reply.scanner.until(stops(self.close), pieces.append)
        schema = reply.tools.get(reply.called, {})
        reply.say_arguments(call, arguments_of("".join(pieces), self.mark, schema))
        return end is not None


def arguments_of(text: str, mark: str, schema: Mapping[str, Any]) -> str:
    """The elements of a call as a JSON object."""
    members = [
        f"{json.dumps(name, ensure_ascii=False)}: {element(inner, mark, schema, name, 0)}"
        for name, inner in children(text, mark)
    ]
    return f"{{{', '.join(members)}}}"


def element(text: str, mark: str, schema: Mapping[str, Any], name: str, depth: int) -> str:
    """One element as JSON; ``schema`` is that of the object that holds it."""
    types = types_of(schema, name)
    inner = children(text, mark) if depth < MAX_ELEMENT_DEPTH else []
    if not inner:
        return "[]" if types == {"array"} and not text.strip() else written(text, types)
    properties = schema.get("properties")
    own = properties.get(name) if isinstance(properties, Mapping) else None
    own = own if isinstance(own, Mapping) else {}
    if "array" in types or (not types and {one for one, _ in inner} == {ITEM}):
        held = {"properties": {ITEM: own.get("items")}}
        items = [element(one, mark, held, ITEM, depth + 1) for _, one in inner]
        return f"[{', '.join(items)}]"
    members = [
        f"{json.dumps(key, ensure_ascii=False)}: {element(one, mark, own, key, depth + 1)}"
        for key, one in inner
    ]
    return f"{{{', '.join(members)}}}"


def children(text: str, mark: str) -> list[tuple[str, str]]:
    """Names and insides of the elements that stand in a text, without those inside of them."""
    found: list[tuple[str, str]] = []
    open_names: list[str] = []
    begin = 0
    for tag in re.finditer(rf"{re.escape(mark)}<(/?)([^<>\n]+)>", text):
        closes, name = tag.groups()
        if not closes:
            if not open_names:
                begin = tag.end()
            open_names.append(name)
        elif name in open_names:
            while open_names.pop() != name:
                pass
            if not open_names:
                found.append((name, text[begin : tag.start()]))
    return found
