"""What a text that must match a regular expression may end with, in few letters.

A grammar engine says which letters may come, not how many are missing: behind `.*` all may,
whatever must follow. The expression says it: a shortest text of every rest of it, such as `.com`,
`com`, `om` and `m` of `https?://.*\\.com`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from itertools import islice

# The standard library's own parser; what it does not read, such as Rust's `\\p{L}`, has no hints.
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

MOST_ENDS, LONGEST_END, MOST_RESTS = 64, 64, 512
MOST_PATTERNS, LONGEST_PATTERN = 16, 256  # nested groups cost the square of their depth
LETTERS = "a0A .-_/:@#\"'!" + "".join(map(chr, range(32, 127)))


def pattern_ends(form: Any) -> list[str]:
    """Of all patterns in a JSON Schema or a structural tag, the shortest first. Without texts that
    are written otherwise in JSON."""
    patterns, waiting = set[str](), [form]
    while waiting and len(patterns) < MOST_PATTERNS:
        one = waiting.pop()
        if isinstance(one, Mapping):
            pattern = one.get("pattern")
            if isinstance(pattern, str):
                patterns.add(pattern)
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
    found = {text for pattern in patterns for text in ends_of(pattern)}
    plain = [text for text in found if json.dumps(text, ensure_ascii=False)[1:-1] == text]
    return sorted(plain, key=lambda text: (len(text), text))[:MOST_ENDS]


def ends_of(pattern: str) -> list[str]:
    """Of one, the shortest first; none where it is not understood."""
    if len(pattern) > LONGEST_PATTERN:
        return []
    try:
        rests = islice(_rests(parser.parse(pattern).data, ""), MOST_RESTS)
        ends = {text for text in rests if len(text) <= LONGEST_END}
    except (re.error, RecursionError, OverflowError, NotImplementedError):
        return []
    return sorted(ends - {""}, key=lambda text: (len(text), text))[:MOST_ENDS]


def _rests(items: Any, behind: str) -> Iterator[str]:
    """A short text of every rest of a sequence, with what is `behind` it."""
    for place in reversed(range(len(items))):
        if len(behind) > LONGEST_END:
            return
        code, value = items[place]
        for inner, copies in _inside(code, value):
            text = _shortest(inner)
            for count in range(copies if text else 1):
                yield from _rests(inner, text * count + behind)
        behind = _one(code, value) + behind
        yield behind


def _inside(code: Any, value: Any) -> Iterator[tuple[Any, int]]:
    """Sequences within an item, and how often each must come."""
    if code is codes.SUBPATTERN:
        yield value[3].data, 1
    elif code is codes.BRANCH:
        for branch in value[1]:
            yield branch.data, 1
    elif code in (codes.MAX_REPEAT, codes.MIN_REPEAT):
        least, _, inner = value
        yield inner.data, min(max(least, 1), LONGEST_END)


def _shortest(items: Any) -> str:
    """A short text of a sequence; longer ones than the longest that is of use are cut."""
    text = ""
    for code, value in items:
        text += _one(code, value)
        if len(text) > LONGEST_END:
            break
    return text[: LONGEST_END + 1]


def _one(code: Any, value: Any) -> str:
    """The same of an item."""
    if code is codes.LITERAL:
        return chr(value)
    if code in (codes.ANY, codes.NOT_LITERAL, codes.IN):
        fits = (one for one in LETTERS if _matches(ord(one), code, value))
        if found := next(fits, ""):
            return found
    if code is codes.SUBPATTERN:
        return _shortest(value[3].data)
    if code is codes.BRANCH:
        return min((_shortest(one.data) for one in value[1]), key=len)
    if code in (codes.MAX_REPEAT, codes.MIN_REPEAT):
        text: str = _shortest(value[2].data) * min(value[0], LONGEST_END + 1)
        return text[: LONGEST_END + 1]
    if code is codes.AT:
        return ""
    raise NotImplementedError(code)


CATEGORIES = {
    codes.CATEGORY_DIGIT: r"\d", codes.CATEGORY_NOT_DIGIT: r"\D",
    codes.CATEGORY_SPACE: r"\s", codes.CATEGORY_NOT_SPACE: r"\S",
    codes.CATEGORY_WORD: r"\w", codes.CATEGORY_NOT_WORD: r"\W",
}  # fmt: skip


def _matches(letter: int, code: Any, value: Any) -> bool:
    if code is codes.ANY:
        return True
    if code in (codes.LITERAL, codes.NOT_LITERAL):
        return bool(letter == value) == (code is codes.LITERAL)
    if code is codes.IN:
        is_negated = value[0][0] is codes.NEGATE
        return is_negated != any(_matches(letter, *member) for member in value[is_negated:])
    if code is codes.RANGE:
        return bool(value[0] <= letter <= value[1])
    return re.match(CATEGORIES[value], chr(letter)) is not None
