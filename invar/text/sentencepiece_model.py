"""A SentencePiece model file, read by hand: of its protobuf what a tokenizer needs.

Fields: https://github.com/google/sentencepiece/blob/v0.2.0/src/sentencepiece_model.proto
Wire format: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from invar.text.errors import TokenizerError
from invar.text.tokenizer_entries import MODEL as FILE
from invar.text.vocabulary import LARGEST_VOCABULARY, TokenType

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types
VARINT_BYTES = 10  # of 64 bits, seven a byte
KNOWN_TYPES = frozenset(TokenType)

Value = int | float | bytes


class Kind(IntEnum):
    UNIGRAM = 1
    BPE = 2


@dataclass
class SentencePieceModel:
    """Defaults are those of the format, for what a file leaves out."""

    pieces: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    types: list[TokenType] = field(default_factory=list)
    kind: Kind = Kind.UNIGRAM
    byte_fallback: bool = False
    unknown_id: int = 0
    bos_id: int = 1  # below zero: none, as of eos
    eos_id: int = 2
    charsmap: bytes = b""  # how characters are normalised; empty: not at all
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True


def read_sentencepiece(data: bytes) -> SentencePieceModel:
    """Raises `TokenizerError` for a damaged file and for kinds that are not run here."""
    model = SentencePieceModel()
    for number, value in fields(data):
        if number == 1:
            add_piece(model, message(value))
        elif number == 2:
            read_trainer(model, message(value))
        elif number == 3:
            read_normalizer(model, message(value))
    if not model.pieces:
        raise TokenizerError(f"{FILE}: has no pieces")
    return model


def add_piece(model: SentencePieceModel, data: bytes) -> None:
    piece, score, kind = "", 0.0, TokenType.NORMAL
    where = f"{FILE}: piece {len(model.pieces)}"
    if len(model.pieces) >= LARGEST_VOCABULARY:
        raise TokenizerError(f"{where}: more than {LARGEST_VOCABULARY} are not supported")
    for number, value in fields(data):
        if number == 1:
            try:
                piece = message(value).decode("utf-8")
            except UnicodeDecodeError as error:
                raise TokenizerError(f"{where} is not text in UTF-8") from error
        elif number == 2 and isinstance(value, float):
            score = value
        elif number == 3:
            if value not in KNOWN_TYPES:
                raise TokenizerError(f"{where} has type {value!r:.20}, which is not known")
            kind = TokenType(integer(value))
    if not piece or score != score:
        raise TokenizerError(f"{where} {piece!r:.60} has no text, or a score that is no number")
    model.pieces.append(piece)
    model.scores.append(score)
    model.types.append(kind)


def read_trainer(model: SentencePieceModel, data: bytes) -> None:
    for number, value in fields(data):
        if number == 3:
            if value not in set(Kind):
                raise TokenizerError(
                    f"{FILE}: a model of words or characters ({value!r:.20}) is not supported, "
                    "only unigram and BPE"
                )
            model.kind = Kind(integer(value))
        elif number == 24 and value:
            raise TokenizerError(f"{FILE}: treat_whitespace_as_suffix is not supported")
        elif number == 35:
            model.byte_fallback = bool(value)
        elif number == 40:
            model.unknown_id = integer(value)
        elif number == 41:
            model.bos_id = integer(value)
        elif number == 42:
            model.eos_id = integer(value)


def read_normalizer(model: SentencePieceModel, data: bytes) -> None:
    for number, value in fields(data):
        if number == 2:
            model.charsmap = message(value)
            if model.charsmap and not is_charsmap(model.charsmap):
                raise TokenizerError(f"{FILE}: precompiled_charsmap is damaged; download it again")
        elif number == 3:
            model.add_dummy_prefix = bool(value)
        elif number == 4:
            model.remove_extra_whitespaces = bool(value)
        elif number == 5 and not value:
            raise TokenizerError(f"{FILE}: escape_whitespaces off is not supported")


def is_charsmap(data: bytes) -> bool:
    """Whether a look-up stays inside: the library that does them trusts the file.

    The size of a double-array trie in bytes, the trie, and texts that end in a zero byte each. A
    unit of the trie is a step to the 256 places around `place ^ offset`; where it has a leaf, the
    unit there is the place of a text.
    https://github.com/google/sentencepiece/blob/v0.2.0/third_party/darts_clone/darts.h
    """
    size = int.from_bytes(data[:4], "little")
    if size % 4 or not 0 < size <= len(data) - 4:
        return False
    units, texts = np.frombuffer(data[4 : 4 + size], "<u4"), data[4 + size :]
    try:
        texts.decode("utf-8")
    except UnicodeDecodeError:
        return False
    # Texts' places are not stepped from, but the root is, whatever it looks like.
    inner = np.union1d(np.flatnonzero(units >> 31 == 0), [0])
    steps = units[inner]
    reached = inner ^ ((steps >> 10) << ((steps & 0x200) >> 6)).astype(np.int64)
    if (reached | 0xFF).max(initial=0) >= len(units):
        return False
    places = units[reached[(steps >> 8) & 1 == 1]] & 0x7FFFFFFF
    starts = np.flatnonzero(np.frombuffer(b"\0" + texts, np.uint8) == 0)
    return texts.endswith(b"\0") and bool(np.isin(places, starts[:-1]).all())


def message(value: Value) -> bytes:
    if isinstance(value, bytes):
        return value
    raise damaged()


def integer(value: Value) -> int:
    """int32: the lower half of what is stored."""
    if not isinstance(value, int):
        raise damaged()
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)


def fields(data: bytes) -> Iterator[tuple[int, Value]]:
    """Number and value of every field of a message."""
    position, end = 0, len(data)
    while position < end:
        key, position = varint(data, position)
        wire = key & 7
        if wire == VARINT:
            value, position = varint(data, position)
            yield key >> 3, value
            continue
        size = {FIXED64: 8, FIXED32: 4}.get(wire)
        if wire == BYTES:
            size, position = varint(data, position)
        if size is None or size > end - position:
            raise damaged()
        raw = data[position : position + size]
        position += size
        yield key >> 3, struct.unpack("<f", raw)[0] if wire == FIXED32 else raw


def varint(data: bytes, position: int) -> tuple[int, int]:
    """The number, and where it ends."""
    value = 0
    for shift, byte in enumerate(data[position : position + VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return value, position + shift + 1
    raise damaged()


def damaged() -> TokenizerError:
    return TokenizerError(
        f"{FILE}: is no SentencePiece model, or one that is damaged; download it again"
    )
