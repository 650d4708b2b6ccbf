"""Token ids to text, one at a time, each in constant time."""

from __future__ import annotations

import codecs

from invar.text.tokenizer import Tokenizer


class Detokenizer:
    """Turns the tokens of one answer into text as they come.

    Bytes of a character that is not complete yet are kept back, so no chunk holds half a character.
    The chunks joined are `Tokenizer.decode` of all ids, wherever the stream was cut.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, at_start: bool = True
    ) -> None:
        """`at_start`: the tokens begin a text, so the space that SentencePiece puts before a first
        word is not part of it. Off where they continue a text (raw completions)."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._strips_space = at_start and tokenizer.strips_leading_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that this token completes; raises TokenizerError for an id out of range."""
        data = self._tokenizer.visible_bytes(
            token_id, skip_special_tokens=self._skip_special_tokens
        )
        if self._strips_space and data:
            self._strips_space = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def flush(self) -> str:
        """One U+FFFD if the answer ended inside a character, else nothing."""
        return self._decoder.decode(b"", final=True)
