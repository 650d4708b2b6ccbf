"""Short ends of an answer: how few tokens still satisfy its grammar.

The grammar engine does not tell, so tokens are tried: of those that it allows, the ones that close
what is open come first. What is found is an end, and for all but odd grammars a shortest one.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

MAX_TOKENS = 512  # of an end that is looked for
BEAM = 4  # beginnings of ends that are kept, of each length
BRANCHES = 4  # tokens that are tried after each
IN_TEXT = 100  # kinds from here on are those of tokens inside free text
REPEATS = 4  # tokens of one kind in a row, before another kind is tried
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
        rb"[0-9]",
        rb"null|true",
        rb'[\[{]"?',
    )
)
# Where text is free, braces are text: only a quote closes. One with a comma opens what comes next,
# and would do so for ever in an array.
INSIDE = tuple(re.compile(pattern) for pattern in (rb'"[}\]]+', rb'"', rb'"[,:]"?'))
SYNTAX = frozenset(b'"}]{[,:0123456789nt')  # first bytes of all that these match
FREE_TEXT = (b"Q", b"#", b"~")  # no syntax has all of these at one place


class Completer:
    """Finds ends for grammars over one vocabulary. Nothing changes after construction."""

    def __init__(self, tokens: list[bytes], special_ids: frozenset[int], eos_id: int) -> None:
        self._eos_id = eos_id
        lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
        lengths[list(special_ids)] = 0
        by_length = np.argsort(lengths, kind="stable")
        ids: Ids = by_length[np.count_nonzero(lengths == 0) :]
        self._outside = _groups(ids, tokens, OUTSIDE)
        self._inside = _groups(ids, tokens, INSIDE)
        free = [one for one in ids[: 2 * 256].tolist() if tokens[one] in FREE_TEXT]
        self._free: Ids = np.array(free, np.int64)

    def ends_with(self, matcher: Any, end: list[int]) -> bool:
        """Whether `end` after what the matcher has seen satisfies its grammar."""
        return bool(matcher.validate_tokens([*end, self._eos_id]) == len(end) + 1)

    def shortest(self, matcher: Any, limit: int = MAX_TOKENS) -> list[int] | None:
        """From many beginnings at once. None: not found. The matcher stays as it is."""
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
                return None
            beam = longer[:BEAM]
        return None

    def quick(
        self, matcher: Any, limit: int, time_limit_s: float | None = None
    ) -> list[int] | None:
        """The first end that is found, of at most `limit` tokens. What repeats itself gives way:
        digits and letters may go on for ever. Raises TimeoutError after so much time of a core."""
        began = time.thread_time()
        state = matcher.deep_copy()
        tokens: list[int] = []
        kinds: list[int] = []
        tired: set[int] = set()
        while not _is_whole(state):
            if len(tokens) >= limit:
                return None
            if time_limit_s is not None and time.thread_time() - began > time_limit_s:
                raise TimeoutError
            # A quote that did not close free text says that it is no string of JSON.
            closes = not (kinds and kinds[-1] >= IN_TEXT)
            candidates = list(self._candidates(state, closes))
            if not candidates or len(tokens) - candidates[0][0] > limit:
                return None
            fresh = (one for one in candidates if one[0] not in tired)
            kind, token = next(fresh, candidates[0])
            if not state.consume_token(token):
                return None
            tokens.append(token)
            kinds.append(kind)
            if len(kinds) >= REPEATS and set(kinds[-REPEATS:]) == {kind}:
                tired.add(kind)
        return tokens

    def _candidates(self, matcher: Any, closes: bool = True) -> Iterator[tuple[int, int]]:
        """Tokens to go on with, the best first, one of each kind. closes: a quote ends free
        text."""
        forced = matcher.compute_ff_tokens()
        if forced:
            yield -len(forced), int(forced[0])  # a kind of its own: how many there are
            return
        words = np.frombuffer(matcher.compute_bitmask(), np.uint32)
        is_free = bool(len(self._free)) and bool(_allowed(words, self._free).all())
        inside = is_free and closes
        first = IN_TEXT if inside else 0
        for kind, ids in enumerate(self._inside if inside else self._outside, start=first):
            for start in range(0, len(ids), WINDOW):
                found = ids[start : start + WINDOW]
                found = found[_allowed(words, found)]
                if len(found):
                    yield kind, int(found[0])
                    break


def _groups(ids: Ids, tokens: list[bytes], ranks: tuple[re.Pattern[bytes], ...]) -> list[Ids]:
    """Ids by the first pattern that their bytes match, the longest first; then all others, once
    from the shortest and once from the longest on.

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
    others = ids[is_other]
    for group in groups:
        group.sort(key=lambda one: -len(tokens[one]))  # equal ones stay by id
    return [*(np.array(group, np.int64) for group in groups), others, others[::-1]]


def _allowed(words: npt.NDArray[np.uint32], ids: Ids) -> npt.NDArray[np.bool_]:
    allowed: npt.NDArray[np.bool_] = (words[ids >> 5] >> (ids & 31).astype(np.uint32)) & 1 == 1
    return allowed


def _is_whole(matcher: Any) -> bool:
    return bool(matcher.is_accepting()) and not matcher.is_error()
