"""Encoders run by the `tokenizers` library: byte-level BPE, WordPiece, Unigram.

Only the core algorithm is the library's. Special tokens are found beforehand
(`special_tokens.py`), so that text alone can never become one.
"""

from __future__ import annotations

import numpy as np
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from invar.text.errors import TokenizerError
from invar.text.piece_merging import SPACE_MARK
from invar.text.sentencepiece_model import is_charsmap
from invar.text.vocabulary import TokenType, Vocabulary

REASON_CHARACTERS = 200


class LibraryEncoder:
    """Adapts a `tokenizers.Tokenizer` without added tokens."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        try:
            # The batch call is the only one that skips computing offsets.
            [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        except (
            Exception
        ) as error:  # such as a character that has no token, and nothing stands for it
            raise TokenizerError(f"the text cannot be encoded: {reason_of(error)}") from None
        ids: list[int] = encoding.ids
        return ids


def reason_of(error: Exception) -> str:
    """What the library says, which may show a whole value of a file."""
    text = str(error)
    return text if len(text) <= REASON_CHARACTERS else f"{text[:REASON_CHARACTERS]}…"


def byte_level_encoder(vocabulary: Vocabulary) -> LibraryEncoder:
    """GPT-2's scheme: split by the model's expressions, then merge bytes."""
    pre = vocabulary.pretokenizer
    assert pre is not None, "a gpt2 vocabulary is read with its pre-tokenizer"
    ids = vocabulary.ids.copy()
    # A whole word may be looked up (ignore_merges): control tokens must not be found that way.
    for token_id in vocabulary.ids_of_type(TokenType.CONTROL, TokenType.UNUSED):
        ids.pop(vocabulary.tokens[token_id], None)
    merges: list[tuple[str, str]] = []
    for merge in vocabulary.merges:
        left, separator, right = merge.partition(" ")
        if not separator or not left or not right:
            raise TokenizerError(
                f"tokenizer.ggml.merges: entry {len(merges)} is {merge!r}; expected two pieces "
                "with one space between them"
            )
        merges.append((left, right))
    try:
        tokenizer = tokenizers.Tokenizer(models.BPE(ids, merges, ignore_merges=pre.ignore_merges))
    except Exception as error:  # the library raises bare Exception, e.g. for unknown pieces
        raise TokenizerError(
            f"tokenizer.ggml.merges: {error}; every merge must be made of tokens and yield one"
        ) from error
    splits: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in pre.patterns
    ]
    splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    return LibraryEncoder(tokenizer)


def word_piece_encoder(vocabulary: Vocabulary) -> LibraryEncoder:
    """BERT's scheme. GGUF writes a word's first piece as `▁word`, the later ones bare."""
    ids: dict[str, int] = {}
    special = set(vocabulary.ids_of_type(TokenType.CONTROL, TokenType.UNKNOWN))
    for token_id, token in enumerate(vocabulary.tokens):
        if token_id in special:
            ids[token] = token_id
        elif token.startswith(SPACE_MARK):
            ids[token[1:]] = token_id
        else:
            ids["##" + token] = token_id
    unknown_id = vocabulary.unknown_token_id
    unknown = vocabulary.tokens[100 if unknown_id is None else unknown_id]
    lowercase = vocabulary.normalizing.get("normalizer.lowercase", True)
    tokenizer = tokenizers.Tokenizer(
        models.WordPiece(ids, unk_token=unknown, max_input_chars_per_word=100)
    )
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=bool(lowercase))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return LibraryEncoder(tokenizer)


def unigram_encoder(vocabulary: Vocabulary) -> LibraryEncoder:
    """T5's scheme: the most probable segmentation by score, after the file's own normalizer."""
    assert vocabulary.scores is not None, "a t5 vocabulary is read with its scores"
    pieces = list(zip(vocabulary.tokens, vocabulary.scores.astype(float).tolist(), strict=True))
    tokenizer = tokenizers.Tokenizer(
        models.Unigram(pieces, vocabulary.unknown_token_id, byte_fallback=False)
    )
    steps: list[normalizers.Normalizer] = []
    charsmap = vocabulary.normalizing.get("precompiled_charsmap")
    if charsmap is not None:
        data = np.asarray(charsmap, dtype=np.uint8).tobytes()
        if not is_charsmap(data):
            raise TokenizerError("tokenizer.ggml.precompiled_charsmap: is damaged")
        steps.append(normalizers.Precompiled(data))
    if vocabulary.normalizing.get("remove_extra_whitespaces", False):
        steps += [
            normalizers.Strip(),
            normalizers.Replace(tokenizers.Regex(" {2,}"), " "),
        ]
    if steps:
        tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        prepend_scheme="always" if vocabulary.add_space_prefix else "never"
    )
    return LibraryEncoder(tokenizer)
