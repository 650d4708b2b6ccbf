"""Finding the spellings of special tokens in text.

The `tokenizers` library can do this too, but not as needed here: what counts as special differs per
call, its switch spares user-defined tokens, and building its matcher costs start-up time.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping


class SpecialTokenSplitter:
    """Cuts a text at every special token: the leftmost match, and of those the longest."""

    def __init__(self, ids: Mapping[str, int], strips_right: Collection[int] = ()) -> None:
        """`ids`: spelling → id. Tokens in `strips_right` swallow the blanks that follow them."""
        self._ids = dict(ids)
        self._strips_right = frozenset(strips_right)
        lengths: dict[str, set[int]] = {}
        for spelling in self._ids:
            lengths.setdefault(spelling[:2], set()).add(len(spelling))
        # Two characters tell candidates from ordinary text well enough that the few lengths left
        # can be tried one by one; an alternation of thousands of spellings would be slow.
        self._lengths = {
            start: sorted(found | lengths.get(start[0], set()), reverse=True)
            for start, found in lengths.items()
        }
        self._candidate = re.compile(_any_of(self._lengths)) if self._lengths else None

    def split(self, text: str) -> Iterator[int | str]:
        """Yield ids of special tokens and, between them, the non-empty pieces of plain text."""
        begin = position = 0
        while self._candidate is not None:
            candidate = self._candidate.search(text, position)
            if candidate is None:
                break
            start = candidate.start()
            match = self._match_at(text, start)
            if match is None:
                position = start + 1
                continue
            token_id, position = match
            if start > begin:
                yield text[begin:start]
            yield token_id
            if token_id in self._strips_right:
                while position < len(text) and text[position].isspace():
                    position += 1
            begin = position
        if begin < len(text):
            yield text[begin:]

    def _match_at(self, text: str, start: int) -> tuple[int, int] | None:
        lengths = self._lengths.get(text[start : start + 2]) or self._lengths[text[start]]
        for length in lengths:
            token_id = self._ids.get(text[start : start + length])
            if token_id is not None:
                # Near the end of the text the slice is shorter than `length`.
                return token_id, min(start + length, len(text))
        return None


def _any_of(starts: Collection[str]) -> str:
    """A pattern for any of the given texts of one or two characters, grouped by the first."""
    seconds: dict[str, set[str]] = {}
    for start in starts:
        seconds.setdefault(start[0], set()).add(start[1:])
    branches = []
    for first, rest in sorted(seconds.items()):
        choices = "".join(re.escape(second) for second in sorted(rest - {""}))
        alone = "" in rest
        tail = f"[{choices}]" if choices and not alone else ""
        branches.append(re.escape(first) + tail)
    return "|".join(branches)
