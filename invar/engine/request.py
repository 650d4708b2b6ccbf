"""What crosses the door of the engine: requests in, outputs of a step out.

A request is complete when it arrives: token ids, resolved limits, a seed. Nothing that the answer
depends on is decided later (law 1).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from invar.grammar.thoughts import Thoughts


class FinishReason(StrEnum):
    STOP = "stop"  # a stop token, or a stop string found by the text side
    LENGTH = "length"  # max_tokens or the context is full
    ABORT = "abort"  # cancelled by the caller
    ERROR = "error"  # this request failed in the engine (its error text says why)


@dataclass(frozen=True)
class Sampling:
    """Resolved sampling of one choice: every field has its final value."""

    seed: int  # uint64
    choice: int = 0
    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()  # (id, value added to the logit)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_sequences: tuple[tuple[int, ...], ...] = ()  # ids that must not follow each other
    grammar: str | None = None  # normalised form of `StructuredOutputs`
    completes_grammar: bool = True  # near max_tokens it is led to its shortest end
    thoughts: Thoughts | None = None  # before the grammar, or with a budget
    logprobs: int | None = None  # None: none; n: the chosen token and the n highest
    prompt_logprobs: int | None = None

    @property
    def is_guided(self) -> bool:
        return self.grammar is not None or self.thoughts is not None

    @property
    def has_penalty(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
        )


@dataclass(frozen=True)
class EngineRequest:
    """One choice of one request (n > 1 becomes n engine requests)."""

    id: str
    prompt_token_ids: np.ndarray  # int32, at least one
    max_tokens: int  # of output; prompt + max_tokens <= the model length
    sampling: Sampling
    stop_token_ids: frozenset[int] = frozenset()  # end the answer; eos ids are among them
    min_tokens: int = 0  # no stop token before that many
    output_token_ids: np.ndarray | None = None  # int32: already generated (resumed request)
    was_steered: bool = False  # as its outputs have said (resumed request)
    priority: int = 0  # lower runs earlier, where the policy looks at it
    tenant: str | None = None  # whose share it comes out of, where the policy looks at it
    cache_salt: str | None = None  # prefixes are shared only between requests of one salt
    reads_cache: bool = True  # False: every row is computed, whatever is known of the prefix


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position: of the chosen token and of the highest ones."""

    token_id: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass
class EngineOutput:
    """What one step brought for one request."""

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # once, with the first token
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None  # the stop token id that fired
    error: str | None = None
    refused: bool = False  # the error is the request's own: it allows nothing further
    cached_tokens: int | None = None  # of the prompt, found computed; once, with the first token
    # arrival, first_scheduled (monotonic s), and preemptions so far of a request that had some
    timing: dict[str, float] = field(default_factory=dict)
