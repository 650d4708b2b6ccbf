"""Byte-level BPE without tokenizer.json: vocab.json with merges.txt, or the ranks of tiktoken.

How text is cut before merging, and which tokens open and close it, these files leave to the class
of their tokenizer:
https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/gpt2/tokenization_gpt2.py
https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/qwen2/tokenization_qwen2.py
https://github.com/openai/tiktoken/blob/0.9.0/tiktoken/load.py (ranks)
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from invar.text.errors import TokenizerError
from invar.text.pretokenizers import pretokenizer_by_name
from invar.text.token_bytes import byte_level_text
from invar.text.tokenizer_entries import (
    CONFIG,
    DECODER,
    FILE,
    MERGES,
    MODEL,
    VOCAB,
    TextFiles,
    added_tokens,
    completed,
    config_of,
    tokenizer_class,
)
from invar.text.vocabulary import LARGEST_VOCABULARY


@dataclass(frozen=True)
class ByteLevelKind:
    """What a class of tokenizers does that its files do not say."""

    pre: str  # as in `pretokenizers`
    normalizer: Mapping[str, Any] | None = None
    config: Mapping[str, Any] = field(default_factory=dict)


END = "<|endoftext|>"
BYTE_LEVEL = {
    "GPT2Tokenizer": ByteLevelKind("gpt-2", None, {"bos_token": END, "eos_token": END}),
    "Qwen2Tokenizer": ByteLevelKind("qwen2", {"type": "NFC"}, {"eos_token": END}),
}
CLASS_OF_MODEL_TYPE = {
    "gpt2": "GPT2Tokenizer",
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), "Qwen2Tokenizer"),
}


# ---------------------------------------------------------------- byte-level BPE


def from_merges(files: TextFiles) -> TextFiles:
    name = tokenizer_class(files) or CLASS_OF_MODEL_TYPE.get(
        str(files.get("config.json", {}).get("model_type")), ""
    )
    kind = BYTE_LEVEL.get(name)
    if kind is None:
        raise TokenizerError(
            f"{CONFIG}: how {name[:60] or 'an unnamed tokenizer_class'} cuts text is not known "
            f"(known: {', '.join(BYTE_LEVEL)}); save the tokenizer with `transformers`, which "
            f"writes {FILE}"
        )
    vocab, text = files[VOCAB], files[MERGES]
    wrong = next((t for t, i in vocab.items() if type(i) is not int or i < 0), None)
    if wrong is not None:
        raise TokenizerError(f"{VOCAB}: token {wrong[:60]!r} has id {str(vocab[wrong])[:60]}")
    merges = []
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.rstrip("\r")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        left, _, right = line.partition(" ")
        missing = [part for part in (left, right, left + right) if part not in vocab]
        if missing or not right:
            raise TokenizerError(
                f"{MERGES}: line {number}, {line[:60]!r}: must be two tokens that yield one; "
                f"{VOCAB} has no {(missing or [''])[0][:60]!r}"
            )
        merges.append([left, right])
    prefix = bool(config_of(files).get("add_prefix_space"))
    tokenizer = byte_level(kind, vocab, merges, prefix)
    found = completed(files, tokenizer, kind.config)
    tokenizer["added_tokens"] = added_tokens(found, vocab, set())
    return found


def byte_level(
    kind: ByteLevelKind, vocab: Mapping[str, int], merges: list[list[str]], prefix: bool = False
) -> dict[str, Any]:
    pre = pretokenizer_by_name(kind.pre)
    bytes_alone = {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True}
    splits = [
        {"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False}
        for p in pre.patterns
    ]
    # A space put in front comes before the text is cut.
    steps: list[dict[str, Any]] = [*splits, {**bytes_alone, "use_regex": False}]
    if prefix:
        steps = [{**bytes_alone, "use_regex": True}]
    return {
        "normalizer": kind.normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": {**bytes_alone, "use_regex": False},
        "post_processor": None,
        "model": {
            "type": "BPE",
            "vocab": dict(vocab),
            "merges": merges,
            "ignore_merges": pre.ignore_merges,
        },
    }


# ---------------------------------------------------------------- tiktoken

# A token is cut at each of its bytes into pairs, so the time grows with the square of its length.
# The longest of Llama 3 has 128 bytes.
LONGEST_TOKEN = 1024


def from_ranks(files: TextFiles, data: bytes) -> TextFiles:
    """Llama 3 as Meta publishes it; its special tokens stand in tokenizer_config.json."""
    if files.get("config.json", {}).get("model_type") != "llama":
        raise TokenizerError(
            f"{MODEL}: ranks of tiktoken are known of Llama 3 alone; save the tokenizer with "
            f"`transformers`, which writes {FILE}"
        )
    if not config_of(files).get(DECODER):
        raise TokenizerError(
            f"{MODEL}: ranks of tiktoken say nothing of special tokens, and {CONFIG} has no "
            f"{DECODER}; give a tokenizer that has {FILE} (--tokenizer DIRECTORY)"
        )
    ranks = read_ranks(data)
    spelled = {token: byte_level_text(token) for token in ranks}
    vocab = {spelled[token]: rank for token, rank in ranks.items()}
    merges = [[spelled[left], spelled[right]] for left, right in merges_of(ranks)]
    tokenizer = byte_level(ByteLevelKind("llama-bpe"), vocab, merges)
    tokenizer["added_tokens"] = added_tokens(files, vocab, set())
    return completed(files, tokenizer, {"add_bos_token": True})


def read_ranks(data: bytes) -> dict[bytes, int]:
    """Raises `TokenizerError` naming the line."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(io.BytesIO(data), start=1):
        line = line.rstrip(b"\r\n")
        where = f"{MODEL}: line {number}"
        if number > LARGEST_VOCABULARY:
            raise TokenizerError(f"{where}: more than {LARGEST_VOCABULARY} are not supported")
        encoded, _, rank = line.partition(b" ")
        try:
            token = base64.b64decode(encoded, validate=True)
            place = int(rank)
        except (binascii.Error, ValueError):
            raise TokenizerError(
                f"{where}, {line[:60]!r}: expected a token in base64 and its rank"
            ) from None
        if not 0 < len(token) <= LONGEST_TOKEN:
            raise TokenizerError(
                f"{where}: a token of {len(token)} bytes, expected 1 to {LONGEST_TOKEN}"
            )
        if token in ranks:
            raise TokenizerError(f"{where}, {line[:60]!r}: the token stands there twice")
        ranks[token] = place
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise TokenizerError(f"{MODEL}: the ranks of {len(ranks)} tokens are not 0, 1, 2, …")
    return ranks


def merges_of(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """All pairs that yield a token, in the order of what they yield: in a text the pair of least
    rank is merged first, whatever its parts are."""
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        merges += [(left, right) for left, right in pairs if left in ranks and right in ranks]
    return merges
