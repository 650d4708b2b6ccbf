"""What the files of a tokenizer other than tokenizer.json say, as entries of a tokenizer.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from invar.text.errors import TokenizerError

FILE, CONFIG = "tokenizer.json", "tokenizer_config.json"
MODEL, VOCAB, MERGES, WORD_PIECES = "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt"
ADDED, SPECIAL = "added_tokens.json", "special_tokens_map.json"
SPECIAL_NAMES = tuple(
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)
DECODER = "added_tokens_decoder"
LONGEST_ID = 9  # digits

TextFiles = Mapping[str, Any]
"""name of a file → what it holds: objects of JSON, texts as str, tokenizer.model as bytes"""


def config_of(files: TextFiles) -> Mapping[str, Any]:
    config: Mapping[str, Any] = files.get(CONFIG, {})
    return config


def tokenizer_class(files: TextFiles) -> str:
    """Of transformers, without the word that says in what language it is written."""
    given = config_of(files).get("tokenizer_class")
    return given.removesuffix("Fast") if isinstance(given, str) else ""


def completed(
    files: TextFiles, tokenizer: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """The files with a tokenizer.json among them. defaults: of tokenizer_config.json."""
    return {**files, CONFIG: {**defaults, **config_of(files)}, FILE: tokenizer}


def spelling(value: Any) -> str:
    content = value.get("content") if isinstance(value, Mapping) else value
    return content if isinstance(content, str) else ""


def special_spellings(files: TextFiles) -> set[str]:
    """Of all tokens that a configuration gives a part to play."""
    found = set()
    for config in (config_of(files), files.get(SPECIAL, {})):
        extra = config.get("additional_special_tokens")
        for value in (*map(config.get, SPECIAL_NAMES), *(extra if isinstance(extra, list) else ())):
            found.add(spelling(value))
    return found - {""}


def added_decoder(files: TextFiles) -> dict[int, Mapping[str, Any]]:
    decoder = config_of(files).get(DECODER) or {}
    if not isinstance(decoder, Mapping):
        raise TokenizerError(f"{CONFIG}: {DECODER} must be an object")
    found = {}
    for key, value in decoder.items():
        if not key.isdecimal() or len(key) > LONGEST_ID or not isinstance(value, Mapping):
            raise TokenizerError(f"{CONFIG}: {DECODER}: {key[:60]!r} is no id with an object")
        found[int(key)] = value
    return found


def added_tokens(
    files: TextFiles, ids: Mapping[str, int], special: set[str]
) -> list[dict[str, Any]]:
    """ids: of the vocabulary itself. special: those of its tokens that are control tokens."""
    special = special | special_spellings(files)
    found = {ids[text]: entry(text, ids[text], True) for text in special & ids.keys()}
    for text, token_id in files.get(ADDED, {}).items():
        if type(token_id) is not int:
            raise TokenizerError(f"{ADDED}: {text[:60]!r} has id {str(token_id)[:60]}")
        found[token_id] = entry(text, token_id, text in special)
    for token_id, value in added_decoder(files).items():
        found[token_id] = {**value, "id": token_id}
    return [found[token_id] for token_id in sorted(found)]


def entry(text: str, token_id: int, special: bool) -> dict[str, Any]:
    return {"id": token_id, "content": text, "special": special}
