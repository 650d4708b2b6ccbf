"""The vocabulary in a GGUF file's metadata: read once, checked once, said in this package's terms.

Keys and meanings: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md#tokenizer
Defaults where keys are absent follow llama.cpp, whose files they are:
https://github.com/ggml-org/llama.cpp/blob/b11434/src/llama-vocab.cpp (llama_vocab::impl::load)
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from invar.text.errors import TokenizerError
from invar.text.pretokenizers import PreTokenizer, pretokenizer_by_name

log = logging.getLogger(__name__)

MODELS = ("gpt2", "llama", "gemma4", "bert", "t5")

# Tokens of a tokenizer in Hugging Face's files: sixty times the largest that are published.
LARGEST_VOCABULARY = 1 << 24

# Some converters write 0 for "not told", which readers take as normal text.
UNDEFINED_TYPE = 0

# Rows that converters add to reach a round vocabulary size; typed as if they were real tokens.
_PADDING_ENTRY = re.compile(r"\[PAD\d+\]")

# Texts that end a turn or an answer in some family of models, whatever the metadata names as eos.
_STOP_TEXTS = frozenset(
    (
        *("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|end|>", "<|return|>"),
        *("<|call|>", "<|calls|>", "<|flush|>", "<end_of_turn>", "<|endoftext|>", "<EOT>"),
        *("_<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>", "<turn|>", "<|tool_response>"),
        *("<｜end▁of▁sentence｜>", "[e~["),
    )
)
# These are also HTML-like text, so they count only where the file types them as control tokens.
_STOP_TEXTS_IF_CONTROL = frozenset(("</s>", "<eos>"))
# How bert and t5 vocabularies treat text before looking words up.
_NORMALIZING = ("normalizer.lowercase", "remove_extra_whitespaces", "precompiled_charsmap")


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens and switches of one tokenizer. `tokens[i]` is the spelling of id i as in the file."""

    model: str
    tokens: list[str]
    ids: dict[str, int] = field(repr=False)  # spelling → id; shared, so never changed
    token_types: npt.NDArray[np.int32]  # [vocab_size]
    scores: npt.NDArray[np.float32] | None  # [vocab_size], SentencePiece models only
    merges: list[str]
    pretokenizer: PreTokenizer | None  # byte-level BPE only
    bos_token_id: int | None
    eos_token_id: int | None
    separator_token_id: int | None
    unknown_token_id: int | None
    add_bos: bool
    add_eos: bool
    add_separator: bool
    add_space_prefix: bool
    stop_token_ids: frozenset[int]
    strips_right: frozenset[int]  # tokens that swallow the blanks after them (Phi-3)
    normalizing: Mapping[str, Any] = field(repr=False)  # keys of _NORMALIZING that the file has

    def ids_of_type(self, *types: TokenType) -> list[int]:
        """Ids of the given types, ascending."""
        return np.flatnonzero(np.isin(self.token_types, types)).tolist()


def read_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    """Read and check every `tokenizer.ggml.*` key; raises TokenizerError naming key and fault."""
    model = _scalar(metadata, "model", str)
    if model is None:
        raise TokenizerError(
            "tokenizer.ggml.model: missing; the file carries no tokenizer, so text cannot be used "
            f"(expected one of {', '.join(MODELS)})"
        )
    if model not in MODELS:
        raise TokenizerError(
            f"tokenizer.ggml.model: {model!r} is not supported (known: {', '.join(MODELS)})"
        )
    tokens = _strings(metadata, "tokens")
    if not tokens:
        raise TokenizerError("tokenizer.ggml.tokens: missing or empty; the vocabulary is required")
    ids = dict(zip(tokens, range(len(tokens)), strict=True))
    token_types = _token_types(metadata, tokens)
    scores = _numbers(metadata, "scores", len(tokens), "f", np.dtype(np.float32))
    if scores is None and model in ("llama", "t5"):
        raise TokenizerError(f"tokenizer.ggml.scores: missing; a {model!r} vocabulary needs scores")
    merges = _strings(metadata, "merges")
    if not merges and model in ("gpt2", "gemma4"):
        raise TokenizerError(
            f"tokenizer.ggml.merges: missing or empty; a {model!r} (BPE) vocabulary needs merges. "
            "Convert the model again with a current converter"
        )
    pretokenizer = _pretokenizer(metadata) if model == "gpt2" else None
    stops_by_text = stop_ids_by_text(ids, token_types)
    _hide_stops(stops_by_text, token_types, merges)
    bos, eos = _boundary_ids(metadata, model, token_types)
    default_add_bos = model in ("llama", "gemma4", "bert") or bool(
        pretokenizer and pretokenizer.add_bos
    )
    return Vocabulary(
        model=model,
        tokens=tokens,
        ids=ids,
        token_types=token_types,
        scores=scores,
        merges=merges,
        pretokenizer=pretokenizer,
        bos_token_id=bos,
        eos_token_id=eos,
        separator_token_id=_token_id(metadata, "seperator_token_id", len(tokens)),
        unknown_token_id=_token_id(metadata, "unknown_token_id", len(tokens)),
        # Gemma 4 files were written with add_bos off although the model needs it.
        add_bos=_adds(metadata, "bos", bos, default_add_bos)
        or (model == "gemma4" and bos is not None),
        add_eos=_adds(metadata, "eos", eos, model == "t5"),
        add_separator=_flag(metadata, "add_sep_token", model == "bert"),
        add_space_prefix=_flag(metadata, "add_space_prefix", model in ("llama", "t5")),
        stop_token_ids=_stop_ids(metadata, set(stops_by_text.values()), len(tokens), eos),
        strips_right=_right_stripping_ids(metadata, tokens, token_types),
        normalizing=_normalizing(metadata),
    )


