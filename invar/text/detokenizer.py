"""Token ids to text, one at a time, each in constant time."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Collection

from invar.text.tokenizer import Tokenizer


class Detokenizer:
    """Turns the tokens of one answer into text as they come.

    Bytes of a character that is not complete yet are kept back, so no chunk holds half a character.
    The chunks joined are `Tokenizer.decode` of all ids, wherever the stream was cut.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        at_start: bool = True,
        shown_ids: Collection[int] = (),
    ) -> None:
        """`at_start`: the tokens begin a text, so the space that SentencePiece puts before a first
        word is not part of it. Off where they continue a text (raw completions). `shown_ids`:
        control tokens that are not skipped."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._shown_ids = shown_ids
        self._strips_space = at_start and tokenizer.strips_leading_space
        self._incomplete = b""  # the beginning of a character

    def push(self, token_id: int) -> str:
        """The text that this token completes; raises TokenizerError for an id out of range."""
        if self._skip_special_tokens and token_id not in self._shown_ids:
            data = self._tokenizer.token_bytes(token_id)
        else:
            data = self._tokenizer.visible_bytes(token_id, skip_special_tokens=False)
        if self._strips_space and data:
            self._strips_space = False
            data = data.removeprefix(b" ")
        if self._incomplete:
            data = self._incomplete + data
        text, length = utf_8_decode(data, "replace", False)
        self._incomplete = data[length:]
        return text

    def flush(self) -> str:
        """One U+FFFD if the answer ended inside a character, else nothing."""
        text, _ = utf_8_decode(self._incomplete, "replace", True)
        self._incomplete = b""
        return text
