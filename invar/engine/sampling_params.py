"""`SamplingParams`: how an answer is drawn and where it ends, with vLLM's names and defaults.

What a value must be is checked here; what depends on the model is checked in `door.resolve`.

Numbers are `int` or `float` (also numpy's). A bool or a string is never taken for a number; NaN and
infinities are refused; −0.0 is 0. A temperature above 0 and below 0.01 acts as 0.01, as in vLLM.
"""

from __future__ import annotations

import copy
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from invar.config import check_names
from invar.grammar.structured_outputs import StructuredOutputs

MAX_CHOICES = 1024  # each choice is a request of its own in the engine
MAX_STOP_STRINGS = 256
MAX_STOP_CHARACTERS = 4096
MAX_BAD_WORDS = 128
MAX_BIASES = 4096
INT32_MAX = 2**31 - 1
MIN_TEMPERATURE = 0.01
MAX_TEMPERATURE = 1000.0  # far beyond uniform; keeps every quotient a float32

# Known to peers, not built here: anything but these values is refused.
NOT_BUILT: Mapping[str, tuple[Any, ...]] = {
    "logits_processors": (None, []),
    "logprob_token_ids": (None,),
    "extra_args": (None, {}),
    "repetition_detection": (None,),
    "watermarking": (None,),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1.0),
    "early_stopping": (None, False),
    "flat_logprobs": (None, False),
}


