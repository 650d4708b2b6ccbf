"""How models write calls of tools: a class for each shape. `model_formats` has the families."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from dataclasses import dataclass

from invar.text.argument_writing import BareKeyHand, Tags, python_arguments_of, resolved
from invar.text.call_values import TypedValue, escaped, python_arguments, unquoted_object
from invar.text.call_writing import Hand, Spec, Writing, WrittenTool
from invar.text.reply import BLANK, CallFormat, Reply
from invar.text.scanner import Reading, Scanner, stops, wholly

NAME_KEYS = ("name", "tool_name")
ARGUMENT_KEYS = ("arguments", "parameters")
MAX_HEAD = 512  # characters
PYTHON_NAME = re.compile(r"[^\W_][\w.\-]*|_[\w.\-]*")
LIST = ("[", ", ", "]")
NAME = re.compile(r"[\w.\-/:@ ]{1,128}")


def is_name(reply: Reply, name: str, *, surely: bool) -> bool:
    """Whether this can be the name of a tool that is called.

    After a marker any name can, since the client decides; without one it must be a tool of the
    request, since an answer may be JSON as well.
    """
    return NAME.fullmatch(name) is not None if surely else name in reply.tools


def say_json(reply: Reply, call: int, stop: str) -> Reading[bool]:
    """Arguments as they stand, up to ``stop``; a string that holds an object without its quotes."""
    scanner = reply.scanner
    if (yield from scanner.character()) != '"':
        return (yield from scanner.json_value(lambda text: reply.say_arguments(call, text), stop))
    pieces: list[str] = []
    complete = yield from scanner.json_value(pieces.append)
    reply.say_arguments(call, without_quotes("".join(pieces)))
    return complete


def without_quotes(value: str) -> str:
    if value[:1] != '"':
        return value
    try:
        text = json.loads(value, strict=False)
    except ValueError:
        return value
    return text if isinstance(text, str) and text.lstrip()[:1] == "{" else value


def closed(scanner: Scanner, closer: str) -> Reading[bool]:
    """Whether the end marker comes, perhaps after brackets too many."""
    yield from scanner.skip()
    if (yield from scanner.literal(closer)):  # which may begin with a bracket itself
        return True
    yield from scanner.skip(BLANK + "}]")
    return (yield from scanner.literal(closer))


def list_end(scanner: Scanner) -> Reading[bool]:
    yield from scanner.skip()
    return (yield from scanner.literal("]"))


@dataclass(frozen=True, kw_only=True)
class ListedCalls(CallFormat):
    """One call or a list of them in brackets, between markers or bare."""

    openers: tuple[str, ...] = ()
    close: str = ""
    bare: str = ""
    writes: str = ""  # a call
    # What stands before, between and after calls that share markers; None: each has its own.
    joins: tuple[str, str, str] | None = None

    @property
    def closers(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.close,) if self.close else ()

    def writing(self, begin: str) -> Writing:
        close = f"$blank{self.close}" if self.close and begin else ""
        if self.joins is None:
            return Writing(f"{begin}$blank{self.writes}{close}")
        first, joint, last = self.joins
        start = f"{begin}$blank{first}" if begin else first
        return Writing(self.writes, start, joint, f"{last}{close}")

    def read(self, reply: Reply, opener: str) -> Reading[bool]:
        scanner, surely = reply.scanner, opener != ""
        yield from scanner.skip()
        is_list = yield from scanner.literal("[")
        yield from scanner.skip()
        if is_list and surely and (yield from scanner.literal("]")):
            found = True  # a list of none: there are no calls
        else:
            found = yield from self._next(reply, surely)
            while found and (yield from wholly(scanner, self._next(reply, surely))):
                pass
        if found and is_list:
            yield from wholly(scanner, list_end(scanner))
        if found and self.close:
            yield from wholly(scanner, closed(scanner, self.close))
        return found

    def _next(self, reply: Reply, surely: bool) -> Reading[bool]:
        yield from reply.scanner.skip(BLANK + ",;")
        return (yield from self._call(reply, surely))

    @abstractmethod
    def _call(self, reply: Reply, surely: bool) -> Reading[bool]:
        """Whether a call stands here; it is said then. ``surely``: a marker promises one."""


@dataclass(frozen=True, kw_only=True)
class JsonCalls(ListedCalls):
    """Objects with a name and arguments."""

    writes: str = '{"name": "$name", "arguments": $arguments}'
    keyed: bool = False  # {name: arguments}
    id_length: int = 0

    def _call(self, reply: Reply, surely: bool) -> Reading[bool]:
        """Says a call as soon as its name and the beginning of its arguments are there."""
        scanner = reply.scanner
        if not (yield from scanner.literal("{")):
            return False
        name: str | None = None
        held = "{}"  # arguments that came before the name
        while True:
            yield from scanner.skip(BLANK + ",")
            if (yield from scanner.literal("}")):
                if name is None:
                    return False
                call = reply.start_call(name)
                reply.say_arguments(call, without_quotes(held))
                reply.end_call(call)
                return True
            key = yield from self._member(reply)
            if key is None:
                return False
            if self.keyed and is_name(reply, key, surely=surely):
                break
            if key in ARGUMENT_KEYS and name is not None:
                key = name
                break
            value: list[str] = []
            if not (yield from scanner.json_value(value.append, self.close)):
                return False
            text = "".join(value)
            if key in NAME_KEYS:
                name = string_of(text)
                if name is None or not is_name(reply, name, surely=surely):
                    return False
            elif key in ARGUMENT_KEYS:
                held = text
        call = reply.start_call(key)
        if (yield from say_json(reply, call, self.close)):
            reply.end_call(call)
            yield from wholly(scanner, self._rest(reply))
        return True

    def _member(self, reply: Reply) -> Reading[str | None]:
        """A key and its colon."""
        scanner, pieces = reply.scanner, list[str]()
        if (yield from scanner.character()) != '"':
            return None
        if not (yield from scanner.json_value(pieces.append)):
            return None
        yield from scanner.skip()
        if not (yield from scanner.literal(":")):
            return None
        yield from scanner.skip()
        return string_of("".join(pieces))

    def _rest(self, reply: Reply) -> Reading[bool]:
        """What an object has after its arguments: an id, a type."""
        while True:
            yield from reply.scanner.skip(BLANK + ",")
            if (yield from reply.scanner.literal("}")):
                return True
            if (yield from self._member(reply)) is None:
                return False
            if not (yield from reply.scanner.json_value(lambda text: None, self.close)):
                return False


def string_of(text: str) -> str | None:
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


@dataclass(frozen=True, kw_only=True)
class HeadedCalls(CallFormat):
    """A head with the name, then arguments as JSON or in tags; perhaps inside of a section."""

    open: str
    head_ends: tuple[str, ...]
    close: str = ""
    head: str = r"(?P<name>.+)"  # groups name and id
    writes: str = "$name"  # a head
    writes_end: str | None = None  # of a head; None: the first of `head_ends`
    section: tuple[str, str] | None = None
    shares_section: bool = True  # several calls stand in one
    tags: Tags | None = None
    fence: str = ""  # after the JSON
    id_length: int = 0

    @property
    def openers(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.open,) if self.section is None else (self.section[0], self.open)

    @property
    def closers(self) -> tuple[str, ...]:  # type: ignore[override]
        tags = () if self.tags is None else (self.tags.open, self.tags.head_end, self.tags.close)
        around = (self.close, *self.head_ends, self.writes, *(self.section or ()), *tags)
        return tuple(text for text in around if text)

    def writing(self, begin: str) -> Writing:
        end = self.head_ends[0] if self.writes_end is None else self.writes_end
        fence = f"$blank{self.fence}" if self.fence else ""
        close = f"$blank{self.close}" if self.tags is not None else self.close
        call = f"{self.open}{self.writes}{end}$arguments{fence}{close}"
        if self.section is None or begin == self.open:
            return Writing(call)
        first, last = f"{self.section[0]}$blank", f"$blank{self.section[1]}"
        if self.shares_section:
            return Writing(call, first, end=last)
        return Writing(f"{first}{call}{last}")

    def arguments(self, tool: WrittenTool, hand: Hand) -> Spec:
        head = re.fullmatch(
            self.head, re.sub(r"\$(id|index)", "1", self.writes).replace("$name", tool.name)
        )
        if head is None or head["name"] != tool.name:
            raise ValueError(f"{tool.name}: this model's form of calls cannot name such a tool")
        return super().arguments(tool, hand) if self.tags is None else self.tags.write(tool, hand)

    def read(self, reply: Reply, opener: str) -> Reading[bool]:
        scanner = reply.scanner
        within = self.section is not None and opener == self.section[0]
        found = yield from (self._next(reply) if within else self._call(reply))
        while found and within and (yield from wholly(scanner, self._next(reply))):
            pass
        if found and self.section is not None:
            # Also where its beginning was left out.
            yield from wholly(scanner, closed(scanner, self.section[1]))
        return found

    def _next(self, reply: Reply) -> Reading[bool]:
        yield from reply.scanner.skip()
        if not (yield from reply.scanner.literal(self.open)):
            return False
        return (yield from self._call(reply))

    def _call(self, reply: Reply) -> Reading[bool]:
        scanner, pieces = reply.scanner, list[str]()
        yield from scanner.skip()
        end = yield from scanner.until(stops(*self.head_ends), pieces.append, MAX_HEAD)
        head = re.fullmatch(self.head, "".join(pieces).strip(), re.DOTALL)
        if end is None or head is None or not is_name(reply, head["name"], surely=True):
            return False
        call = reply.start_call(head["name"], head.groupdict().get("id"))
        if self.tags is not None:
            if end in (self.tags.open, self.close):
                scanner.rewind(scanner.position - len(end))
            complete = yield from self._tagged(reply, call, self.tags, head["name"])
        else:
            complete = yield from self._json(reply, call)
        if complete:
            reply.end_call(call)
        return True

    def _json(self, reply: Reply, call: int) -> Reading[bool]:
        scanner = reply.scanner
        yield from scanner.skip()
        if self.close and (yield from scanner.literal(self.close)):
            reply.say_arguments(call, "{}")
            return True
        complete = yield from say_json(reply, call, self.fence or self.close)
        if self.fence:
            yield from wholly(scanner, closed(scanner, self.fence))
        if not self.close or (yield from wholly(scanner, closed(scanner, self.close))):
            return complete
        if complete:
            return True
        # No JSON: told as it stands, up to the end marker.
        end = stops(self.close)
        yield from scanner.until(end, lambda text: reply.say_arguments(call, text))
        return False

    def _tagged(self, reply: Reply, call: int, tags: Tags, name: str) -> Reading[bool]:
        scanner, separator = reply.scanner, ""
        reply.say_arguments(call, "{")
        while True:
            yield from scanner.skip()
            if not (yield from scanner.literal(tags.open)):
                break
            pieces: list[str] = []
            end = yield from scanner.until(stops(tags.head_end), pieces.append)
            head = re.fullmatch(tags.key, "".join(pieces).strip(), re.DOTALL)
            if end is None or head is None:
                return False
            key = json.dumps(head["key"], ensure_ascii=False)
            reply.say_arguments(call, f"{separator}{key}: ")
            separator = ", "
            value = TypedValue(
                reply.tools.get(name, {}),
                head["key"],
                head.groupdict().get("text"),
                lambda text: reply.say_arguments(call, text),
            )
            if not (yield from self._value(scanner, tags, value)):
                value.cut()
                return False
            value.close()
        ended = yield from wholly(scanner, closed(scanner, self.close))
        if not ended and (yield from scanner.character()) == "" and reply.cut:
            return False  # between two arguments, perhaps
        reply.say_arguments(call, "}")
        return True

    def _value(self, scanner: Scanner, tags: Tags, value: TypedValue) -> Reading[bool]:
        if tags.cdata and (yield from scanner.literal("<![CDATA[")):
            end = yield from scanner.until(stops("]]>" + tags.close), value.take)
            return end is not None
        if tags.trims:
            yield from scanner.literal("\n")
        ends = stops("\n" + tags.close, tags.close) if tags.trims else stops(tags.close)
        return (yield from scanner.until(ends, value.take)) is not None


@dataclass(frozen=True, kw_only=True)
class PythonCalls(ListedCalls):
    """Calls as Python writes them: ``[f(a=1, b="x"), g()]``."""

    writes: str = "$name($arguments)"
    joins: tuple[str, str, str] | None = LIST

    def arguments(self, tool: WrittenTool, hand: Hand) -> Spec:
        if not PYTHON_NAME.fullmatch(tool.name):
            raise ValueError(f"{tool.name}: this model's form of calls cannot name such a tool")
        return python_arguments_of(tool, hand)

    def _call(self, reply: Reply, surely: bool) -> Reading[bool]:
        scanner, name = reply.scanner, ""
        while (character := (yield from scanner.character())) and (
            character.isalnum() or character in "_.-"
        ):
            if len(name) > MAX_HEAD:
                return False
            name += character
            yield from scanner.literal(character)
        if character != "(" or not is_name(reply, name, surely=surely):
            return False
        call = reply.start_call(name)
        pieces: list[str] = []
        complete = yield from scanner.python_value(pieces.append)
        text = "".join(pieces)
        arguments = python_arguments(text) if complete else None
        # What Python cannot read is told as it stands.
        reply.say_arguments(call, text if arguments is None else arguments)
        if complete:
            reply.end_call(call)
        return True


@dataclass(frozen=True, kw_only=True)
class BareKeyCalls(CallFormat):
    """JSON without quotes around keys, and strings between marks of their own."""

    open: str
    close: str
    quote: str

    @property
    def openers(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.open,)

    @property
    def closers(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.close, self.quote)

    def writing(self, begin: str) -> Writing:
        return Writing(f"{self.open}call:$name$arguments{self.close}", joint="")

    def arguments(self, tool: WrittenTool, hand: Hand) -> Spec:
        return BareKeyHand(tool, hand, self.quote).object_of(resolved(tool.schema, tool))

    def read(self, reply: Reply, opener: str) -> Reading[bool]:
        scanner, head = reply.scanner, list[str]()
        yield from scanner.skip()
        if (yield from scanner.until(stops("{"), head.append, MAX_HEAD)) is None:
            return False
        name = "".join(head).strip()
        if not name.startswith("call:") or not is_name(reply, name[5:], surely=True):
            return False
        call = reply.start_call(name[5:])
        reply.say_arguments(call, "{")
        while True:
            structure: list[str] = []
            end = yield from scanner.until(stops(self.quote, self.close), structure.append)
            reply.say_arguments(call, unquoted_object("".join(structure)).rstrip(BLANK))
            if end != self.quote:
                break
            reply.say_arguments(call, '"')
            string = stops(self.quote)
            end = yield from scanner.until(
                string, lambda text: reply.say_arguments(call, escaped(text))
            )
            if end is None:
                break
            reply.say_arguments(call, '"')
        if end is not None:
            reply.end_call(call)
        return True
