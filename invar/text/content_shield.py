"""Keeps what people write from turning into control tokens.

A template mixes its own control tokens with the text of messages and tools in one string. Before it
runs, a private character is put into everything in that text that could become part of a special
token's spelling; special tokens are then found in the rendered string while the character stands,
and it is taken out of the plain text between them (`Tokenizer.encode_shielded`).

Whole spellings would not be enough: `<|im_` and `end|>` may arrive in two parts and be joined by
the template. So the character follows every occurrence of a character with which spellings begin.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from invar.text.errors import ChatTemplateError

# Unicode noncharacters: in no real text, untouched by filters such as trim, lower or tojson.
_CANDIDATES = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))


class ContentShield:
    """Puts shields into strings. One object serves one rendering."""

    def __init__(self, markers: frozenset[str], used_text: Iterable[str]) -> None:
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
        self._markers = markers

    def guard(self, text: str, whole: frozenset[str] = frozenset()) -> str:
        """The text with shields inside everything that could form a special token.

        Spellings in `whole` stay as they are.
        """
        rules = _shielding_rules(self._markers, whole)
        if rules.places is None or not text:
            return text
        character = self.character

        def shielded(match: re.Match[str]) -> str:
            found = match.group()
            if match.lastgroup == "whole":
                return found
            return found[0] + character + found[1:]

        guarded = rules.places.sub(shielded, text)
        # The rest of a spelling whose beginning the template itself might write.
        if len(text) > 1 and any(
            text[:length] in rules.tails for length in range(2, rules.longest_tail + 1)
        ):
            guarded = guarded[0] + character + guarded[1:]
        return guarded


@dataclass(frozen=True, slots=True)
class _ShieldingRules:
    """Where shields go. `tails`: ends of spellings, at least two characters long."""

    places: re.Pattern[str] | None
    tails: frozenset[str]
    longest_tail: int


# A tokenizer has thousands of spellings and a handful of `whole` sets: worked out once each.
@functools.lru_cache(maxsize=16)
def _shielding_rules(markers: frozenset[str], whole: frozenset[str]) -> _ShieldingRules:
    tails = frozenset(marker[start:] for marker in markers for start in range(1, len(marker) - 1))
    longest = max(map(len, tails), default=0)
    return _ShieldingRules(_risky_places(markers, whole), tails, longest)


def _risky_places(markers: frozenset[str], whole: frozenset[str]) -> re.Pattern[str] | None:
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
