"""Text to token ids and back, from the metadata of a GGUF file or from tokenizer.json."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from invar.text.errors import TokenizerError
from invar.text.piece_merging import PieceMerger
from invar.text.special_tokens import SpecialTokenSplitter
from invar.text.token_bytes import TokenBytes
from invar.text.vocabulary import TokenType, Vocabulary, read_vocabulary

if TYPE_CHECKING:
    from invar.text.tokenizer_entries import TextFiles

__all__ = ["Tokenizer", "TokenizerError"]

TokenIds = npt.NDArray[np.int32]
END_TOKENS = 64  # of a prompt, which `decode_end` looks at


class TextEncoder(Protocol):
    """Encodes plain text, in which no special token is looked for."""

    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True)
class Encoders:
    """For text at the start, and for text behind a special token: some put a space before the start
    alone. And for text that goes on where other text has ended, before which nobody puts one."""

    first: TextEncoder
    later: TextEncoder
    inside: TextEncoder

    @classmethod
    def of_one(cls, encoder: TextEncoder) -> Encoders:
        return cls(encoder, encoder, encoder)


class Tokenizer:
    """One model's tokenizer. Encoding is a pure function of the text and of the two switches.

    Special tokens are looked for in the raw text before anything else; what lies between them is
    encoded by the model's own method and can never become a control token.
    """

    def __init__(self, vocabulary: Vocabulary, encoders: Encoders | None = None) -> None:
        self._vocabulary = vocabulary
        self.vocab_size: int = len(vocabulary.tokens)
        self.bos_token_id: int | None = vocabulary.bos_token_id
        self.eos_token_id: int | None = vocabulary.eos_token_id
        self.add_bos: bool = vocabulary.add_bos
        self.add_eos: bool = vocabulary.add_eos
        self.stop_token_ids: frozenset[int] = vocabulary.stop_token_ids
        # The encoder puts a space before the first word; the first word's space is not text.
        self.strips_leading_space: bool = vocabulary.add_space_prefix or vocabulary.model == "bert"
        self.control_ids: frozenset[int] = frozenset(
            vocabulary.ids_of_type(TokenType.CONTROL, TokenType.UNKNOWN, TokenType.UNUSED)
        )
        self._bytes = TokenBytes(vocabulary)
        self._encoders = encoders or _encoders(vocabulary)
        user_defined = _spellings(vocabulary, TokenType.USER_DEFINED)
        markers = _spellings(vocabulary, TokenType.CONTROL, TokenType.UNKNOWN) | user_defined
        self._user_defined = SpecialTokenSplitter(user_defined)
        self._markers = SpecialTokenSplitter(markers, vocabulary.strips_right)
        # Blank runs are user-defined in some vocabularies, but they mark nothing.
        self.marker_spellings: frozenset[str] = frozenset(
            spelling for spelling in markers if spelling.strip()
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Build from `tokenizer.ggml.*` keys; raises TokenizerError naming the key at fault."""
        return cls(read_vocabulary(metadata))

    @classmethod
    def from_hf(cls, files: TextFiles) -> Tokenizer:
        """Build from tokenizer.json and the files beside it; TokenizerError names what is wrong."""
        from invar.text import hf_tokenizer

        vocabulary = hf_tokenizer.read_hf_vocabulary(files)
        return cls(vocabulary, hf_tokenizer.encoders(files, vocabulary))

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True
    ) -> TokenIds:
        """Token ids of `text`, int32 `[tokens]`.

        `add_special_tokens` adds BOS and EOS as the model wants them; a text that already begins
        with BOS then gets a second one, as asked. With `parse_special` off the spellings of control
        tokens are plain text; user-defined tokens are text in any case.
        """
        splitter = self._markers if parse_special else self._user_defined
        ids: list[int] = []
        if add_special_tokens and self.add_bos and self.bos_token_id is not None:
            ids.append(self.bos_token_id)
        encoder = self._encoders.first
        for piece in splitter.split(_checked(text)):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids.extend(encoder.encode(piece))
            encoder = self._encoders.later
        if add_special_tokens:
            ids.extend(self._closing_ids())
        return np.array(ids, dtype=np.int32)

    def encode_shielded(self, text: str, shield: str) -> TokenIds:
        """Encode a text in which `shield` characters keep spellings from being special tokens.

        Special tokens are found while the shields stand; then the shields vanish and what was
        between is plain text. No BOS or EOS is added.
        """
        ids: list[int] = []
        encoder = self._encoders.first
        for piece in self._markers.split(_checked(text)):
            if isinstance(piece, int):
                ids.append(piece)
            elif plain := piece.replace(shield, ""):
                ids.extend(encoder.encode(plain))
            encoder = self._encoders.later
        return np.array(ids, dtype=np.int32)

    def encode_inside(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Text as it goes on in the middle of another: no space put before it.

        No special tokens, unless `parse_special` finds their spellings in it.
        """
        pieces = self._markers.split(_checked(text)) if parse_special else [_checked(text)]
        ids: list[int] = []
        for piece in pieces:
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids += self._encoders.inside.encode(piece)
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to the text; empty for control tokens."""
        if 0 <= token_id < self.vocab_size:
            return self._bytes[token_id]
        raise self._not_in_vocabulary(token_id)

    def token_text(self, token_id: int) -> str:
        """The token as readable text: a control token's spelling, else its decoded bytes."""
        if self.is_control(token_id):
            return self._vocabulary.tokens[token_id]
        return self._bytes[token_id].decode("utf-8", "replace")

    def is_control(self, token_id: int) -> bool:
        """Whether the id is a control, unknown or unused token, one that stands for no text."""
        return self._checked_id(token_id) in self.control_ids

    def visible_bytes(self, token_id: int, *, skip_special_tokens: bool) -> bytes:
        """`token_bytes`, or a control token's spelling where those are to be seen."""
        if not skip_special_tokens and self.is_control(token_id):
            return self._vocabulary.tokens[token_id].encode("utf-8", "surrogateescape")
        return self.token_bytes(token_id)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that form no character come out as U+FFFD."""
        joined = b"".join(
            self.visible_bytes(int(token_id), skip_special_tokens=skip_special_tokens)
            for token_id in ids
        )
        if self.strips_leading_space:
            joined = joined.removeprefix(b" ")
        return joined.decode("utf-8", "replace")

    def decode_end(self, ids: TokenIds) -> str:
        """The last of a prompt as text, with its control tokens: a few lines."""
        return self.decode(ids[-END_TOKENS:].tolist(), skip_special_tokens=False)

    def _closing_ids(self) -> list[int]:
        closing = []
        if self.add_eos and self.eos_token_id is not None:
            closing.append(self.eos_token_id)
        separator = self._vocabulary.separator_token_id
        if self._vocabulary.add_separator and separator is not None and not closing:
            closing.append(separator)
        return closing

    def _checked_id(self, token_id: int) -> int:
        if 0 <= token_id < self.vocab_size:
            return token_id
        raise self._not_in_vocabulary(token_id)

    def _not_in_vocabulary(self, token_id: int) -> TokenizerError:
        return TokenizerError(
            f"token id {token_id} is outside the vocabulary of {self.vocab_size} tokens "
            f"(0 … {self.vocab_size - 1})"
        )


def _checked(text: str) -> str:
    """The text itself, or a TokenizerError where it is no sequence of Unicode characters."""
    if not isinstance(text, str):
        raise TokenizerError(
            f"text to encode is {type(text).__name__}, expected str; decode bytes as UTF-8 first"
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"text to encode has an unpaired surrogate (U+{ord(text[error.start]):04X}) at "
            f"character {error.start}; send valid Unicode"
        ) from error
    return text


class _Inside:
    def __init__(self, merger: PieceMerger) -> None:
        self._merger = merger

    def encode(self, text: str) -> list[int]:
        return self._merger.encode(text, inside=True)


def _encoders(vocabulary: Vocabulary) -> Encoders:
    if vocabulary.model in ("llama", "gemma4"):
        merger = PieceMerger(vocabulary)
        return Encoders(merger, merger, _Inside(merger))
    # Imported here: SentencePiece models start without loading the library.
    from invar.text import library_encoders

    builders = {
        "gpt2": library_encoders.byte_level_encoder,
        "bert": library_encoders.word_piece_encoder,
        "t5": library_encoders.unigram_encoder,
    }
    return Encoders.of_one(builders[vocabulary.model](vocabulary))


def _spellings(vocabulary: Vocabulary, *types: TokenType) -> dict[str, int]:
    return {
        vocabulary.tokens[token_id]: token_id
        for token_id in vocabulary.ids_of_type(*types)
        if vocabulary.tokens[token_id]
    }
