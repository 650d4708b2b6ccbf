"""What each token id stands for as bytes of text."""

from __future__ import annotations

from collections.abc import Callable

from invar.text.piece_merging import SPACE_MARK
from invar.text.vocabulary import TokenType, Vocabulary

_SILENT = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.UNUSED)


def _byte_level_alphabet() -> dict[int, str]:
    """GPT-2's printable stand-in for every byte, inverted: code point → latin-1 character.

    Printable latin-1 bytes stand for themselves, the other 68 for U+0100 onwards:
    https://github.com/openai/gpt-2/blob/9b63575ef42771a015060c964af2c3da4cf7c8ab/src/encoder.py#L9
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    table = {byte: chr(byte) for byte in printable}
    table.update({0x100 + index: chr(byte) for index, byte in enumerate(others)})
    return table


_ALPHABET = _byte_level_alphabet()
_CHARACTERS = {ord(byte): chr(character) for character, byte in _ALPHABET.items()}


def byte_level_text(raw: bytes) -> str:
    """Bytes as byte-level vocabularies spell them."""
    return raw.decode("latin-1").translate(_CHARACTERS)


class TokenBytes(dict[int, bytes]):
    """Bytes per token id, converted on first use and kept; control tokens stand for nothing."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokens = vocabulary.tokens
        self._types = vocabulary.token_types
        by_model: dict[str, Callable[[str], bytes]] = {
            "gpt2": _byte_level,
            "bert": _word_piece,
        }
        self._normal = by_model.get(vocabulary.model, _space_marked)

    def __missing__(self, token_id: int) -> bytes:
        """`token_id` must lie in the vocabulary."""
        converted = self[token_id] = self._convert(token_id)
        return converted

    def _convert(self, token_id: int) -> bytes:
        text, kind = self._tokens[token_id], int(self._types[token_id])
        if kind in _SILENT:
            return b""
        if kind == TokenType.USER_DEFINED:
            return _utf8(text)
        if kind == TokenType.BYTE:
            try:
                return bytes((int(text[1:-1], 16),))
            except ValueError:
                return _utf8(text)
        return self._normal(text)


def _utf8(text: str) -> bytes:
    # Readers keep undecodable bytes of a file as surrogate escapes; give the bytes back.
    return text.encode("utf-8", "surrogateescape")


def _byte_level(text: str) -> bytes:
    try:
        return text.translate(_ALPHABET).encode("latin-1")
    except UnicodeEncodeError:
        # Outside the byte alphabet: a token added as plain text but typed as normal.
        return _utf8(text)


def _space_marked(text: str) -> bytes:
    return _utf8(text.replace(SPACE_MARK, " "))


def _word_piece(text: str) -> bytes:
    return _utf8(" " + text[1:] if text.startswith(SPACE_MARK) else text)
