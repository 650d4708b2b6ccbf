"""tokenizer.model of SentencePiece, with the tokens that other files add to it.

A BPE model runs in `sentencepiece_encoder`, a unigram model in the `tokenizers` library. What is
done to spaces is as in SentencePiece:
https://github.com/google/sentencepiece/blob/v0.2.0/src/normalizer.cc
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from invar.text.errors import TokenizerError
from invar.text.piece_merging import SPACE_MARK
from invar.text.sentencepiece_model import Kind, SentencePieceModel, read_sentencepiece
from invar.text.tokenizer_entries import (
    MODEL,
    TextFiles,
    added_decoder,
    added_tokens,
    completed,
    config_of,
    entry,
    spelling,
    tokenizer_class,
)
from invar.text.vocabulary import TokenType

BPE_MODEL = "tokenizer.model as read"
"""Under this name a BPE model stands among the files."""

FIRST_SPACE_ALONE = ("LlamaTokenizer", "CodeLlamaTokenizer")
"""Classes that put a space before the first text alone, unless they are told to be legacy."""

OPENING = (*FIRST_SPACE_ALONE, "GemmaTokenizer")
"""Classes that put BOS in front, unless they are told not to."""


def is_legacy(files: TextFiles) -> bool:
    """Whether text behind a special token gets a space too."""
    return bool(config_of(files).get("legacy", tokenizer_class(files) not in FIRST_SPACE_ALONE))


def from_sentencepiece(files: TextFiles, data: bytes) -> TextFiles:
    model = read_sentencepiece(data)
    if config_of(files).get("add_prefix_space") is False:
        model.add_dummy_prefix = False
    ids = named_pieces(model, files)
    kinds = dict(zip(ids, model.types, strict=True))
    special = {p for p, kind in kinds.items() if kind in (TokenType.CONTROL, TokenType.UNKNOWN)}
    added = {token["id"]: token for token in added_tokens(files, ids, special)}
    for piece, kind in kinds.items():
        if kind is TokenType.USER_DEFINED:
            added.setdefault(ids[piece], entry(piece, ids[piece], False))
    is_bpe = model.kind is Kind.BPE
    form = bpe(model, ids) if is_bpe else unigram(model, is_legacy(files))
    tokenizer = {"added_tokens": list(added.values()), "post_processor": None, **form}
    found = completed(files, tokenizer, defaults(model, files))
    return found | {BPE_MODEL: model} if is_bpe else found


def named_pieces(model: SentencePieceModel, files: TextFiles) -> dict[str, int]:
    """piece → id, in the order of ids. Places that were kept free in training have their names in
    tokenizer_config.json; what users defined is found in the text itself, where spaces are spaces.
    """
    given = {i: spelling(value) for i, value in added_decoder(files).items()}
    for token_id, kind in enumerate(model.types):
        if kind is TokenType.USER_DEFINED:
            model.pieces[token_id] = model.pieces[token_id].replace(SPACE_MARK, " ")
        model.pieces[token_id] = given.get(token_id) or model.pieces[token_id]
    ids = {piece: token_id for token_id, piece in enumerate(model.pieces)}
    if len(ids) != len(model.pieces):
        raise TokenizerError(
            f"{MODEL}: {len(model.pieces) - len(ids)} of its pieces are not unique"
        )
    return ids


def defaults(model: SentencePieceModel, files: TextFiles) -> dict[str, Any]:
    """What holds where tokenizer_config.json is silent."""
    found: dict[str, Any] = {
        name: model.pieces[token_id]
        for name, token_id in (("bos_token", model.bos_id), ("eos_token", model.eos_id))
        if 0 <= token_id < len(model.pieces)
    }
    return found | {"add_bos_token": tokenizer_class(files) in OPENING}


def bpe(model: SentencePieceModel, ids: Mapping[str, int]) -> dict[str, Any]:
    """A description without merges: the pieces' scores say the order."""
    has_unknown = 0 <= model.unknown_id < len(model.pieces)
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    return {
        "model": {
            "type": "BPE",
            "vocab": dict(ids),
            "byte_fallback": model.byte_fallback,
            "unk_token": model.pieces[model.unknown_id] if has_unknown else None,
        },
        "decoder": strip if model.add_dummy_prefix else None,
    }


def unigram(model: SentencePieceModel, legacy: bool) -> dict[str, Any]:
    steps: list[dict[str, Any]] = []
    if model.charsmap:
        charsmap = base64.b64encode(model.charsmap).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    if model.remove_extra_whitespaces:
        steps += [replaced({"Regex": r"\A +| +\z"}, ""), replaced({"Regex": " {2,}"}, " ")]
    steps.append(replaced({"String": " "}, SPACE_MARK))
    if model.add_dummy_prefix and legacy:  # the library puts none before one that is there
        steps.append(replaced({"Regex": rf"\A{SPACE_MARK}"}, 2 * SPACE_MARK))
    scheme = ("always" if legacy else "first") if model.add_dummy_prefix else "never"
    spaces = {"type": "Metaspace", "replacement": SPACE_MARK, "prepend_scheme": scheme}
    pieces = [list(pair) for pair in zip(model.pieces, model.scores, strict=True)]
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": {**spaces, "split": False},
        "decoder": spaces,
        "model": {
            "type": "Unigram",
            "vocab": pieces,
            "unk_id": model.unknown_id,
            "byte_fallback": model.byte_fallback,
        },
    }


def replaced(pattern: Mapping[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}
