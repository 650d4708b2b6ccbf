"""Thoughts that stand before an answer: where they end, and how they are ended.

A grammar begins behind them; a budget of tokens bounds them, with a grammar or without. `Thoughts`
says in texts how one answer's are written, `Thinking` is a place in them. Both look at the text
alone, as whoever reads the answer does: how it was cut into tokens does not count, and an answer
that is gone on with is where it was (law 1).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

BLANK = b" \t\r\n"
SEEN_BYTES = 512  # of the text behind, in which an end may lie


@dataclass(frozen=True)
class Thoughts:
    """Of one answer. Control tokens stand in these texts by their spelling."""

    end: str  # regular expression: the answer begins behind what it matches
    # What ends them, by what stands before: the first whose expression is found at the end of the
    # text so far ("" always is). With it the text matches `end`.
    closings: tuple[tuple[str, str], ...]
    start: str = ""  # what the model begins them with, if it thinks; "": they have begun
    openers: tuple[str, ...] = ()  # of the answer: one that its grammar takes ends thoughts too
    budget: int | None = None  # tokens of thoughts

    def longest_closing(self, vocabulary: MarkedVocabulary) -> int:
        """In tokens."""
        return max(len(vocabulary.marked(text)) for _, text in self.closings)

    @property
    def have_begun(self) -> bool:
        return not self.start


class MarkedVocabulary(Protocol):
    """``invar.grammar.vocabulary.RawVocabulary``."""

    tokens: list[bytes]

    def marked(self, text: str) -> list[int]: ...


class Phase(Enum):
    OPENING = "opening"  # the model may begin to think, or to answer
    THINKING = "thinking"
    ENDED = "ended"  # the answer comes next
    NONE = "none"  # the answer has begun without thoughts


class Rules:
    """`Thoughts` over a vocabulary."""

    def __init__(self, thoughts: Thoughts, vocabulary: MarkedVocabulary, room: int | None) -> None:
        """room: tokens of the answer that thoughts and their end may take. None: any."""
        self.tokens: Sequence[bytes] = vocabulary.tokens
        self.budget = thoughts.budget
        self.start = thoughts.start.encode()
        self.start_ids = vocabulary.marked(thoughts.start)
        openers = (f"(?={re.escape(opener)})" for opener in thoughts.openers)
        self.end = re.compile("|".join((thoughts.end, *openers)).encode())
        self.closings = [
            (re.compile(rf"(?:{before})\Z".encode()), tuple(vocabulary.marked(text)))
            for before, text in thoughts.closings
        ]
        # Tokens, with what begins them, after which they are ended.
        self.limit = None if room is None else room - thoughts.longest_closing(vocabulary)

    def begin(self) -> Thinking:
        if self.start:
            return Thinking(self, Phase.OPENING)
        return Thinking(self, Phase.THINKING).bounded()


@dataclass(frozen=True, slots=True)
class Thinking:
    """A place in an answer's thoughts."""

    rules: Rules
    phase: Phase
    text: bytes = b""  # the last of it
    thought: int = 0  # tokens of thoughts
    spent: int = 0  # tokens
    closing: tuple[int, ...] = ()  # what comes now, whatever would be drawn
    rest: bytes = b""  # of the token that ended them: what stands behind their end
    is_opener: bool = False  # the answer's own beginning has ended them; it is the rest
    was_cut: bool = False  # for want of room

    @property
    def start_id(self) -> int | None:
        """The next token of what thoughts begin with, if they may still begin."""
        rules = self.rules
        if self.phase is not Phase.OPENING or self.spent >= len(rules.start_ids):
            return None
        begun = rules.start_ids[: self.spent]
        if self.text != b"".join(rules.tokens[one] for one in begun):
            return None
        # They are not begun where there is no room to end them.
        fits = rules.limit is None or len(rules.start_ids) <= rules.limit
        return rules.start_ids[self.spent] if fits else None

    def after(self, token: int) -> Thinking:
        rules, phase = self.rules, self.phase
        text = self.text[-SEEN_BYTES:] + rules.tokens[token]
        if phase is Phase.OPENING:
            begun = text.lstrip(BLANK)
            if rules.start.startswith(begun) and begun != rules.start:
                return replace(self, text=text, spent=self.spent + 1)
            if not begun.startswith(rules.start):
                return replace(self, phase=Phase.NONE)
            phase, text = Phase.THINKING, begun[len(rules.start) :]
            opens = not text
        else:
            opens = False
        next_one = replace(self, phase=phase, text=text, spent=self.spent + 1)
        if end := rules.end.search(text):
            rest, is_opener = text[end.end() :], not end.group()
            return replace(next_one, phase=Phase.ENDED, closing=(), rest=rest, is_opener=is_opener)
        if self.closing:
            return replace(next_one, closing=self.closing[1:])
        return replace(next_one, thought=self.thought + (not opens)).bounded()

    def going_on(self) -> Thinking:
        """Past an opener that the answer's grammar does not take."""
        text, thought = self.rest[1:], self.thought + 1
        return replace(self, phase=Phase.THINKING, text=text, thought=thought, rest=b"").bounded()

    def bounded(self) -> Thinking:
        """Their end comes now, if it is time."""
        rules = self.rules
        is_long = rules.budget is not None and self.thought >= rules.budget
        is_cut = rules.limit is not None and self.spent >= rules.limit
        if not (is_long or is_cut):
            return self
        closing = next(ids for before, ids in rules.closings if before.search(self.text))
        return replace(self, closing=closing, was_cut=is_cut and not is_long)
