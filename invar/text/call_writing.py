"""How calls of tools are written: the other side of reading them, as a structural tag.

A format says how its calls look in texts in which `$name`, `$arguments`, `$index` (a number) and
`$id` stand for those, and `$blank` for a blank, a line break or nothing. From that and the tools
comes a specification for `invar.grammar.structural_tag`, which holds a model to it.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Spec = dict[str, Any]
Schema = Mapping[str, Any]

PLACE = re.compile(r"(\$(?:name|arguments|index|id|blank)\b)")
MAX_CHARACTERS = 1 << 20  # of a grammar, about
ANY_TEXT: Spec = {"type": "any_text"}


@dataclass(frozen=True)
class WrittenTool:
    name: str
    schema: Schema  # of its arguments
    strict: bool = False  # what cannot be enforced is an error


@dataclass(frozen=True)
class Writing:
    """Calls in a row: ``begin`` CALL ``joint`` CALL … ``end``."""

    call: str
    begin: str = ""
    joint: str = "$blank"
    end: str = ""
    repeats: bool = True  # the form has more than one call in a reply


class CallWriter(ABC):
    """A format of calls, from its writing side."""

    speaks: tuple[str, ...] = ()  # what stands after the beginning of a call where it is none

    @property
    @abstractmethod
    def begins(self) -> tuple[str, ...]:
        """What calls may begin with, the usual one first; "": they may stand there bare."""

    def usual_begin(self, prompt_end: str) -> str:
        """What they begin with after this end of a prompt."""
        return self.begins[0]

    @abstractmethod
    def writing(self, begin: str) -> Writing:
        """The calls that begin with this."""

    def arguments(self, tool: WrittenTool, hand: Hand) -> Spec:
        """Raises ValueError for what cannot be written in this form."""
        return hand.json(tool, own_arguments(tool.schema))


@dataclass
class Hand:
    """What writes markers. ``control``: tokens that are not text, by their spellings."""

    control: Mapping[str, int]
    ignored: list[str] = field(default_factory=list)  # what cannot be enforced, in words
    room: int = MAX_CHARACTERS

    def spend(self, tool: WrittenTool, characters: int = 16) -> None:
        """Counts what a schema becomes, which may be far more than it is."""
        self.room -= characters
        if self.room < 0:
            raise ValueError(
                f"{tool.name}: its parameters are too many or too large to be enforced"
            )

    def ignore(self, tool: WrittenTool, what: str) -> None:
        """Raises ValueError for a strict tool."""
        said = (
            f"{tool.name}: {what} cannot be enforced in the form in which this model writes calls"
        )
        if tool.strict:
            raise ValueError(said)
        if said not in self.ignored:
            self.ignored.append(said)

    def json(self, tool: WrittenTool, schema: Schema) -> Spec:
        self.spend(tool, len(json.dumps(schema)))
        return {"type": "json_schema", "json_schema": dict(schema), "strict": tool.strict}

    def marked(self, text: str) -> list[Spec]:
        """A format's own text, in which spellings of control tokens are these."""
        known = [one for one in self.control if one in text]
        if not known:
            return [const(text)] if text else []
        pattern = "|".join(re.escape(one) for one in sorted(known, key=len, reverse=True))
        return [
            {"type": "token", "token": self.control[piece]}
            if piece in self.control
            else const(piece)
            for piece in re.split(f"({pattern})", text)
            if piece
        ]

    def until(self, end: str, pattern: str | None = None, excludes: Collection[str] = ()) -> Spec:
        """Text up to an end marker, which is in it nowhere before; ``pattern``: it must match."""
        content: Spec = dict(ANY_TEXT) if pattern is None else {"type": "regex", "pattern": pattern}
        first, *rest = self.marked(end)
        if first["type"] == "token" or pattern is not None or excludes:
            content["excludes"] = [*dict.fromkeys((end.lstrip("\n"), *excludes))]
        if first["type"] == "token":
            return sequence(content, first, *rest)
        tag = {"type": "tag", "begin": "", "content": content, "end": first["value"]}
        return sequence(tag, *rest)

    def filled(self, text: str, values: Mapping[str, Spec]) -> list[Spec]:
        """A text of a `Writing` with what its places stand for."""
        parts: list[Spec] = []
        for piece in PLACE.split(text):
            parts += [values[piece]] if piece in values else self.marked(piece)
        return parts


def structural_tag(spec: Spec) -> Spec:
    return {"type": "structural_tag", "format": spec}


def const(text: str) -> Spec:
    return {"type": "const_string", "value": text}


def sequence(*parts: Spec) -> Spec:
    return parts[0] if len(parts) == 1 else {"type": "sequence", "elements": list(parts)}


def either(options: Sequence[Spec]) -> Spec:
    return options[0] if len(options) == 1 else {"type": "or", "elements": list(options)}


def optional(content: Spec) -> Spec:
    return {"type": "optional", "content": content}


def star(content: Spec) -> Spec:
    return {"type": "star", "content": content}


BLANK: Spec = optional({"type": "regex", "pattern": r"[ \n]"})
PLACES: Mapping[str, Spec] = {
    "$blank": BLANK,
    "$index": {"type": "regex", "pattern": "[0-9]{1,3}"},
    "$id": {"type": "regex", "pattern": "[a-zA-Z0-9]{9}"},
}


