"""A tokenizer's vocabulary as llguidance takes it."""

from __future__ import annotations

from typing import Protocol


class TokenSource(Protocol):
    """What is asked of a tokenizer (``invar.text.tokenizer.Tokenizer``)."""

    vocab_size: int
    bos_token_id: int | None
    stop_token_ids: frozenset[int]

    def is_control(self, token_id: int) -> bool: ...

    def visible_bytes(self, token_id: int, *, skip_special_tokens: bool) -> bytes: ...

    def encode_inside(self, text: str, *, parse_special: bool = False) -> list[int]: ...


class RawVocabulary:
    """The names are those that `llguidance.TokenizerWrapper` asks for."""

    def __init__(self, source: TokenSource) -> None:
        self._source = source
        self.bos_token_id = source.bos_token_id
        self.eos_token_id = min(source.stop_token_ids)
        ids = range(source.vocab_size)
        # A control token is told by its spelling, so that a grammar can name it.
        self.tokens = [source.visible_bytes(one, skip_special_tokens=False) for one in ids]
        self.special_token_ids = [one for one in ids if source.is_control(one)]

    def __call__(self, text: bytes | str) -> list[int]:
        """Tokens of a text that the grammar forces: as it goes on, not as a text begins.

        An encoder that puts something before it all the same is not asked: the longest tokens are
        taken, one after the other. llguidance goes wrong over bytes that the text does not have.
        """
        as_bytes = text.encode() if isinstance(text, str) else text
        ids = self._source.encode_inside(as_bytes.decode("utf-8", "replace"))
        if b"".join(self.tokens[one] for one in ids) == as_bytes:
            return ids
        return self._longest(as_bytes)

    def marked(self, text: str) -> list[int]:
        """Tokens of a text in which spellings of control tokens are these."""
        return self._source.encode_inside(text, parse_special=True)

    def spelt(self, *texts: bytes) -> list[int]:
        """The tokens that stand for one of these texts."""
        return [index for index, one in enumerate(self.tokens) if one in texts]

    def _longest(self, text: bytes) -> list[int]:
        special = set(self.special_token_ids)
        known = {one: index for index, one in enumerate(self.tokens) if index not in special}
        longest = max(map(len, known))
        ids: list[int] = []
        while text:
            lengths = range(min(longest, len(text)), 0, -1)
            length = next((one for one in lengths if text[:one] in known), None)
            if length is None:
                raise ValueError(f"no token stands for the byte {text[0]}")
            ids.append(known[text[:length]])
            text = text[length:]
        return ids
