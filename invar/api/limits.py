"""What one request may ask for, checked before anything is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from invar.api.errors import bad_request

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
    inline_tokenize_characters: int = 20_000  # longer texts are tokenised off the event loop


def check_n(limits: Limits, n: int, prompts: int) -> None:
    if not 1 <= n <= limits.n:
        raise bad_request(f"n must be between 1 and {limits.n}.", "n")
    if n * prompts > limits.choices:
        raise bad_request(
            f"{prompts} prompts with n = {n} make more than {limits.choices} choices.", "n"
        )


def check_count(name: str, values: Sequence[object] | None, limit: int) -> None:
    if values is not None and len(values) > limit:
        raise bad_request(f"{name} has {len(values)} items; at most {limit} are allowed.", name)


def check_range(name: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:
        raise bad_request(f"{name} must be between {low} and {high}.", name)


def check_token_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """Every id names an entry of the vocabulary."""
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise bad_request(
                f"{name}: token id {bounded(token_id)} is outside the vocabulary "
                f"(0 to {vocab_size - 1}).",
                name,
            )


def bounded(number: int) -> str:
    """A number as text, unless the client sent one of thousands of digits."""
    return str(number) if abs(number) < 10**24 else "beyond 10^24"
