"""A reply as parts in the order in which they came, for dialects that number them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from invar.text.reply import CallArguments, CallEnd, CallStart, Content, Event, Reasoning

Verb = Literal["open", "add", "close"]


@dataclass
class Part:
    """Thoughts, text or a call; ``text`` is what it says, of a call its arguments."""

    kind: Literal["reasoning", "text", "call"]
    index: int
    text: str = ""
    id: str = ""
    name: str = ""
    complete: bool = True


class Parts:
    """What is open is closed before something else opens."""

    def __init__(self, with_reasoning: bool = True) -> None:
        self.parts: list[Part] = []
        self._with_reasoning = with_reasoning
        self._open: Part | None = None

    def take(self, events: Iterable[Event]) -> Iterator[tuple[Verb, Part, str]]:
        """What happens to which part, and the text that is new."""
        for event in events:
            match event:
                case Content(text):
                    yield from self._add("text", text)
                case Reasoning(text):
                    if self._with_reasoning:
                        yield from self._add("reasoning", text)
                case CallStart(_, call_id, name):
                    yield from self._begin(
                        Part("call", len(self.parts), id=call_id, name=name, complete=False)
                    )
                case CallArguments(_, text):
                    yield from self._add("call", text)
                case CallEnd(_):
                    if self._open is not None:
                        self._open.complete = True
                    yield from self.close()

    def take_whole(self, events: Iterable[Event]) -> list[Part]:
        for _ in self.take(events):
            pass
        return self.at_least_one()

    def at_least_one(self) -> list[Part]:
        """An answer without any part has an empty text."""
        return self.parts or [Part("text", 0)]

    def close(self) -> Iterator[tuple[Verb, Part, str]]:
        part, self._open = self._open, None
        if part is not None:
            yield "close", part, ""

    def end(self) -> Iterator[tuple[Verb, Part, str]]:
        """The answer ends here."""
        if not self.parts:
            yield from self._begin(Part("text", 0))
        yield from self.close()

    def _begin(self, part: Part) -> Iterator[tuple[Verb, Part, str]]:
        yield from self.close()
        self.parts.append(part)
        self._open = part
        yield "open", part, ""

    def _add(
        self, kind: Literal["reasoning", "text", "call"], text: str
    ) -> Iterator[tuple[Verb, Part, str]]:
        if self._open is None or self._open.kind != kind:
            yield from self._begin(Part(kind, len(self.parts)))
        assert self._open is not None
        self._open.text += text
        yield "add", self._open, text
