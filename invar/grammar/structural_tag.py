"""Structural tags (xgrammar's and vLLM's form) as a grammar: text that holds constrained parts.

Both forms are read: ``structures`` with ``triggers``, and ``format`` with its kinds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Spec = Mapping[str, Any]
# A schema, and whether it is enforced to the letter if it says so itself → what stands for it.
JsonRule = Callable[[Any, bool | None], str]

MAX_DEPTH = 32
TEXTS = ("any_text", "regex")
REPEATS = {"optional": "?", "star": "*", "plus": "+"}
ANY_TEXT = "(?s:.*)"


@dataclass(frozen=True)
class Hints:
    """What the writer of a grammar knows of its answers; they go beside it, not in its text."""

    ends: list[str] = field(default_factory=list)  # of its free texts
    # What its alternatives begin with, in texts and control tokens.
    openings: list[list[str | int]] = field(default_factory=list)
    tails: list[str] = field(default_factory=list)  # what texts in it may need at their ends


def tag_grammar(spec: object, json_rule: JsonRule) -> tuple[str, Hints]:
    """Lark, and what is known of its answers. Raises ValueError saying where the tag is wrong."""
    if not isinstance(spec, Mapping) or spec.get("type") != "structural_tag":
        raise ValueError('expected an object with "type": "structural_tag"')
    rules = _Rules(json_rule)
    if "format" in spec:
        start = rules.of(spec["format"], "format", 0)
    else:
        tags = [
            {"begin": one.get("begin"), "end": one.get("end"), "content": _schema_content(one)}
            for one in _list(spec, "structures", "structural_tag")
            if isinstance(one, Mapping)
        ]
        triggered = {"type": "triggered_tags", "tags": tags, "triggers": spec.get("triggers")}
        start = rules.of(triggered, "structural_tag", 0)
    lark = "\n".join(["%llguidance {}", f"start: {start}", *rules.lines, ""])
    return lark, Hints(rules.ends, _openings(spec.get("openings", [])))


def _openings(value: object) -> list[list[str | int]]:
    lists: list[Any] = value if isinstance(value, list) else [value]
    for one in lists:
        if not isinstance(one, list) or not all(type(part) in (str, int) for part in one):
            raise ValueError("structural_tag.openings: expected lists of texts and ids of tokens")
    return lists


def _schema_content(structure: Spec) -> Spec:
    return {"type": "json_schema", "json_schema": structure.get("schema")}


class _Rules:
    """Collects rules and terminals; ``of`` returns what stands for a format in a rule."""

    def __init__(self, json_rule: JsonRule) -> None:
        self.lines: list[str] = []
        self.ends: list[str] = []
        self._json_rule = json_rule
        self._names: dict[tuple[str, str], str] = {}  # (kind, body) → name
        self._count = 0

    def of(self, spec: object, where: str, depth: int) -> str:
        if depth > MAX_DEPTH:
            raise ValueError(f"{where}: nested more than {MAX_DEPTH} deep")
        if not isinstance(spec, Mapping):
            raise ValueError(f"{where}: expected an object")
        kind = spec.get("type")
        if kind == "const_string":
            return _quoted(_text(spec, "value", where))
        if kind == "json_schema":
            return self._rule(self._json_rule(spec.get("json_schema"), spec.get("strict")))
        if kind in TEXTS:
            return self._terminal(_text_pattern(spec, where))
        if kind == "token":
            return f"<[{_token(spec, where)}]>"
        if kind in REPEATS:
            return self._rule(f"({self.of(spec.get('content'), where, depth + 1)}){REPEATS[kind]}")
        if kind in ("sequence", "or"):
            elements = _list(spec, "elements", where)
            parts = [
                self.of(one, f"{where}.elements[{index}]", depth + 1)
                for index, one in enumerate(elements)
            ]
            if kind == "sequence":
                self._note_ends(elements)
            return self._rule((" " if kind == "sequence" else " | ").join(parts))
        if kind == "tag":
            return self._rule(self._tag(spec, where, depth, ""))
        if kind == "triggered_tags":
            return self._triggered(spec, where, depth)
        raise ValueError(
            f"{where}.type: {kind!r:.40} is not known (known: const_string, json_schema, regex, "
            f"any_text, token, sequence, or, optional, star, plus, tag, triggered_tags)"
        )

    def _note_ends(self, elements: list[Spec]) -> None:
        """What stands behind a repetition ends it."""
        repeats = False
        for one in elements:
            if repeats and one["type"] == "const_string":
                self.ends.append(one["value"])
            repeats = one["type"] == "star" or (repeats and one["type"] == "optional")

    def _tag(self, spec: Spec, where: str, depth: int, without: str) -> str:
        """``without``: what has been matched of its beginning."""
        begin, end = _text(spec, "begin", where), _text(spec, "end", where)
        content = spec.get("content")
        if not isinstance(content, Mapping):
            raise ValueError(f"{where}.content: expected an object")
        rest = begin.removeprefix(without)
        before = f"{_quoted(rest)} " if rest else ""
        if content.get("type") in TEXTS and end:
            text = self._terminal(_text_pattern(content, f"{where}.content"))
            self._count += 1
            name = f"text_{self._count}"
            self.lines.append(f"{name}[suffix={_quoted(end)}]: {text}")
            self.ends.append(end)
            return before + name
        after = f" {_quoted(end)}" if end else ""
        return before + self.of(content, f"{where}.content", depth + 1) + after

    def _triggered(self, spec: Spec, where: str, depth: int) -> str:
        """Any text, in which a trigger must be followed by the rest of one of its tags."""
        triggers = [one for one in _list(spec, "triggers", where) if isinstance(one, str) and one]
        tags = [one for one in _list(spec, "tags", where) if isinstance(one, Mapping)]
        options = []
        for index, trigger in enumerate(triggers):
            begun = [tag for tag in tags if _text(tag, "begin", where).startswith(trigger)]
            if not begun:
                raise ValueError(f"{where}.triggers[{index}]: no tag begins with {trigger!r:.40}")
            self._count += 1
            head = f"head_{self._count}"
            self.lines.append(f"{head}[lazy]: /(?s:.*)/ {_quoted(trigger)}")
            rests = [self._tag(tag, where, depth, trigger) for tag in begun]
            options.append(self._rule(f"{head} ({' | '.join(rests)})"))
        for tag in tags:
            begin = _text(tag, "begin", where)
            if not any(begin.startswith(trigger) for trigger in triggers):
                raise ValueError(f"{where}.tags: {begin!r:.40} begins with none of the triggers")
        one = self._rule(" | ".join(options))
        if spec.get("stop_after_first"):
            return one if spec.get("at_least_one") else f"({one} | {self._terminal('/(?s:.*)/')})"
        repeat = "+" if spec.get("at_least_one") else "*"
        return f"{one}{repeat} {self._terminal('/(?s:.*)/')}"

    def _rule(self, body: str) -> str:
        return self._named("rule", body)

    def _terminal(self, body: str) -> str:
        return self._named("TERM", body)

    def _named(self, kind: str, body: str) -> str:
        """What is there already is not written twice."""
        name = self._names.get((kind, body))
        if name is None:
            self._count += 1
            name = self._names[kind, body] = f"{kind}_{self._count}"
            self.lines.append(f"{name}: {body}")
        return name


def _text_pattern(spec: Spec, where: str) -> str:
    """Of a text that may be forbidden to hold some others."""
    if spec.get("type") == "any_text":
        pattern = f"/{ANY_TEXT}/"
    else:
        pattern = terminal(_text(spec, "pattern", where))
    excluded = spec.get("excludes") or []
    if not isinstance(excluded, list) or not all(isinstance(one, str) and one for one in excluded):
        raise ValueError(f"{where}.excludes: expected a list of texts that are not empty")
    if excluded:
        held = "|".join(re.escape(one).replace("\\\n", r"\n") for one in excluded)
        pattern += f" & ~{terminal(f'{ANY_TEXT}({held}){ANY_TEXT}')}"
    return pattern


def _token(spec: Spec, where: str) -> int:
    token = spec.get("token")
    if isinstance(token, bool) or not isinstance(token, int) or token < 0:
        raise ValueError(f"{where}.token: expected the id of a token")
    return token


def _list(spec: Spec, name: str, where: str) -> list[Any]:
    value = spec.get(name)
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where}.{name}: expected a list that is not empty")
    return value


def _text(spec: Spec, name: str, where: str) -> str:
    value = spec.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{where}.{name}: expected a text")
    return value


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def terminal(pattern: str | None) -> str:
    r"""A regex as a terminal of Lark, which ends at a slash and at the end of the line. `\d` is a
    digit of ASCII, as in patterns of schemas: nobody who writes it means those of other scripts."""
    from llguidance import regex_to_lark

    return f"/{regex_to_lark(pattern or '', 'd')}/".replace("\n", "\\n")
