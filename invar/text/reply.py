"""What a model's text says: reasoning, content and calls of tools, read as it comes.

Stop strings have been found before; the events do not depend on how the text was cut.
"""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from invar.grammar.thoughts import Thoughts
from invar.text.call_writing import CallWriter
from invar.text.scanner import Reading, Scanner, stops, wholly

BLANK = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The call is complete. One that the end of the answer cuts has no such event."""

    index: int


Event: TypeAlias = Reasoning | Content | CallStart | CallArguments | CallEnd


@dataclass
class Call:
    id: str
    name: str
    arguments: str = ""
    complete: bool = False


@dataclass
class ReplyMessage:
    """The events of a reply put together."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)

    def take(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case Reasoning(text):
                    self.reasoning += text
                case Content(text):
                    self.content += text
                case CallStart(_, call_id, name):
                    self.calls.append(Call(call_id, name))
                case CallArguments(index, text):
                    self.calls[index].arguments += text
                case CallEnd(index):
                    self.calls[index].complete = True


@dataclass(frozen=True)
class ReasoningMarkers:
    """What stands before and after a model's thoughts.

    `opened`: a reply begins inside them unless the prompt has closed them. `dropped`: what stands
    around its answer and is no part of it.
    """

    start: str
    end: str
    opened: bool = False
    dropped: tuple[str, ...] = ()


class CallFormat(CallWriter):
    """How a family of models writes calls of tools."""

    openers: tuple[str, ...] = ()  # what calls begin with
    closers: tuple[str, ...] = ()  # what only stands around them
    bare: str = ""  # what a reply begins with that is a call without an opener
    id_length: int = 0  # of ids that templates of the family insist on; 0: any

    @property
    def begins(self) -> tuple[str, ...]:
        return ("", *self.openers) if self.bare else self.openers

    @abstractmethod
    def read(self, reply: Reply, opener: str) -> Reading[bool]:
        """Reads the calls after an opener ("": a bare one). False: it is none; nothing was said."""


class ReplyFormat(ABC):
    """A model's way to write replies: its markers, or a protocol of its own."""

    @abstractmethod
    def read(self, reply: Reply, prompt_end: str) -> Reading[None]:
        """Says all that is in a reply. ``prompt_end``: what of the prompt stands before it."""

    @property
    @abstractmethod
    def markers(self) -> tuple[str, ...]:
        """Texts to be seen here, although control tokens may stand for them."""

    def thoughts(self, prompt_end: str, continued: str, takes_calls: bool) -> Thoughts | None:
        """Those that may stand before a reply's content, as `read` tells them. None: it begins
        with its content.

        ``prompt_end`` and ``continued`` as in `Reply`; ``takes_calls``: calls are looked for.
        """
        return None

    def thoughts_before_calls(self, prompt_end: str, continued: str) -> Thoughts | None:
        """The same, where a reply is to be nothing but calls."""
        return self.thoughts(prompt_end, continued, takes_calls=True)

    @property
    @abstractmethod
    def writers(self) -> tuple[CallWriter, ...]:
        """How calls are written; none: a reply cannot be held to them."""


@dataclass(frozen=True)
class MarkedFormat(ReplyFormat):
    """Text with markers around what is none."""

    reasoning: ReasoningMarkers | None = None
    calls: tuple[CallFormat, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        thoughts = self.reasoning
        own = () if thoughts is None else (thoughts.start, thoughts.end, *thoughts.dropped)
        return (*own, *(m for form in self.calls for m in (*form.openers, *form.closers)))

    @property
    def writers(self) -> tuple[CallWriter, ...]:
        return self.calls

    def read(self, reply: Reply, prompt_end: str) -> Reading[None]:
        calls = self.calls if reply.takes_calls else ()
        reply.id_length = max((form.id_length for form in calls), default=0)
        openers: dict[str, list[CallFormat]] = {}
        for form in calls:
            for opener in form.openers:
                openers.setdefault(opener, []).append(form)
        thinks = self.reasoning is not None and self._begins_thinking(
            self.reasoning, prompt_end, reply.continued
        )
        thoughts = self.reasoning
        if thoughts is not None and reply.keeps_content and not thinks:
            thinks = yield from reply.scanner.literal(thoughts.start)
        if thinks:
            yield from self._think(reply, openers)
        elif thoughts is not None:
            # Some say so that they do not think.
            yield from wholly(reply.scanner, first_marker(reply, thoughts.end))
        if reply.keeps_content:
            yield from reply.scanner.until(stops(), reply.say_content)
            return
        yield from self._begin(reply, calls)
        own = () if thoughts is None else (thoughts.start, *thoughts.dropped)
        while True:
            # The end of thoughts that a call has ended is no content.
            late = (thoughts.end,) if thoughts is not None and reply.interrupted else ()
            marker = yield from reply.scanner.until(stops(*own, *late, *openers), reply.say_content)
            if marker is None:
                return
            if thoughts is not None and marker == thoughts.start:
                yield from self._think(reply, openers)
            elif marker in openers:
                if not (yield from attempt(reply, openers[marker], marker)):
                    reply.say_content(marker)
            else:
                reply.interrupted = reply.interrupted and marker not in late

    def thoughts(self, prompt_end: str, continued: str, takes_calls: bool) -> Thoughts | None:
        markers = self.reasoning
        if markers is None:
            return None
        start = ""
        if not self._begins_thinking(markers, prompt_end, continued):
            if continued or prompt_end.rstrip().endswith(markers.end):
                return None
            start = markers.start
        calls = self.calls if takes_calls else ()
        openers = tuple(opener for form in calls for opener in form.openers)
        return Thoughts(re.escape(markers.end), (("", markers.end),), start, openers)

    def _begins_thinking(self, thoughts: ReasoningMarkers, prompt_end: str, continued: str) -> bool:
        opened, closed = continued.rfind(thoughts.start), continued.rfind(thoughts.end)
        if opened != closed:
            return opened > closed
        end = prompt_end.rstrip()
        # Only what the template wrote last: users may write markers too.
        return end.endswith(thoughts.start) or (thoughts.opened and not end.endswith(thoughts.end))

    def _think(self, reply: Reply, openers: Mapping[str, list[CallFormat]]) -> Reading[None]:
        """A call inside of thoughts ends them."""
        assert self.reasoning is not None
        end = self.reasoning.end
        yield from reply.scanner.skip()
        if (yield from reply.scanner.literal(self.reasoning.start)):
            yield from reply.scanner.skip()  # written again by a model whose prompt had it
        reply.begin_reasoning()
        while True:
            marker = yield from reply.scanner.until(stops(end, *openers), reply.say_reasoning)
            if marker is None or marker == end:
                break
            if (yield from attempt(reply, openers[marker], marker)):
                reply.interrupted = True
                break
            reply.say_reasoning(marker)
        reply.end_reasoning()

    def _begin(self, reply: Reply, calls: Sequence[CallFormat]) -> Reading[None]:
        """A reply that begins as a call may be one without an opener."""
        bare = [form for form in calls if form.bare]
        if not bare:
            return
        mark = reply.scanner.mark()
        yield from reply.scanner.skip()
        first = yield from reply.scanner.character()
        reply.scanner.rewind(mark)
        forms = [form for form in bare if first and first in form.bare]
        if forms:
            yield from attempt(reply, forms, "")
        reply.scanner.release()


def first_marker(reply: Reply, marker: str) -> Reading[bool]:
    """Whether a reply begins with a marker."""
    yield from reply.scanner.skip()
    return (yield from reply.scanner.literal(marker))


def attempt(reply: Reply, forms: Sequence[CallFormat], opener: str) -> Reading[bool]:
    """Whether calls stand here. If not, nothing after the opener has been read."""
    for form in forms:
        if (yield from wholly(reply.scanner, form.read(reply, opener))):
            return True
    return False


class Reply:
    """The reading of one reply. `push` and `finish` return what is new."""

    def __init__(
        self,
        form: ReplyFormat | None,
        *,
        tools: Mapping[str, Mapping[str, Any]] | None = None,
        prompt_end: str = "",
        continued: str = "",
        seed: str = "",
        parallel: bool = True,
        keeps_content: bool = False,
    ) -> None:
        """``form`` None: all is content. ``tools``: name → schema of its arguments; None: no calls
        are looked for. ``prompt_end``: the last of the prompt, a line or more. ``continued``: a
        message that the reply goes on with. ``seed``: what ids of calls are made of.
        ``parallel`` False: of several calls the first alone is told. ``keeps_content``: behind its
        thoughts a reply has one form, in which nothing is a marker."""
        self.scanner = Scanner()
        self.continued = continued
        self.takes_calls = tools is not None
        self.keeps_content = keeps_content and tools is None
        self.tools: Mapping[str, Mapping[str, Any]] = tools or {}
        self.interrupted = False  # a call came before the end of thoughts
        self.cut = False
        self.id_length = 0
        self._seed = seed
        self._parallel = parallel
        self._events: list[Event] = []
        self._calls = 0
        self.complete_calls = 0
        self.called = ""  # the tool of the call that is being read
        self._blank = ""  # held back: blanks before a call are no content
        self._content_begun = form is None
        self._thought: list[tuple[int, int | None]] = []  # begin and end, in characters
        self._thinking = False
        self._reading = None if form is None else form.read(self, prompt_end)

    def push(self, text: str) -> list[Event]:
        if self._reading is None:
            return [Content(text)] if text else []
        self.scanner.feed(text)
        return self._resume()

    def finish(self, *, cut: bool = False) -> list[Event]:
        """The reply ends here, whatever is open. ``cut``: not where the model ended it."""
        if self._reading is None:
            return []
        self.cut = cut
        self.scanner.ended = True
        events = self._resume()
        untold = not (self._calls or self._thinking) and (self._content_begun or not self._thought)
        if self._blank and untold:
            events = joined([*events, Content(self._blank)])
        return events

    def count_reasoning(self, offsets: Iterable[int]) -> int:
        """How many of these places, in characters of the text so far, lie in thoughts."""
        if not self._thought:
            return 0
        return sum(
            any(begin <= offset and (end is None or offset < end) for begin, end in self._thought)
            for offset in offsets
        )

    def _resume(self) -> list[Event]:
        assert self._reading is not None
        next(self._reading, None)
        events, self._events = joined(self._events), []
        return events

    # ------------------------------------------------------------------- what a format says

    def say_content(self, text: str) -> None:
        """Blanks are held back: they count only between words."""
        if not self._content_begun and (self._calls or self._thought):
            text, self._blank = text.lstrip(BLANK), ""
        if kept := self._without_blanks(text):
            self._content_begun = True
            self._events.append(Content(kept))

    def _without_blanks(self, text: str) -> str:
        """The text with what was held back before it, and without what is held back now."""
        kept = text.rstrip(BLANK)
        if not kept:
            self._blank += text
            return ""
        kept, self._blank = self._blank + kept, text[len(kept) :]
        return kept

    def begin_reasoning(self) -> None:
        self._thinking = True
        self._blank = ""
        self._thought.append((self.scanner.position, None))

    def say_reasoning(self, text: str) -> None:
        if kept := self._without_blanks(text):
            self._events.append(Reasoning(kept))

    def end_reasoning(self) -> None:
        if self._thinking:
            self._thinking = False
            self._blank = ""
            self._thought[-1] = (self._thought[-1][0], self.scanner.position)

    def start_call(self, name: str, call_id: str | None = None) -> int:
        """From here on it is a call, whatever follows."""
        self.end_reasoning()
        self.scanner.release()
        self._blank = ""
        index, self._calls = self._calls, self._calls + 1
        self.called = name
        if self._tells(index):
            self._events.append(CallStart(index, call_id or self._new_id(index), name))
        return index

    def say_arguments(self, index: int, text: str) -> None:
        if self._tells(index):
            self._events.append(CallArguments(index, text))

    def end_call(self, index: int) -> None:
        if self._tells(index):
            self.complete_calls += 1
            self._events.append(CallEnd(index))

    def _tells(self, index: int) -> bool:
        return self._parallel or index == 0

    def _new_id(self, index: int) -> str:
        digest = hashlib.blake2b(f"{self._seed}/{index}".encode(), digest_size=12).hexdigest()
        return digest[: self.id_length] if self.id_length else f"call_{digest}"


def joined(events: Sequence[Event]) -> list[Event]:
    """Neighbours of a kind become one event."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, Content) and isinstance(last, Content):
            found[-1] = Content(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            found[-1] = Reasoning(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments):
            if event.index == last.index:
                found[-1] = CallArguments(last.index, last.text + event.text)
            else:
                found.append(event)
        else:
            found.append(event)
    return found
