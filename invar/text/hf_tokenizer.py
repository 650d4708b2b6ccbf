"""Tokenizers in Hugging Face's form: tokenizer.json beside tokenizer_config.json.

The `tokenizers` library runs what tokenizer.json describes (normalising, splitting, merging); the
special tokens are found by us, so that text alone can never become one.
https://huggingface.co/docs/tokenizers/api/tokenizer
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from invar.text.errors import TokenizerError
from invar.text.sentencepiece_encoder import piece_encoders
from invar.text.sentencepiece_files import BPE_MODEL, is_legacy
from invar.text.sentencepiece_model import is_charsmap
from invar.text.tokenizer import Encoders, TextEncoder
from invar.text.tokenizer_entries import FILE, TextFiles
from invar.text.vocabulary import LARGEST_VOCABULARY, TokenType, Vocabulary, stop_ids_by_text

BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
HIDDEN = "\ue000control {}"  # no text has it, so none is ever encoded as this token


@dataclass(frozen=True)
class AddedToken:
    token_id: int
    content: str
    special: bool
    strips_right: bool


def encoders(files: TextFiles, vocabulary: Vocabulary) -> Encoders:
    """What tokenizer.json does to plain text, its added tokens and its template left out."""
    if BPE_MODEL in files:
        return piece_encoders(files[BPE_MODEL], vocabulary, is_legacy(files))
    tokenizer = tokenizer_of(files)
    plain = {**tokenizer, "model": without_controls(tokenizer["model"], vocabulary)}
    plain |= {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    first = library_encoder(plain)
    splitting = plain.get("pre_tokenizer")
    if not any(step.get("prepend_scheme") == "first" for step in all_steps(splitting)):
        return Encoders.of_one(first)
    text = json.dumps(splitting).replace('"prepend_scheme": "first"', '"prepend_scheme": "never"')
    later = library_encoder({**plain, "pre_tokenizer": json.loads(text)})
    return Encoders(first, later, later)


def library_encoder(tokenizer: Mapping[str, Any]) -> TextEncoder:
    # Imported here: the engine's process counts tokens and needs no library for that.
    import tokenizers

    from invar.text.library_encoders import LibraryEncoder, reason_of

    refuse_damaged_characters(tokenizer)
    try:
        return LibraryEncoder(tokenizers.Tokenizer.from_str(json.dumps(tokenizer)))
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(f"{FILE}: {reason_of(error)}") from None


def refuse_damaged_characters(tokenizer: Mapping[str, Any]) -> None:
    for step in all_steps(tokenizer.get("normalizer")):
        if step.get("type") != "Precompiled":
            continue
        text = step.get("precompiled_charsmap")
        try:  # the library panics
            is_sound = isinstance(text, str) and is_charsmap(base64.b64decode(text, validate=True))
        except ValueError:
            is_sound = False
        if not is_sound:
            raise TokenizerError(f"{FILE}: normalizer: precompiled_charsmap is damaged")


def without_controls(model: Mapping[str, Any], vocabulary: Vocabulary) -> Mapping[str, Any]:
    """The model such that no text becomes a control token; the unknown one it may become."""
    controls = {
        vocabulary.tokens[token_id]: token_id
        for token_id in vocabulary.ids_of_type(TokenType.CONTROL)
        if token_id != vocabulary.unknown_token_id
    }
    vocab = model["vocab"]
    if isinstance(vocab, list):
        hidden = frozenset(controls.values())
        renamed = [
            [HIDDEN.format(i), entry[1]] if i in hidden else entry for i, entry in enumerate(vocab)
        ]
        return {**model, "vocab": renamed}
    if model.get("ignore_merges"):  # whole words are looked up
        return {**model, "vocab": {t: i for t, i in vocab.items() if t not in controls}}
    return model


def read_hf_vocabulary(files: TextFiles) -> Vocabulary:
    """Read and check; raises TokenizerError naming file and fault."""
    tokenizer = tokenizer_of(files)
    model, added = tokenizer["model"], added_tokens(tokenizer)
    ids = vocabulary_ids(model) | {token.content: token.token_id for token in added}
    tokens = spellings(ids)
    token_types = np.full(len(tokens), TokenType.NORMAL, np.int32)
    if model.get("byte_fallback"):
        bytes_too = [token_id for text, token_id in ids.items() if BYTE_TOKEN.fullmatch(text)]
        token_types[bytes_too] = TokenType.BYTE
    for token in added:
        kind = TokenType.CONTROL if token.special else TokenType.USER_DEFINED
        token_types[token.token_id] = kind
    token_types[[i for i, text in enumerate(tokens) if not text]] = TokenType.UNUSED
    by_text = stop_ids_by_text(ids, token_types)
    config = files.get("tokenizer_config.json", {})
    bos, eos = (boundary_id(files, ids, name) for name in ("bos_token", "eos_token"))
    opening, closing = template_ids(tokenizer.get("post_processor"), ids)
    if tokenizer.get("post_processor") is None:
        opening = [bos] if config.get("add_bos_token") and bos is not None else []
        closing = [eos] if config.get("add_eos_token") and eos is not None else []
    steps = list(all_steps(tokenizer.get("decoder")))
    is_byte_level = any(step.get("type") == "ByteLevel" for step in steps)
    unknown = model.get("unk_token")
    return Vocabulary(
        model="gpt2" if is_byte_level else "llama",
        tokens=tokens,
        ids=ids,
        token_types=token_types,
        scores=None,
        merges=[],
        pretokenizer=None,
        bos_token_id=opening[0] if opening else bos,
        eos_token_id=eos,
        separator_token_id=None,
        unknown_token_id=ids.get(unknown) if isinstance(unknown, str) else None,
        add_bos=bool(opening),
        add_eos=bool(closing) and eos in closing,
        add_separator=False,
        add_space_prefix=any(strips_first_space(step) for step in steps),
        stop_token_ids=frozenset(by_text.values()) | stop_ids(files, len(tokens), eos),
        strips_right=frozenset(token.token_id for token in added if token.strips_right),
        normalizing={},
    )


def token_count(files: TextFiles) -> int:
    tokenizer = tokenizer_of(files)
    added = [token.token_id for token in added_tokens(tokenizer)]
    return max([*vocabulary_ids(tokenizer["model"]).values(), *added], default=-1) + 1


def tokenizer_of(files: TextFiles) -> Mapping[str, Any]:
    tokenizer = files.get(FILE)
    if tokenizer is None:
        raise TokenizerError(
            f"the model has no {FILE} (nor tokenizer.model, nor vocab.json with merges.txt), so "
            "text cannot be used; give one that suits it (--tokenizer DIRECTORY), or save the "
            "tokenizer again with `transformers`"
        )
    model = tokenizer.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict | list):
        raise TokenizerError(f"{FILE}: has no model with a vocab")
    return dict(tokenizer)


def vocabulary_ids(model: Mapping[str, Any]) -> dict[str, int]:
    """spelling → id"""
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        wrong = next((t for t, i in vocab.items() if not is_id(i)), None)
        if wrong is not None:
            raise TokenizerError(f"{FILE}: token {wrong[:60]!r} has id {str(vocab[wrong])[:60]}")
        return dict(vocab)
    for index, entry in enumerate(vocab):
        if not isinstance(entry, list) or len(entry) != 2 or not isinstance(entry[0], str):
            raise TokenizerError(
                f"{FILE}: entry {index} of the vocab is no pair of token and score"
            )
    return {entry[0]: index for index, entry in enumerate(vocab)}


def added_tokens(tokenizer: Mapping[str, Any]) -> list[AddedToken]:
    found = []
    entries = tokenizer.get("added_tokens") or []
    if not isinstance(entries, list):
        raise TokenizerError(f"{FILE}: added_tokens must be a list")
    for entry in entries:
        if not isinstance(entry, dict) or not is_id(entry.get("id")):
            raise TokenizerError(f"{FILE}: added token {str(entry)[:60]} has no id")
        if not isinstance(entry.get("content"), str) or not entry["content"]:
            raise TokenizerError(f"{FILE}: added token {entry['id']} has no content")
        found.append(
            AddedToken(
                entry["id"],
                entry["content"],
                entry.get("special") is True,
                bool(entry.get("rstrip")),
            )
        )
    return found


def is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < LARGEST_VOCABULARY


def spellings(ids: Mapping[str, int]) -> list[str]:
    """token of each id; ids that nothing has are empty"""
    size = max(ids.values(), default=-1) + 1
    if size > 2 * len(ids) + 65536:
        raise TokenizerError(f"{FILE}: ids go up to {size - 1}, but there are {len(ids)} tokens")
    tokens = [""] * size
    for text, token_id in ids.items():
        tokens[token_id] = text
    return tokens


def all_steps(part: Any) -> Iterator[Mapping[str, Any]]:
    """A part of tokenizer.json and, of a sequence, its members."""
    if not isinstance(part, dict):
        return
    yield part
    for name in ("decoders", "processors", "pretokenizers", "normalizers"):
        members = part.get(name)
        for inner in members if isinstance(members, list) else []:
            yield from all_steps(inner)


def strips_first_space(step: Mapping[str, Any]) -> bool:
    if step.get("type") == "Metaspace":
        scheme = step.get("prepend_scheme", "always")
        return step.get("add_prefix_space") is not False and scheme != "never"
    return step.get("type") == "Strip" and step.get("content") == " " and bool(step.get("start"))


def template_ids(processor: Any, ids: Mapping[str, int]) -> tuple[list[int], list[int]]:
    """Ids that a single text gets in front and behind."""
    opening: list[int] = []
    closing: list[int] = []
    for step in all_steps(processor):
        if step.get("type") != "TemplateProcessing":
            continue
        side = opening
        for piece in step.get("single") or []:
            if "Sequence" in piece:
                side = closing
                continue
            name = piece.get("SpecialToken", {}).get("id")
            if name not in ids:
                raise TokenizerError(f"{FILE}: post_processor: token {str(name)[:60]} is unknown")
            side.append(ids[name])
    return opening, closing


def boundary_id(files: TextFiles, ids: Mapping[str, int], name: str) -> int | None:
    """bos or eos: by its spelling in tokenizer_config.json, else by its id in config.json."""
    text = token_spelling(files, name)
    if text:
        if text not in ids:
            raise TokenizerError(f"tokenizer_config.json: {name} {text[:60]!r} is not in {FILE}")
        return ids[text]
    given = files.get("config.json", {}).get(f"{name}_id")
    first = given[0] if isinstance(given, list) and given else given
    return first if is_id(first) and first < len(ids) else None


def token_spelling(files: TextFiles, name: str) -> str:
    value = files.get("tokenizer_config.json", {}).get(name)
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def stop_ids(files: TextFiles, vocab_size: int, eos: int | None) -> frozenset[int]:
    """The eos ids of generation_config.json, or of config.json, and the tokenizer's own."""
    found = {eos} if eos is not None else set()
    for file in ("generation_config.json", "config.json"):
        given = files.get(file, {}).get("eos_token_id")
        if given is None:
            continue
        listed = given if isinstance(given, list) else [given]
        for token_id in listed:
            if not is_id(token_id) or token_id >= vocab_size:
                raise TokenizerError(
                    f"{file}: eos_token_id {str(given)[:60]} is outside the vocabulary of "
                    f"{vocab_size} tokens"
                )
        return frozenset(found | set(listed))
    return frozenset(found)
