"""What one request may ask for and hold, checked before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from invar.api.errors import bad_request
from invar.engine.sampling_params import MAX_BAD_WORDS, MAX_BIASES

# No known tokenizer has a token of more characters; a text longer than that many a token of the
# context is over the limit whatever it says, and is refused without being tokenised.
MAX_TOKEN_CHARACTERS = 256


@dataclass(frozen=True)
class Limits:
    body_bytes: int = 32 << 20
    n: int = 128  # choices a prompt
    prompts: int = 1024  # of one completions call (vLLM's limit)
    choices: int = 4096  # prompts x n
    stop_strings: int = 16
    stop_string_characters: int = 1024
    stop_token_ids: int = 1024
    logprobs: int = 20  # OpenAI's and vLLM's
    messages: int = 16384
    fields: int = 1024  # of one body, known or not
    keep_alive_s: float = 15.0  # a stream that has nothing to say says so; 0: it does not
    stall_timeout_s: float = 60.0  # a stream of which nothing is read for so long is cancelled
    unread_bytes: int = 1 << 20  # so is one of which that much waits behind what cannot be sent

    def caps(self, vocab_size: int, max_model_len: int) -> dict[str, int]:
        """How many items a field may have, by name."""
        return {
            "": self.fields,
            "allowed_token_ids": vocab_size,
            "bad_words": MAX_BAD_WORDS,
            "chat_template_kwargs": self.fields,
            "logit_bias": MAX_BIASES,
            "input": self.messages,
            "messages": self.messages,
            "system": self.messages,
            "tools": self.fields,
            "stop": self.stop_strings,
            "stop_sequences": self.stop_strings,
            "stop_token_ids": self.stop_token_ids,
            "stream_options": self.fields,
            "tokens": max_model_len,
        }


def check_caps(raw: Mapping[str, Any], caps: Mapping[str, int]) -> None:
    """Only lengths: a body may hold millions of items, and looking at each takes seconds."""
    check_items("The body", len(raw), caps[""])
    for name in caps.keys() & raw.keys():
        value = raw[name]
        if isinstance(value, list | dict):
            check_count(name, value, caps[name])


def check_n(limits: Limits, n: int, prompts: int) -> None:
    if not 1 <= n <= limits.n:
        raise bad_request(f"n must be between 1 and {limits.n}.", "n")
    if n * prompts > limits.choices:
        raise bad_request(
            f"{prompts} prompts with n = {n} make more than {limits.choices} choices.", "n"
        )


def check_count(name: str, values: Sized | None, limit: int) -> None:
    if values is not None:
        check_items(name, len(values), limit)


def check_items(name: str, count: int, limit: int) -> None:
    if count > limit:
        param = name if name.isidentifier() else None
        raise bad_request(f"{name} has {count} items; at most {limit} are allowed.", param)


def check_range(name: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:
        raise bad_request(f"{name} must be between {low} and {high}.", name)


def checked_token_ids(name: str, ids: Sequence[int], vocab_size: int) -> npt.NDArray[np.int32]:
    """int32 ``[tokens]``; every id names an entry of the vocabulary."""
    try:
        array = np.array(ids, dtype=np.int64)
        outside = array[(array < 0) | (array >= vocab_size)].tolist()
    except OverflowError:  # beyond 64 bits
        outside = [token_id for token_id in ids if not 0 <= token_id < vocab_size]
    if outside:
        raise bad_request(
            f"{name}: token id {bounded(outside[0])} is outside the vocabulary "
            f"(0 to {vocab_size - 1}).",
            name,
        )
    return array.astype(np.int32)


def bounded(number: int) -> str:
    """A number as text, unless the client sent one of thousands of digits."""
    return str(number) if abs(number) < 10**24 else "beyond 10^24"