def own_arguments(schema: Schema) -> dict[str, Any]:
    """An object, and of parameters that are not described none, unless that is said."""
    own = dict(schema)
    if not {"$ref", "anyOf", "oneOf", "allOf"} & set(own):
        own.setdefault("type", "object")
        if "properties" in own and "patternProperties" not in own:
            own.setdefault("additionalProperties", False)
    return own


def calls_only(
    writer: CallWriter,
    tools: Sequence[WrittenTool],
    hand: Hand,
    *,
    parallel: bool,
    prompt_end: str = "",
) -> Spec:
    """A tag of calls from the beginning to the end of a reply, at least one. ``parallel``: also
    more."""
    begin = writer.usual_begin(prompt_end)
    spec = sequence(*_calls(writer, begin, tools, hand, parallel=parallel))
    form = writer.writing(begin)
    head = f"{form.begin}{form.call}".partition("$arguments")[0]
    for place, text in (("$blank", ""), ("$index", "0"), ("$id", "0" * 9)):
        head = head.replace(place, text)
    openings = [
        [
            one.get("value", one.get("token"))
            for one in hand.filled(head, {"$name": const(tool.name)})
        ]
        for tool in tools
    ]
    return structural_tag(spec) | {"openings": openings}


def _calls(
    writer: CallWriter,
    begin: str,
    tools: Sequence[WrittenTool],
    hand: Hand,
    *,
    parallel: bool,
    written: str = "",
) -> list[Spec]:
    """``written``: what of them stands there already."""
    form = writer.writing(begin)
    options = [_call(writer, form.call, tool, hand) for tool in tools]
    first = options
    parts: list[Spec] = []
    if form.begin:
        parts = hand.filled(form.begin.removeprefix(written), PLACES)
    elif written:
        rest = form.call.removeprefix(written)
        first = [_call(writer, rest, tool, hand) for tool in tools]
    parts.append(either(first))
    if parallel and form.repeats:
        parts.append(star(sequence(*hand.filled(form.joint, PLACES), either(options))))
    return [*parts, *hand.filled(form.end, PLACES)]


def _call(writer: CallWriter, text: str, tool: WrittenTool, hand: Hand) -> Spec:
    values = {**PLACES, "$name": const(tool.name), "$arguments": writer.arguments(tool, hand)}
    return sequence(*hand.filled(text, values))


def text_with_calls(
    writers: Sequence[CallWriter],
    markers: Collection[str],
    tools: Sequence[WrittenTool],
    hand: Hand,
    *,
    parallel: bool,
    begun: str = "",
) -> Spec:
    """Any text, in which what begins as a call is one. ``markers``: what the text may hold beside
    calls. ``begun``: a beginning that the prompt ends with."""
    begins: dict[str, list[Spec]] = {}
    for writer in writers:
        for begin in writer.begins:
            calls = _calls(writer, begin, tools, hand, parallel=parallel, written=begin)
            options = begins.setdefault(begin, [])
            options += [sequence(*calls), *(const(text) for text in writer.speaks)]
    bare = begins.pop("", [])
    heads = {begin: hand.marked(begin) for begin in begins}
    by_token = {begin: head for begin, head in heads.items() if head[0]["type"] == "token"}
    text: Spec = {"type": "any_text", "excludes": list(by_token)} if by_token else ANY_TEXT
    marked = [sequence(*head, either(begins[begin])) for begin, head in by_token.items()]
    spelt = [
        sequence({"type": "tag", "begin": "", "content": text, "end": begin}, either(options))
        for begin, options in begins.items()
        if begin not in by_token
    ]
    first_tokens = [head[0]["token"] for head in by_token.values()]
    found = [*(sequence(text, one) for one in marked), *spelt]
    between = [sequence(text, one) for one in _between(markers, begins, first_tokens, hand)]
    if parallel:
        parts = [star(either([*found, *between])), text]
    else:
        parts = [star(either(between))] if between else []
        parts.append(either([*found, text]))
    if begun in begins:
        parts = [either(begins[begun]), *parts]
    if not bare:
        return structural_tag(sequence(*parts))
    # What begins like a bare call is one.
    characters = re.escape("".join(one for writer in writers for one in _bare(writer)))
    begins_text = {"type": "regex", "pattern": rf"[ \t\r\n]*[^ \t\r\n{characters}]"}
    blank = {"type": "regex", "pattern": r"[ \t\r\n]*"}
    first = [sequence(blank, one, *parts) for one in marked]
    options = [sequence(blank, either(bare)), *first, sequence(begins_text, *parts), blank]
    return structural_tag(either(options))


def _between(
    markers: Collection[str], begins: Collection[str], first_tokens: Collection[int], hand: Hand
) -> list[Spec]:
    """Control tokens of the format that begin no call; one that may, in its other markers."""
    free: dict[int, Spec] = {}
    whole: list[Spec] = []
    for marker in markers:
        pieces = hand.marked(marker)
        for piece in pieces:
            if piece["type"] == "token" and piece["token"] not in first_tokens:
                free[piece["token"]] = piece
        is_call = marker.startswith(tuple(begins))
        if pieces[0].get("token") in first_tokens and len(pieces) > 1 and not is_call:
            whole.append(sequence(*pieces))
    return [*free.values(), *whole]


def _bare(writer: CallWriter) -> Iterator[str]:
    if "" in writer.begins:
        form = writer.writing("")
        yield (form.begin or form.call)[0]
