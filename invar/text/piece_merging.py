"""Merging of pieces without a library: SentencePiece vocabularies with scores, and Gemma 4.

The rule: begin with single characters; again and again merge the neighbouring pair of best rank,
the leftmost first; what is no token in the end becomes bytes. (Kudo and Richardson 2018,
https://aclanthology.org/D18-2012; the order of ties as in sentencepiece's bpe_model.cc,
https://github.com/google/sentencepiece/blob/v0.2.0/src/bpe_model.cc)

The `tokenizers` library can run such a vocabulary only after all merges have been made up from the
scores (half a million pairs and 2 s for Gemma's 262k tokens); asking the vocabulary itself needs
one dictionary, and words met before come from a cache.
"""

from __future__ import annotations

import heapq
import re

from invar.text.vocabulary import TokenType, Vocabulary

SPACE_MARK = "▁"

# A separator that no token contains: a lone surrogate cannot come out of UTF-8.
_NOT_IN_TOKENS = "\ud800"

# About 10 MB when full of average words; real traffic keeps meeting the same few thousand.
_CACHE_ENTRIES = 1 << 16
_CACHED_WORD_LENGTH = 64


class PieceMerger:
    """Encodes plain text (no special tokens) with ranks per pair of pieces."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        tokens = vocabulary.tokens
        # Merging must never build a control, byte or user-defined token out of ordinary text.
        hidden = vocabulary.ids_of_type(
            TokenType.UNKNOWN,
            TokenType.CONTROL,
            TokenType.USER_DEFINED,
            TokenType.UNUSED,
            TokenType.BYTE,
        )
        self._ids = vocabulary.ids.copy()
        for token_id in hidden:
            self._ids.pop(tokens[token_id], None)
        # A pair's key is "left right" for explicit merges, and the merged text for scores.
        self._pairs, self._separator = self._ids, ""
        self._ranks: list[float] = []
        if vocabulary.merges:
            self._pairs = dict(zip(vocabulary.merges, range(len(vocabulary.merges)), strict=True))
            self._separator = " "
        elif vocabulary.scores is not None:
            self._ranks = (-vocabulary.scores).tolist()
        self._unknown_id = vocabulary.unknown_token_id
        self._byte_ids = _byte_ids(vocabulary)
        self._prefix = SPACE_MARK if vocabulary.add_space_prefix else ""
        self._whole_newline_runs = vocabulary.model == "gemma4"
        self._words = _word_pattern(tokens, self._whole_newline_runs)
        self._cache: dict[str, tuple[int, ...]] = {}

    def encode(self, text: str, *, inside: bool = False) -> list[int]:
        """Token ids of `text`, which must be valid Unicode without lone surrogates.

        inside: it goes on in the middle of a text, so that no space is put before it.
        """
        marked = ("" if inside else self._prefix) + text.replace(" ", SPACE_MARK)
        ids: list[int] = []
        cache = self._cache
        for word in self._words.findall(marked):
            known = cache.get(word)
            if known is None:
                known = self._encode_word(word)
                if len(word) <= _CACHED_WORD_LENGTH:
                    if len(cache) >= _CACHE_ENTRIES:
                        cache.clear()
                    cache[word] = known
            ids.extend(known)
        return ids

    def _encode_word(self, word: str) -> tuple[int, ...]:
        if self._whole_newline_runs and word[0] == "\n" and word in self._ids:
            return (self._ids[word],)
        ids: list[int] = []
        for piece in self._merged(word):
            token_id = self._ids.get(piece)
            if token_id is not None:
                ids.append(token_id)
            elif self._byte_ids is not None:
                ids.extend(self._byte_ids[byte] for byte in piece.encode("utf-8"))
            elif self._unknown_id is not None and ids[-1:] != [self._unknown_id]:
                ids.append(self._unknown_id)
        return tuple(ids)

    def _merged(self, word: str) -> list[str]:
        """The pieces that remain when no neighbours can be merged any more."""
        pieces = list(word)
        count = len(pieces)
        before = list(range(-1, count - 1))
        after = list(range(1, count + 1))
        heap: list[tuple[float, int, int, int]] = []
        pairs, separator, ranks = self._pairs, self._separator, self._ranks

        def offer(left: int, right: int) -> None:
            pair = pairs.get(f"{pieces[left]}{separator}{pieces[right]}")
            if pair is not None:
                size = len(pieces[left]) + len(pieces[right])
                heapq.heappush(heap, (ranks[pair] if ranks else pair, left, right, size))

        for right in range(1, count):
            offer(right - 1, right)
        while heap:
            _, left, right, size = heapq.heappop(heap)
            # Pieces only grow or vanish, so equal length means that neither was touched since.
            if (
                not pieces[left]
                or not pieces[right]
                or len(pieces[left]) + len(pieces[right]) != size
            ):
                continue
            pieces[left] += pieces[right]
            pieces[right] = ""
            following = after[left] = after[right]
            if before[left] >= 0:
                offer(before[left], left)
            if following < count:
                before[following] = left
                offer(left, following)
        return [piece for piece in pieces if piece]


def _byte_ids(vocabulary: Vocabulary) -> list[int] | None:
    """Ids of `<0x00>` … `<0xFF>`, or None where the vocabulary lacks any of them."""
    found = {vocabulary.tokens[i]: i for i in vocabulary.ids_of_type(TokenType.BYTE)}
    ids = [found.get(f"<0x{byte:02X}>", -1) for byte in range(256)]
    return None if -1 in ids else ids


def _word_pattern(tokens: list[str], newline_runs: bool) -> re.Pattern[str]:
    """Cuts marked text into words that no merge can cross.

    A word begins at a run of space marks. That is exact except after characters that stand before
    a space mark inside some token (Gemma has `>▁</`); those keep the run in their word.
    """
    before_marks = _NOT_IN_TOKENS.join(tokens).split(SPACE_MARK)[:-1]
    glue_characters = {text[-1:] for text in before_marks} - {"", _NOT_IN_TOKENS}
    glue = "".join(sorted(map(re.escape, glue_characters)))
    line = r"\n" if newline_runs else ""
    body = f"[^{SPACE_MARK}{line}]"
    word = f"{SPACE_MARK}*{body}+"
    if glue:
        word += f"(?:(?<=[{glue}]){SPACE_MARK}+{body}*)*"
    newlines = r"\n+|" if newline_runs else ""
    return re.compile(f"{newlines}{word}|{SPACE_MARK}+")