class RequestOutputKind(Enum):
    """When a streaming caller hears of an answer. `LLM.generate` returns whole answers."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass
class SamplingParams:
    """Raises ValueError naming the field for a bad value, TypeError for an unknown name."""

    n: int = 1
    best_of: int | None = None  # n or None: choosing among more is not built
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 and −1: all
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: to the end of the context
    min_tokens: int = 0
    logprobs: int | None = None  # −1: the whole vocabulary
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True  # texts have none to leave out: the same either way
    truncate_prompt_tokens: int | None = None  # keep the last so many; −1: as many as fit
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logit_bias: Mapping[int, float] | Mapping[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    stream_interval: int | None = None  # of streaming callers; whole answers come anyway
    skip_reading_prefix_cache: bool | None = None
    structured_outputs: Any = None  # StructuredOutputs, its fields as a dict, or a type of answers
    guided_decoding: Any = None  # its older name
    thinking_token_budget: int | None = None  # tokens of thoughts, where they can be told; −1: any
    logits_processors: Any = None
    logprob_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = None
    repetition_detection: Any = None
    watermarking: Any = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None
    flat_logprobs: bool | None = None

    def __new__(cls, *args: Any, **options: Any) -> SamplingParams:
        check_names(options, (field.name for field in fields(cls)), "SamplingParams")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self.stop = self.stop_strings
        self.stop_token_ids = [] if self.stop_token_ids is None else self.stop_token_ids
        self.bad_words = [] if self.bad_words is None else self.bad_words
        if self.seed == -1 and not isinstance(self.seed, bool):
            self.seed = None  # vLLM's spelling of "none"
        if self.guided_decoding is not None:
            if self.structured_outputs is not None:
                raise ValueError("guided_decoding: it is the older name of structured_outputs")
            self.structured_outputs, self.guided_decoding = self.guided_decoding, None
        self.validate()

    def clone(self) -> SamplingParams:
        return copy.deepcopy(self)

    def validate(self) -> None:
        """Called again when a request is made: fields can be assigned after construction."""
        self._check_floats()
        self._check_integers()
        self._check_lists()
        self._check_bias()
        for name in ("ignore_eos", "detokenize", "skip_special_tokens"):
            _boolean(name, getattr(self, name))
        for name in ("include_stop_str_in_output", "spaces_between_special_tokens"):
            _boolean(name, getattr(self, name))
        if not isinstance(self.output_kind, RequestOutputKind):
            raise ValueError(f"output_kind: expected a RequestOutputKind, got {self.output_kind!r}")
        if self.structured_outputs is not None:
            try:
                self.structured_outputs = StructuredOutputs.of(self.structured_outputs)
            except (ValueError, TypeError) as error:
                raise ValueError(f"structured_outputs: {error}") from None
        for name, off in NOT_BUILT.items():
            if getattr(self, name) not in off:
                raise ValueError(f"{name}: not supported yet")

    @property
    def stop_strings(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    def _check_floats(self) -> None:
        _number("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.001, 1000.0)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)

    def _check_integers(self) -> None:
        _integer("n", self.n, 1, MAX_CHOICES)
        if self.best_of is not None and self.best_of != self.n:
            raise ValueError(f"best_of: not supported, only best_of = n = {self.n} is accepted")
        if self.n > 1 and self.temperature == 0:
            raise ValueError(f"n: must be 1 when sampling is greedy (temperature 0), got {self.n}")
        _integer("top_k", self.top_k, -1, INT32_MAX)
        _integer("min_tokens", self.min_tokens, 0, INT32_MAX)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, INT32_MAX)
            if self.min_tokens > self.max_tokens:
                raise ValueError(
                    f"min_tokens: {self.min_tokens} is more than max_tokens ({self.max_tokens})"
                )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), -1, INT32_MAX)
        if self.truncate_prompt_tokens is not None:
            _integer("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, INT32_MAX)
            if self.truncate_prompt_tokens == 0:
                raise ValueError("truncate_prompt_tokens: 0 would leave no prompt")
        if self.thinking_token_budget is not None:
            _integer("thinking_token_budget", self.thinking_token_budget, -1, INT32_MAX)
        if self.stream_interval is not None:
            _integer("stream_interval", self.stream_interval, 1, INT32_MAX)

    def _check_lists(self) -> None:
        _strings("stop", self.stop_strings, MAX_STOP_STRINGS)
        _strings("bad_words", [] if self.bad_words is None else self.bad_words, MAX_BAD_WORDS)
        if self.stop_strings and not self.detokenize:
            raise ValueError("stop: strings are found in text; they need detokenize=True")
        for name in ("stop_token_ids", "allowed_token_ids"):
            ids = getattr(self, name)
            if ids is not None and not isinstance(ids, list | tuple):
                raise ValueError(f"{name}: expected a list of token ids, got {_short(ids)}")
            _token_ids(name, ids or ())
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ValueError("allowed_token_ids: an empty list allows nothing")

    def _check_bias(self) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping):
            raise ValueError(
                f"logit_bias: expected a mapping of token id to bias, got {_short(self.logit_bias)}"
            )
        if len(self.logit_bias) > MAX_BIASES:
            raise ValueError(
                f"logit_bias: {len(self.logit_bias)} entries, at most {MAX_BIASES} are accepted"
            )
        for token_id, value in self.logit_bias.items():
            bias_id(token_id)
            _number(f"logit_bias[{token_id}]", value, -100.0, 100.0)


def bias_id(key: object) -> int:
    """A token id of `logit_bias`; JSON has only strings for keys."""
    if isinstance(key, str) and key.isascii() and key.removeprefix("-").isdigit():
        key = int(key[:20])
    if isinstance(key, bool) or not isinstance(key, numbers.Integral):
        raise ValueError(f"logit_bias: {_short(key)} is not a token id")
    token_id = int(key)
    if not 0 <= token_id <= INT32_MAX:
        raise ValueError(f"logit_bias: token id {_short(token_id)} is out of range")
    return token_id


def _number(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name}: expected a number, got {_short(value)}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name}: must be finite, got {number}")
    if number > high or number < low or (open_low and number == low):
        raise ValueError(f"{name}: {number} is outside {_range(low, high, open_low)}")


def _range(low: float, high: float, open_low: bool) -> str:
    return f"({low:g}, {high:g}]" if open_low else f"[{low:g}, {high:g}]"


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"{name}: expected an integer, got {_short(value)}")
    number = int(value)
    if not low <= number <= high:
        raise ValueError(f"{name}: {_short(number)} is outside {low} … {high}")


def _token_ids(name: str, ids: Sequence[object]) -> None:
    """A whole vocabulary may be listed: plain integers are looked at without a loop."""
    if set(map(type, ids)) == {int}:
        plain: Any = ids
        ids = (min(plain), max(plain))
    for token_id in ids:
        _integer(name, token_id, 0, INT32_MAX)


def _boolean(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name}: expected true or false, got {_short(value)}")


def _strings(name: str, values: object, limit: int) -> None:
    if not isinstance(values, list | tuple):
        raise ValueError(f"{name}: expected a list of strings, got {_short(values)}")
    if len(values) > limit:
        raise ValueError(f"{name}: {len(values)} strings, at most {limit} are accepted")
    for value in values:
        if not isinstance(value, str):
            raise ValueError(f"{name}: expected strings, got {_short(value)}")
        if not value:
            raise ValueError(f"{name}: an empty string cannot be looked for")
        if len(value) > MAX_STOP_CHARACTERS:
            raise ValueError(
                f"{name}: a string of {len(value)} characters, at most {MAX_STOP_CHARACTERS}"
            )


def _short(value: object) -> str:
    """What was given, for an error: never more than a line of it."""
    if isinstance(value, int) and abs(value) >= 10**40:
        return "a number of more than 40 digits"
    text = repr(value) if not isinstance(value, str) else repr(value[:60])
    return text if len(text) <= 80 else f"{text[:80]}…"
