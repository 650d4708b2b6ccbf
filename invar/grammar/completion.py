"""Short ends of an answer: how few tokens still satisfy its grammar.

The grammar engine does not tell, so tokens are tried: of those that it allows, the ones that close
what is open come first: quotes and brackets, and the texts and control tokens that a grammar names
as ends. What is found is an end, and for all but odd grammars a shortest one.
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from invar.grammar.structural_tag import Hints

MAX_TOKENS = 512  # of an end that is looked for
BEAM = 4  # beginnings of ends that are kept, of each length
BRANCHES = 4  # tokens that are tried after each
MARKED = 1000  # kinds from here on are those of control tokens
ONE_BYTE = 2000  # kinds from here on are those of tokens of one byte, each its own
IN_TEXT = 100  # kinds from here on are those of tokens inside free text
REPEATS = 4  # tokens of one kind in a row, before another kind is tried
LOOKS = 16  # in vain, for the letters that a text must end with
WINDOW = 4096  # tokens of the order that are looked at together

Ids = npt.NDArray[np.int64]

# The first of these that a token's bytes match is its rank: what closes most, then the shortest
# values, then what opens, then everything else.
OUTSIDE = tuple(
    re.compile(pattern)
    for pattern in (
        rb'""[}\]]*',
        rb'"?\}[}\]]*',
        rb'"?\][}\]]*',
        rb'[\]}"]+[,:]"?',
        rb"[\[{]+[\]}]+",
        rb'"',
        rb'[,:]"?',
        rb"<?/[^ ]*",  # of a tag
        rb"[0-9]",
        rb"null|true",
        rb'[\[{]"?',
    )
)
# Where text is free, braces are text: only a quote closes. One with a comma opens what comes next,
# and would do so for ever in an array.
INSIDE = tuple(re.compile(pattern) for pattern in (rb'"[}\]]+', rb'"', rb'"[,:]"?'))
SYNTAX = frozenset(b'"</}]{[,:0123456789nt')  # first bytes of all that these match
CONTROL = re.compile(r"<\[(\d{1,9})\]>")  # a token in a rule of Lark
# Of what a grammar ends texts with: trying costs their square. Longer ones, and more, are found as
# any other text is, or not at all. Real ends are tags.
LONGEST_END, MOST_ENDS = 64, 16
FREE_TEXT = (b"Q", b"#", b"~")  # no syntax has all of these at one place


class DeadEnd(Exception):
    """No token fits behind what was tried."""


class Completer:
    """Finds ends for grammars over one vocabulary. Nothing changes after construction."""

    def __init__(self, tokens: list[bytes], special_ids: frozenset[int], eos_id: int) -> None:
        self.eos_id = eos_id
        lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
        lengths[list(special_ids)] = 0
        by_length = np.argsort(lengths, kind="stable")
        ids: Ids = by_length[np.count_nonzero(lengths == 0) :]
        self._outside = _groups(ids, tokens, OUTSIDE)
        self._inside = _groups(ids, tokens, INSIDE)
        self._one_byte: Ids = ids[lengths[ids] == 1]
        self._free, self._lines, self._quotes, self._escapes = (
            self._one_byte[[tokens[one] in texts for one in self._one_byte]]
            for texts in (FREE_TEXT, (b"\n",), (b'"',), (b"\\",))
        )
        self._ascii: Ids = self._one_byte[[tokens[one].isascii() for one in self._one_byte]]
        self._special: tuple[int, ...] = ()
        self._ends: tuple[tuple[list[int], ...], ...] = ()
        self._tails: list[list[int]] = []
        self._openings: list[list[str | int]] = []
        self._encode: Callable[[str], list[int]] | None = None

    def of_grammar(
        self, lark: str, hints: Hints, vocab_size: int, encode: Callable[[str], list[int]]
    ) -> Completer:
        """One that knows what this grammar ends texts with. encode: gives a text's tokens."""
        own = copy.copy(self)
        # What closes stands behind what opens.
        named = dict.fromkeys(int(one) for one in reversed(CONTROL.findall(lark)))
        own._special = tuple(one for one in named if one < vocab_size)
        texts = [one for one in dict.fromkeys(reversed(hints.ends)) if len(one) <= LONGEST_END]
        own._ends = tuple(
            tuple(encode(text[start:]) for start in reversed(range(len(text))))
            for text in texts[:MOST_ENDS]
        )
        own._tails = []
        for text in hints.tails:
            with suppress(ValueError):  # no token stands for one of its bytes
                own._tails.append(encode(text))
        own._encode = encode
        own._openings = [
            one
            for one in hints.openings
            if all(isinstance(part, str) or 0 <= part < vocab_size for part in one)
        ]
        return own

    def branches(self, start: Any, limit_s: float) -> list[list[int]]:
        """Short answers, one after each opening of the grammar. start: its matcher.

        limit_s: seconds of a core for all; then TimeoutError.
        """
        found = []
        deadline = time.thread_time() + limit_s
        for opening in self._openings:
            tokens: list[int] = []
            for one in opening:
                assert self._encode is not None
                tokens += self._encode(one) if isinstance(one, str) else [one]
            matcher = start.deep_copy()
            if matcher.try_consume_tokens(tokens) == len(tokens):
                left = max(0.0, deadline - time.thread_time())
                with suppress(DeadEnd):
                    rest = self.quick(matcher, MAX_TOKENS, left)
                    found += [] if rest is None else [[*tokens, *rest]]
        return found

    def ends_with(self, matcher: Any, end: list[int]) -> bool:
        """Whether `end` after what the matcher has seen satisfies its grammar."""
        return bool(matcher.validate_tokens([*end, self.eos_id]) == len(end) + 1)

    def shortest(self, matcher: Any, limit: int = MAX_TOKENS) -> list[int] | None:
        """From many beginnings at once. None: none is so short. The matcher stays as it is.

        Raises DeadEnd where each of them led to one.
        """
        if _is_whole(matcher):
            return []
        beam: list[tuple[Any, list[int]]] = [(matcher, [])]
        for _ in range(limit):
            longer = []
            for state, tokens in beam:
                for _, token in islice(self._candidates(state), BRANCHES):
                    after = state.deep_copy()
                    if not after.consume_token(token):
                        continue
                    if _is_whole(after):
                        return [*tokens, token]
                    longer.append((after, [*tokens, token]))
            if not longer:
                raise DeadEnd
            beam = longer[:BEAM]
        return None

    def quick(
        self, matcher: Any, limit: int, time_limit_s: float | None = None
    ) -> list[int] | None:
        """The first end that is found, of at most `limit` tokens. What repeats itself gives way:
        digits and letters may go on for ever. Raises DeadEnd, and TimeoutError after so much time
        of a core."""
        began = time.thread_time()
        state = matcher.deep_copy()
        tokens: list[int] = []
        kinds: list[int] = []
        tired: set[int] = set()
        looks = LOOKS
        while not _is_whole(state):
            if len(tokens) >= limit:
                return None
            if time_limit_s is not None and time.thread_time() - began > time_limit_s:
                raise TimeoutError
            # A quote that did not close free text says that it is no string of JSON.
            closes = not (kinds and IN_TEXT <= kinds[-1] < ONE_BYTE)
            candidates = list(self._candidates(state, closes, looks > 0))
            is_text = any(IN_TEXT <= kind < MARKED for kind, _ in candidates)
            looks -= is_text and not any(kind < 0 or kind >= ONE_BYTE for kind, _ in candidates)
            if not candidates:
                raise DeadEnd
            if len(tokens) - candidates[0][0] > limit:
                return None
            fresh = next((one for one in candidates if one[0] not in tired), None)
            kind, token = fresh or self._another(state, tired) or candidates[0]
            if not state.consume_token(token):
                raise DeadEnd
            tokens.append(token)
            kinds.append(kind)
            if len(kinds) >= REPEATS and set(kinds[-REPEATS:]) == {kind}:
                tired.add(kind)
        return tokens

    def _candidates(
        self, matcher: Any, closes: bool = True, looks: bool = True
    ) -> Iterator[tuple[int, int]]:
        """Tokens to go on with, the best first, one of each kind. closes: a quote ends free text.
        looks: where none does, for letters that will."""
        forced = matcher.compute_ff_tokens()
        if forced:
            yield -len(forced), int(forced[0])  # a kind of its own: how many there are
            return
        allowed = _allowed(matcher)
        for place, token in enumerate(self._special):
            if allowed[token]:
                yield MARKED + place, token
        is_free = bool(len(self._free)) and bool(allowed[self._free].all())
        # In strings of JSON, where line breaks are escaped, nothing but a quote is an end.
        if self._ends and (not is_free or allowed[self._lines].all()):
            yield from self._text_end(matcher, is_free)
        looks = looks and (is_free or bool(self._tails))
        if looks and not any(self._is_over(matcher, [one]) for one in self._quotes.tolist()):
            yield from self._way_out(matcher, allowed, is_free)
        inside = is_free and closes
        first = IN_TEXT if inside else 0
        for kind, ids in enumerate(self._inside if inside else self._outside, start=first):
            for start in range(0, len(ids), WINDOW):
                found = allowed[ids[start : start + WINDOW]]
                first_found = int(found.argmax())
                if found[first_found]:
                    yield kind, int(ids[start + first_found])
                    break

    def _another(self, matcher: Any, tired: Collection[int]) -> tuple[int, int] | None:
        """Where every kind has been tried in vain: a byte behind which nothing is missing, or one
        that is not tired. What ends `x+y` is no syntax, and need not be what is allowed first."""
        allowed = self._one_byte[_allowed(matcher)[self._one_byte]].tolist()
        for token in allowed:
            if self.ends_with(matcher, [token]):
                return ONE_BYTE + token, token
        fresh = ((ONE_BYTE + token, token) for token in allowed)
        return next((one for one in fresh if one[0] not in tired), None)

    def _way_out(
        self, matcher: Any, allowed: npt.NDArray[np.bool_], is_free: bool
    ) -> Iterator[tuple[int, int]]:
        """Of a text that only ends behind certain letters, such as the z of `[^z]+z`; else of free
        text a letter behind which not all is text any more, such as the @ of an address."""
        letters = self._ascii[allowed[self._ascii]].tolist() if is_free else []
        quotes = self._quotes.tolist()
        for rest in (*self._tails, *([letter] for letter in letters)):
            if matcher.validate_tokens(rest) == len(rest) and (
                self.ends_with(matcher, rest)
                or any(self._is_over(matcher, [*rest, quote]) for quote in quotes)
            ):
                yield (-len(rest) if len(rest) > 1 else ONE_BYTE + rest[0]), rest[0]
                return
        for letter in letters:
            if letter not in self._escapes and self._is_over(matcher, [letter]):
                yield ONE_BYTE + letter, letter
                return

    def _is_over(self, matcher: Any, tokens: list[int]) -> bool:
        """Whether free text is, behind them: not behind a quote that is escaped, or is text."""
        count = len(tokens)
        return any(
            matcher.validate_tokens([*tokens, letter]) == count for letter in self._free.tolist()
        )

    def _text_end(self, matcher: Any, is_free: bool) -> Iterator[tuple[int, int]]:
        """The first token of what is missing of a text's end, which may have begun."""
        for rests in self._ends:
            whole = rests[-1]
            for rest in rests:
                if matcher.validate_tokens(rest) < len(rest):
                    continue
                # Behind its end no text has another one.
                if not is_free or matcher.validate_tokens([*rest, *whole]) < len(rest) + len(whole):
                    yield -len(rest), rest[0]
                    return


def _groups(ids: Ids, tokens: list[bytes], ranks: tuple[re.Pattern[bytes], ...]) -> list[Ids]:
    """Ids by the first pattern that their bytes match, the longest first; then all others, once
    from the shortest and once from the longest on; then blanks.

    ids: by length.
    """
    groups: list[list[int]] = [[] for _ in ranks]
    is_other = np.ones(len(ids), bool)
    for place, one in enumerate(ids.tolist()):
        if tokens[one][0] in SYNTAX:
            for rank, pattern in enumerate(ranks):
                if pattern.fullmatch(tokens[one]):
                    groups[rank].append(one)
                    is_other[place] = False
                    break
    is_blank = np.array([not tokens[one].strip() for one in ids.tolist()], bool)
    others = ids[is_other & ~is_blank]
    for group in groups:
        group.sort(key=lambda one: -len(tokens[one]))  # equal ones stay by id
    return [*(np.array(group, np.int64) for group in groups), others, others[::-1], ids[is_blank]]


def _allowed(matcher: Any) -> npt.NDArray[np.bool_]:
    """By token."""
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return np.unpackbits(mask, bitorder="little").view(bool)


def _is_whole(matcher: Any) -> bool:
    return bool(matcher.is_accepting()) and not matcher.is_error()