def _right_stripping_ids(
    metadata: Mapping[str, Any], tokens: list[str], token_types: npt.NDArray[np.int32]
) -> frozenset[int]:
    """Phi-3's tokenizer.json sets rstrip on its added tokens but these three; GGUF cannot say so.

    https://huggingface.co/microsoft/Phi-3-mini-4k-instruct/blob/main/tokenizer.json
    """
    if "phi3" not in str(metadata.get("general.name", "")).lower().replace("-", ""):
        return frozenset()
    kept = {"<unk>", "<s>", "<|endoftext|>"}
    added = np.flatnonzero(np.isin(token_types, (TokenType.CONTROL, TokenType.USER_DEFINED)))
    return frozenset(i for i in added.tolist() if tokens[i] not in kept)


def _scalar(metadata: Mapping[str, Any], name: str, kind: type) -> Any:
    key = f"tokenizer.ggml.{name}"
    value = metadata.get(key)
    if isinstance(value, np.generic):
        value = value.item()
    # bool is an int in Python, but a flag where an id belongs is a broken file.
    if value is None or (isinstance(value, kind) and (kind is bool or type(value) is not bool)):
        return value
    raise TokenizerError(f"{key}: expected {kind.__name__}, found {type(value).__name__}")


def _flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    value = _scalar(metadata, name, bool)
    return default if value is None else bool(value)


def _adds(metadata: Mapping[str, Any], name: str, token_id: int | None, default: bool) -> bool:
    """Whether texts get a BOS or EOS; a file that asks for one must say which."""
    if token_id is not None:
        return _flag(metadata, f"add_{name}_token", default)
    if _flag(metadata, f"add_{name}_token", False):
        raise TokenizerError(
            f"tokenizer.ggml.add_{name}_token is true, but the file has no "
            f"tokenizer.ggml.{name}_token_id to add"
        )
    return False


def _token_id(metadata: Mapping[str, Any], name: str, vocab_size: int) -> int | None:
    value = _scalar(metadata, name, int)
    # Converters write 2^32 - 1 (minus one, unsigned) for "none".
    if value is None or value in (-1, 0xFFFFFFFF):
        return None
    if not 0 <= value < vocab_size:
        raise TokenizerError(
            f"tokenizer.ggml.{name}: id {value} is outside the vocabulary of {vocab_size} tokens"
        )
    return int(value)


def _strings(metadata: Mapping[str, Any], name: str) -> list[str]:
    key = f"tokenizer.ggml.{name}"
    value = metadata.get(key)
    if value is None:
        return []
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise TokenizerError(f"{key}: expected an array of strings, found {type(value).__name__}")
    strings = value if isinstance(value, list) else list(value)
    wrong = set(map(type, strings)) - {str}
    if wrong:
        found = ", ".join(sorted(kind.__name__ for kind in wrong))
        raise TokenizerError(f"{key}: expected an array of strings, found elements of {found}")
    return strings


def _numbers(
    metadata: Mapping[str, Any], name: str, count: int, kinds: str, dtype: np.dtype[Any]
) -> npt.NDArray[Any] | None:
    key = f"tokenizer.ggml.{name}"
    value = metadata.get(key)
    if value is None:
        return None
    words = "floats" if kinds == "f" else "integers"
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise TokenizerError(f"{key}: expected an array of {words}: {error}") from error
    if array.dtype.kind not in kinds or array.ndim != 1:
        found = f"{array.dtype} with {array.ndim} axes"
        raise TokenizerError(f"{key}: expected an array of {words}, found {found}")
    if len(array) != count:
        raise TokenizerError(
            f"{key}: {len(array)} entries, but tokenizer.ggml.tokens has {count}; they must match"
        )
    if kinds == "f" and np.isnan(array).any():
        place = int(np.flatnonzero(np.isnan(array))[0])
        raise TokenizerError(f"{key}: entry {place} is nan, expected a number")
    return array.astype(dtype, copy=False)


