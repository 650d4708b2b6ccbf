"""Keeps what people write from turning into control tokens.

A template mixes its own control tokens with the text of messages and tools in one string. Before it
runs, a private character is put into everything in that text that could become part of a special
token's spelling; special tokens are then found in the rendered string while the character stands,
and it is taken out of the plain text between them (`Tokenizer.encode_shielded`).

Whole spellings would not be enough: `<|im_` and `end|>` may arrive in two parts and be joined by
the template. So the character follows every occurrence of a character with which spellings begin.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from invar.text.errors import ChatTemplateError

# Unicode noncharacters: in no real text, untouched by filters such as trim, lower or tojson.
_CANDIDATES = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))


class ContentShield:
    """Puts shields into strings. One object serves one rendering."""

    def __init__(self, markers: Collection[str], used_text: Iterable[str]) -> None:
        """`markers`: spellings of special tokens. `used_text`: what must not contain the shield."""
        used = set[str]()
        for text in used_text:
            used.update(character for character in _CANDIDATES if character in text)
        free = [character for character in _CANDIDATES if character not in used]
        if not free:
            raise ChatTemplateError(
                "messages: the text contains all Unicode noncharacters U+FDD0 … U+FDEF; "
                "remove at least one"
            )
        self.character = free[0]
        self._markers = sorted(markers, key=len, reverse=True)
        self._tails = {
            marker[start:] for marker in self._markers for start in range(1, len(marker) - 1)
        }
        self._longest_tail = max(map(len, self._tails), default=0)
        self._pattern = _risky_places(self._markers, ())

    def guard(self, text: str) -> str:
        """The text with shields inside everything that could form a special token."""
        return self._guard(text, self._pattern)

    def guard_except(self, text: str, whole: Collection[str]) -> str:
        """`guard`, but spellings in `whole` stay as they are."""
        return self._guard(text, _risky_places(self._markers, whole)) if whole else self.guard(text)

    def _guard(self, text: str, pattern: re.Pattern[str] | None) -> str:
        if pattern is None or not text:
            return text
        character = self.character

        def shielded(match: re.Match[str]) -> str:
            found = match.group()
            if match.lastgroup == "whole":
                return found
            return found[0] + character + found[1:]

        guarded = pattern.sub(shielded, text)
        # The rest of a spelling whose beginning the template itself might write.
        if len(text) > 1 and any(
            text[:length] in self._tails for length in range(2, self._longest_tail + 1)
        ):
            guarded = guarded[0] + character + guarded[1:]
        return guarded


def _risky_places(markers: list[str], whole: Collection[str]) -> re.Pattern[str] | None:
    """Matches opening characters of spellings, and whole spellings that begin with a letter.

    Letters cannot be broken at every occurrence: templates compare words such as a schema's types.
    """
    openings = {marker[0] for marker in markers if not marker[0].isalnum()}
    branches = []
    if whole:
        branches.append(f"(?P<whole>{_any_of(whole)})")
    worded = [marker for marker in markers if marker[0].isalnum() and len(marker) > 1]
    if worded:
        branches.append(_any_of(worded))
    if openings:
        branches.append("[" + "".join(map(re.escape, sorted(openings))) + "]")
    return re.compile("|".join(branches)) if branches else None


def _any_of(texts: Collection[str]) -> str:
    return "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True))


def strings_in(value: Any) -> Iterator[str]:
    """Every string inside a plain JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from strings_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings_in(item)
