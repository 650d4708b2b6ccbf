"""Text that comes in pieces, read by generators as if it were whole.

A reading yields where what it needs has not come yet and is resumed with more. It decides by whole
texts alone, so that what is found cannot depend on how they were cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from functools import lru_cache
from typing import TypeAlias, TypeVar

Result = TypeVar("Result")
Reading: TypeAlias = Generator[None, None, Result]
Sink: TypeAlias = Callable[[str], object]

# How far a text may be read before it is known what it is.
MAX_UNCERTAIN = 16_384

_OUTSIDE = re.compile(r'["{}\[\]]')
_INSIDE = re.compile(r'["\\]')
_SCALAR_END = re.compile(r"[\s,}\]]")


class Uncertain(Exception):
    """So much has been read since a mark that it is given up."""


class Stops:
    """Several literals that are looked for together; the leftmost is found, of those the longest.

    None may stand inside another, unless at its end: then a match could not be known when it comes.
    """

    def __init__(self, literals: Iterable[str]) -> None:
        self.literals = tuple(sorted(set(literals), key=len, reverse=True))
        for short in self.literals:
            if not short or any(short in long[:-1] for long in self.literals if long != short):
                raise ValueError(f"{short!r} cannot be looked for beside {self.literals}")
        self._pattern = re.compile("|".join(map(re.escape, self.literals)) or r"(?!)")
        self._longest = max(map(len, self.literals), default=0)
        self._beginnings = frozenset(
            literal[:size] for literal in self.literals for size in range(1, len(literal))
        )

    def search(self, text: str, start: int) -> re.Match[str] | None:
        return self._pattern.search(text, start)

    def held(self, text: str, start: int) -> int:
        """How many characters at the end of the text may begin one of them."""
        for size in range(min(self._longest - 1, len(text) - start), 0, -1):
            if text[-size:] in self._beginnings:
                return size
        return 0


@lru_cache(maxsize=256)
def stops(*literals: str) -> Stops:
    return Stops(literals)


class Scanner:
    """The text so far and how far it has been read."""

    def __init__(self) -> None:
        self.ended = False
        self._text = ""
        self._at = 0
        self._dropped = 0  # characters before `_text`
        self._mark: int | None = None

    @property
    def position(self) -> int:
        """Characters read."""
        return self._dropped + self._at

    def feed(self, text: str) -> None:
        kept = self._at if self._mark is None else self._mark - self._dropped
        self._text = self._text[kept:] + text
        self._dropped += kept
        self._at -= kept

    def mark(self) -> int:
        """From here on the text is kept, so that `rewind` can go back, until `release`.

        Meanwhile readings raise Uncertain after `MAX_UNCERTAIN` characters.
        """
        self._mark = self.position
        return self._mark

    def release(self) -> None:
        self._mark = None

    def rewind(self, mark: int) -> None:
        self._at = mark - self._dropped

    def _advance(self, count: int) -> None:
        self._at += count
        if self._mark is not None and self.position - self._mark > MAX_UNCERTAIN:
            raise Uncertain

    # ------------------------------------------------------------------------------ readings

    def character(self) -> Reading[str]:
        """The next character, which is not read; "" at the end."""
        while self._at >= len(self._text):
            if self.ended:
                return ""
            yield
        return self._text[self._at]

    def skip(self, characters: str = " \t\r\n") -> Reading[None]:
        while (found := (yield from self.character())) and found in characters:
            self._advance(1)

    def literal(self, text: str) -> Reading[bool]:
        """Whether ``text`` comes next; it is read if so."""
        while True:
            here = self._text[self._at : self._at + len(text)]
            if here == text:
                self._advance(len(text))
                return True
            if self.ended or not text.startswith(here):
                return False
            yield

    def until(self, ends: Stops, sink: Sink, limit: int | None = None) -> Reading[str | None]:
        """Gives ``sink`` what stands before the first of ``ends`` and reads that too.

        None: there is none, or it comes after more than ``limit`` characters.
        """
        given = 0
        while True:
            found = ends.search(self._text, self._at)
            end = found.start() if found else len(self._text)
            if found is None and not self.ended:
                end -= ends.held(self._text, self._at)
            given += end - self._at
            if limit is not None and given > limit:
                return None
            if end > self._at:
                piece = self._text[self._at : end]
                self._advance(len(piece))
                sink(piece)
            if found is not None:
                self._advance(len(found.group()))
                return found.group()
            if self.ended:
                return None
            yield

    def json_value(self, sink: Sink, stop: str = "") -> Reading[bool]:
        """Gives ``sink`` one JSON value as it stands; whether it was complete.

        Brackets and strings are looked at, no more. ``stop`` ends a broken value where it stands
        outside of a string.
        """
        first = yield from self.character()
        if first not in ('"', "{", "["):
            return (yield from self._scalar(sink, stop))
        depth, in_string = 0, False
        while True:
            pattern = _INSIDE if in_string else _outside(stop[:1])
            found = pattern.search(self._text, self._at)
            end = found.start() if found else len(self._text)
            if end > self._at:
                piece = self._text[self._at : end]
                self._advance(len(piece))
                sink(piece)
            if found is None:
                if self.ended:
                    return False
                yield
                continue
            character = found.group()
            if character == "\\":
                # What is escaped is read with it.
                while len(self._text) < self._at + 2 and not self.ended:
                    yield
                piece = self._text[self._at : self._at + 2]
                self._advance(len(piece))
                sink(piece)
                continue
            at_stop = not in_string and character not in '"{}[]'
            if at_stop and (yield from self._at_stop(stop)):
                return False
            self._advance(1)
            sink(character)
            if character == '"':
                in_string = not in_string
            elif not in_string:
                depth += (character in "{[") - (character in "}]")
            if not in_string and depth <= 0 and character in '"}]':
                return True

    def python_value(self, sink: Sink) -> Reading[bool]:
        """Gives ``sink`` what stands between brackets, these too; whether it was complete."""
        depth, quote = 0, ""
        while character := (yield from self.character()):
            self._advance(1)
            sink(character)
            if character == "\\" and quote:
                escaped = yield from self.character()
                self._advance(len(escaped))
                sink(escaped)
            elif quote:
                quote = "" if character == quote else quote
            elif character in "'\"":
                quote = character
            else:
                depth += (character in "([{") - (character in ")]}")
                if depth == 0:
                    return True
        return False

    def _scalar(self, sink: Sink, stop: str) -> Reading[bool]:
        any_given = False
        while character := (yield from self.character()):
            if _SCALAR_END.match(character):
                break
            if character == stop[:1] and (yield from self._at_stop(stop)):
                break
            self._advance(1)
            sink(character)
            any_given = True
        return any_given

    def _at_stop(self, stop: str) -> Reading[bool]:
        """Whether ``stop`` comes next; it is not read."""
        here = self.position
        found = yield from self.literal(stop)
        if found:
            self.rewind(here)
        return found


@lru_cache(maxsize=64)
def _outside(first: str) -> re.Pattern[str]:
    return re.compile(f'["{{}}\\[\\]{re.escape(first)}]') if first else _OUTSIDE


def wholly(scanner: Scanner, reading: Reading[bool]) -> Reading[bool]:
    """What is read and returns true, or nothing is read."""
    mark = scanner.mark()
    try:
        if (yield from reading):
            scanner.release()
            return True
    except Uncertain:
        pass
    scanner.rewind(mark)
    scanner.release()
    return False
