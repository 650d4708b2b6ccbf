"""A request inside the engine, and its rows in one step.

Tokens of a request, with P prompt tokens, C computed ones and N known ones (prompt and output):

| tokens     | meaning                                                              |
|------------|----------------------------------------------------------------------|
| ``[0, C)`` | K and V are in the request's pages                                   |
| ``[C, N)`` | known, still to be run: the prompt, after preemption also the output |
| ``[N, ∞)`` | not sampled yet; the row of token ``N - 1`` samples token N          |

A row of token t says how likely token ``t + 1`` is: rows ``[0, P - 1)`` score the prompt.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from invar.engine.constraints import Constraints
from invar.engine.request import EngineRequest, FinishReason, TokenLogprobs
from invar.grammar.guide import Guide


@dataclass(eq=False)
class RequestState:
    """Owned by the scheduler; only the engine's thread touches it."""

    request: EngineRequest
    arrival: int  # counts up; what "older" means
    arrival_s: float = field(default_factory=time.monotonic)
    first_scheduled_s: float | None = None
    slot: int | None = None  # row of block tables and sampling table while it is running
    num_computed_tokens: int = 0
    num_cached_tokens: int | None = None  # of the prompt, found computed; None: not run yet
    num_from_memory: int = 0  # of its tokens, found in memory when it was admitted
    num_preemptions: int = 0
    num_passed_over: int = 0  # younger ones that were admitted while it waited (lpm)
    num_charged_tokens: int = 0  # of its own that its tenant's counter has (fair)
    yields_after_tokens: int = 0  # charged ones, before it may be displaced once more (fair)
    needs_all_memory: bool = False  # was short of pages with nobody beside it
    has_reported: bool = False  # the first output has gone out
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=lambda: [None])
    fault: str | None = None  # where its first NaN came from, if the runner can tell
    constraints: Constraints | None = None  # laid out at the first draw that needs them
    guide: Guide | None = None  # through its thoughts and its grammar, if it has any
    num_forced: int = 0  # tokens after the last drawn one that the grammar forced
    num_reported: int = 0  # tokens of the output that have gone out
    was_skipped: bool = False  # its mask was not ready when it was to draw
    ending: tuple[FinishReason, int | None] | None = None  # why it draws no more, and the stop id

    def __post_init__(self) -> None:
        sampling = self.request.sampling
        # Whether a draw needs more than the numbers in the slot table.
        self.draws_specially = bool(
            sampling.has_penalty
            or sampling.bias
            or sampling.bad_sequences
            or sampling.allowed_token_ids is not None
            or self.request.min_tokens
            or sampling.is_guided
        )
        prompt = self.request.prompt_token_ids
        resumed = self.request.output_token_ids
        self.num_prompt_tokens = len(prompt)
        self.num_tokens = len(prompt) + (0 if resumed is None else len(resumed))
        self.token_ids = np.empty(len(prompt) + self.request.max_tokens, np.int32)
        self.token_ids[: len(prompt)] = prompt
        if resumed is not None:
            self.token_ids[len(prompt) : self.num_tokens] = resumed
            self.num_reported = len(resumed)

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> np.ndarray:
        """int32 view: what has been generated, before a resumption too."""
        return self.token_ids[self.num_prompt_tokens : self.num_tokens]

    @property
    def num_remaining(self) -> int:
        """Known tokens that are still to be run; 1 while decoding."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def decodes(self) -> bool:
        """Its rows are those of its last token and of what was forced after it."""
        return self.num_remaining <= 1 + self.num_forced

    @property
    def waits_for_mask(self) -> bool:
        """A row of it has run in vain: no other does before the mask is there."""
        return self.was_skipped and self.guide is not None and not self.guide.is_ready

    @property
    def first_unscored_row(self) -> int:
        """Of the rows that say how likely the next token is, the first one that is wanted and has
        not run; the last row draws in any case."""
        if self.scores_prompt:
            return self.num_scored
        if self.request.sampling.logprobs is not None:
            return min(self.num_tokens, self.num_prompt_tokens + self.num_reported) - 1
        return self.num_tokens - 1

    @property
    def scores_prompt(self) -> bool:
        """Whether rows of the prompt still need logits. What was scored stays after preemption."""
        wanted = self.request.sampling.prompt_logprobs is not None
        return wanted and self.num_scored < self.num_prompt_tokens - 1

    @property
    def num_scored(self) -> int:
        """Rows of the prompt whose score is known. Nothing says how likely token 0 was."""
        return len(self.prompt_logprobs) - 1

    @property
    def num_reusable(self) -> int:
        """Most tokens that need no row of this request: the last one's row draws, and a row that
        scores the prompt has to be run."""
        if not self.request.reads_cache:
            return 0
        return self.first_unscored_row

    def append(self, token_ids: Sequence[int]) -> None:
        end = self.num_tokens + len(token_ids)
        self.token_ids[self.num_tokens : end] = token_ids
        self.num_tokens = end


@dataclass(frozen=True)
class Chunk:
    """Rows of one request in a step: its tokens ``[start, end)``."""

    state: RequestState
    start: int
    end: int
    score_rows: range  # tokens whose rows score the next token of the prompt
    samples: bool  # the last row is that of the last known token: a new one is drawn
    num_logit_rows: int

    @classmethod
    def of(cls, state: RequestState, start: int, end: int) -> Chunk:
        first = max(start, state.first_unscored_row)
        last = state.num_tokens - 1
        if state.request.sampling.logprobs is None:
            last = min(last, state.num_prompt_tokens - 1)
        scored = range(first, max(first, min(end, last)))
        samples = end == state.num_tokens and state.ending is None
        return cls(state, start, end, scored, samples, len(scored) + samples)