def _token_types(metadata: Mapping[str, Any], tokens: list[str]) -> npt.NDArray[np.int32]:
    found = _numbers(metadata, "token_type", len(tokens), "iu", np.dtype(np.int32))
    if found is None:
        return np.full(len(tokens), TokenType.NORMAL, dtype=np.int32)
    wrong = np.flatnonzero((found < UNDEFINED_TYPE) | (found > max(TokenType)))
    if len(wrong):
        known = ", ".join(f"{kind.value} {kind.name.lower()}" for kind in TokenType)
        raise TokenizerError(
            f"tokenizer.ggml.token_type: token {wrong[0]} has type {found[wrong[0]]} "
            f"(known: {known})"
        )
    types = found.copy()
    for token_id in np.flatnonzero(np.isin(types, (TokenType.UNKNOWN, TokenType.USER_DEFINED))):
        if _PADDING_ENTRY.fullmatch(tokens[token_id]) or not tokens[token_id]:
            types[token_id] = TokenType.UNUSED
    return types


def _pretokenizer(metadata: Mapping[str, Any]) -> PreTokenizer:
    name = _scalar(metadata, "pre", str)
    if name is None:
        log.warning(
            "tokenizer.ggml.pre: missing (an old file); the 'default' rule is used, token ids may "
            "differ from the model's own. Convert the model again to be sure"
        )
        name = "default"
    return pretokenizer_by_name(name)


def _normalizing(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Copies, so that a tokenizer does not keep a mapped file alive."""
    found = {name: metadata.get(f"tokenizer.ggml.{name}") for name in _NORMALIZING}
    return {
        name: np.array(value) if isinstance(value, np.ndarray) else value
        for name, value in found.items()
        if value is not None
    }


def _boundary_ids(
    metadata: Mapping[str, Any], model: str, token_types: npt.NDArray[np.int32]
) -> tuple[int | None, int | None]:
    """Ids that open and close a text; defaults only where they are control tokens indeed."""
    count = len(token_types)
    defaults = {"llama": (1, 2), "gpt2": (11, 11), "t5": (None, 1), "gemma4": (2, 1)}
    default_bos, default_eos = defaults.get(model, (None, None))

    def pick(name: str, default: int | None) -> int | None:
        if f"tokenizer.ggml.{name}" in metadata:
            return _token_id(metadata, name, count)
        is_control = default is not None and default < count
        return default if is_control and token_types[default] == TokenType.CONTROL else None

    if model == "bert":
        opening = "cls_token_id" if "tokenizer.ggml.cls_token_id" in metadata else "bos_token_id"
        return pick(opening, 101), pick("eos_token_id", None)
    return pick("bos_token_id", default_bos), pick("eos_token_id", default_eos)


def stop_ids_by_text(ids: dict[str, int], token_types: npt.NDArray[np.int32]) -> dict[str, int]:
    """Tokens that end an answer whatever the model's files say: text → id."""
    by_text = {text: ids[text] for text in _STOP_TEXTS if text in ids}
    for text in _STOP_TEXTS_IF_CONTROL:
        if text in ids and token_types[ids[text]] == TokenType.CONTROL:
            by_text[text] = ids[text]
    # In the harmony format <|end|> closes a message, not the answer.
    if {"<|return|>", "<|call|>"} <= by_text.keys() or {"<|flush|>", "<|calls|>"} <= by_text.keys():
        by_text.pop("<|end|>", None)
    return by_text


def _hide_stops(
    by_text: dict[str, int], token_types: npt.NDArray[np.int32], merges: list[str]
) -> None:
    """Type mistyped stop tokens as control, in place: they must be found in prompts, not shown.

    A token that merging builds out of ordinary text stays what it is.
    """
    mistyped = {
        text
        for text, token_id in by_text.items()
        if token_types[token_id] in (TokenType.NORMAL, TokenType.USER_DEFINED)
    }
    if mistyped:
        mistyped -= {merge.replace(" ", "", 1) for merge in merges}
    for text in mistyped:
        token_types[by_text[text]] = TokenType.CONTROL


def _stop_ids(
    metadata: Mapping[str, Any], by_text: set[int], vocab_size: int, eos: int | None
) -> frozenset[int]:
    """Ids at which an answer ends: the eos, eot and eom keys, and tokens known by their text."""
    named = [_token_id(metadata, f"{name}_token_id", vocab_size) for name in ("eot", "eom")]
    return frozenset(by_text | {token_id for token_id in (*named, eos) if token_id is not None})
