"""Metadata of tiny tokenizers, as a GGUF file would carry them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def _byte_alphabet() -> list[str]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


BYTE_ALPHABET = _byte_alphabet()


def byte_level(
    *,
    control: Iterable[str] = ("<|bos|>", "<|im_start|>", "<|im_end|>"),
    user_defined: Iterable[str] = (),
    words: Iterable[str] = ("he", "ll", "hell", "hello"),
    merges: Iterable[str] = ("h e", "l l", "he ll", "hell o"),
    pre: str = "gpt-2",
    **keys: Any,
) -> dict[str, Any]:
    """Byte-level BPE: specials first, then the 256 bytes, then words. Id 0 is BOS and EOS."""
    specials = [*control, *user_defined]
    tokens = [*specials, *BYTE_ALPHABET, *words]
    types = [CONTROL] * len(list(control)) + [USER_DEFINED] * len(list(user_defined))
    types += [NORMAL] * (len(tokens) - len(types))
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, dtype=np.int32),
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        **_prefixed(keys),
    }


def sentence_piece(
    *,
    pieces: Mapping[str, float] | None = None,
    control: Iterable[str] = ("<s>", "</s>"),
    user_defined: Iterable[str] = (),
    **keys: Any,
) -> dict[str, Any]:
    """SentencePiece with byte fallback: `<unk>`, controls, 256 bytes, then the pieces."""
    scored = {"▁": -1.0, "a": -2.0, "b": -3.0, "ab": -0.5, "▁ab": -0.25}
    scored = scored if pieces is None else dict(pieces)
    controls, users = list(control), list(user_defined)
    tokens = ["<unk>", *controls, *users, *(f"<0x{byte:02X}>" for byte in range(256)), *scored]
    types = [UNKNOWN] + [CONTROL] * len(controls) + [USER_DEFINED] * len(users)
    types += [BYTE] * 256 + [NORMAL] * len(scored)
    scores = [0.0] * (len(tokens) - len(scored)) + list(scored.values())
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, dtype=np.int32),
        "tokenizer.ggml.scores": np.array(scores, dtype=np.float32),
        "tokenizer.ggml.unknown_token_id": 0,
        **_prefixed(keys),
    }


def _prefixed(keys: Mapping[str, Any]) -> dict[str, Any]:
    return {f"tokenizer.ggml.{name}": value for name, value in keys.items()}
