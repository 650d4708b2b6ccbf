"""Plain text to the pieces of a SentencePiece BPE model, normalised as its file says."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from invar.text.piece_merging import SPACE_MARK, PieceMerger
from invar.text.sentencepiece_model import SentencePieceModel
from invar.text.tokenizer import Encoders
from invar.text.vocabulary import TokenType, Vocabulary

SPACES = re.compile(" {2,}")


class PieceEncoder:
    """prefixed: whether a normalised text gets a space in front."""

    def __init__(
        self,
        merger: PieceMerger,
        normalize: Callable[[str], str],
        prefixed: Callable[[str], bool],
    ) -> None:
        self._merger = merger
        self._normalize = normalize
        self._prefixed = prefixed

    def encode(self, text: str) -> list[int]:
        text = self._normalize(text)
        return self._merger.encode(text, inside=not self._prefixed(text)) if text else []


def always(text: str) -> bool:
    return True


def never(text: str) -> bool:
    return False


def unless_there(text: str) -> bool:
    return not text.startswith((" ", SPACE_MARK))


def piece_encoders(model: SentencePieceModel, vocabulary: Vocabulary, legacy: bool) -> Encoders:
    """legacy: a space in front also of text behind a special token, and of text that has one."""
    size = len(model.pieces)
    scores = np.zeros(len(vocabulary.tokens), np.float32)
    scores[:size] = model.scores
    types = vocabulary.token_types.copy()
    types[:size][[kind is TokenType.UNUSED for kind in model.types]] = TokenType.UNUSED
    merger = PieceMerger(replace(vocabulary, scores=scores, token_types=types))
    normalize = normalizer(model)
    inside = PieceEncoder(merger, normalize, never)
    if legacy:
        first = PieceEncoder(merger, normalize, always)
        return Encoders(first, first, inside)
    return Encoders(PieceEncoder(merger, normalize, unless_there), inside, inside)


def normalizer(model: SentencePieceModel) -> Callable[[str], str]:
    characters: Callable[[str], str] = str
    if model.charsmap:
        # Imported here: most models normalise nothing.
        from tokenizers.normalizers import Precompiled

        characters = Precompiled(model.charsmap).normalize_str

    def normalize(text: str) -> str:
        text = characters(text)
        return SPACES.sub(" ", text.strip(" ")) if model.remove_extra_whitespaces else text

    return normalize
