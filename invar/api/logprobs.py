"""Log-probabilities in the shapes of the two routes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from invar.engine.request import TokenLogprobs
from invar.text.tokenizer import Tokenizer

FLOOR = -9999.0  # JSON has no infinity; the value that vLLM and OpenAI's clients know


def token_label(tokenizer: Tokenizer, token_id: int) -> str:
    """A token as text; where its bytes alone form no text, OpenAI's ``bytes:\\xe2\\x80``.

    Each token stands for itself, so that parts of one character never merge or vanish.
    """
    if tokenizer.is_control(token_id):
        return tokenizer.token_text(token_id)
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def floored(logprob: float) -> float:
    return max(float(logprob), FLOOR)


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    def item(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": token_label(tokenizer, token_id),
            "logprob": floored(logprob),
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    return {
        "content": [
            item(entry.token_id, entry.logprob)
            | {"top_logprobs": list(map(item, entry.top_ids, entry.top_logprobs))}
            for entry in entries
        ],
        "refusal": None,
    }


def completion_logprobs(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    offsets: Sequence[int],
    entries: Sequence[TokenLogprobs | None],
    top: int,
) -> dict[str, Any]:
    """The parallel lists of /v1/completions. The first token of an echoed prompt has no entry."""

    def by_label(entry: TokenLogprobs) -> dict[str, float]:
        # The highest and the chosen one. Of ids with the same text the likeliest counts.
        labels: dict[str, float] = {}
        pairs = list(zip(entry.top_ids, entry.top_logprobs, strict=True))[:top]
        for token_id, logprob in [*pairs, (entry.token_id, entry.logprob)]:
            labels.setdefault(token_label(tokenizer, token_id), floored(logprob))
        return labels

    return {
        "text_offset": list(offsets),
        "token_logprobs": [None if e is None else floored(e.logprob) for e in entries],
        "tokens": [token_label(tokenizer, token_id) for token_id in token_ids],
        "top_logprobs": [None if e is None else by_label(e) for e in entries],
    }


def prompt_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprobs | None], top: int
) -> list[dict[str, Any] | None]:
    """vLLM's ``prompt_logprobs``: per position the ids with logprob, rank and text.

    ``top``: how many of the highest were asked for; an entry may hold more.
    """

    def position(entry: TokenLogprobs) -> dict[str, Any]:
        found = {
            str(token_id): {
                "logprob": floored(logprob),
                "rank": rank,
                "decoded_token": token_label(tokenizer, token_id),
            }
            for rank, (token_id, logprob) in enumerate(
                zip(entry.top_ids[:top], entry.top_logprobs[:top], strict=True), start=1
            )
        }
        found[str(entry.token_id)] = {
            "logprob": floored(entry.logprob),
            "rank": entry.rank,
            "decoded_token": token_label(tokenizer, entry.token_id),
        }
        return found

    return [None if entry is None else position(entry) for entry in entries]
