"""Answers of the offline API: records with vLLM's names, filled from what the engine reports."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from invar.engine.request import EngineOutput, EngineRequest, FinishReason, TokenLogprobs
from invar.engine.sampling_params import SamplingParams
from invar.serving.choice import Choice
from invar.text.output import TextAssembler, TextDelta
from invar.text.tokenizer import Tokenizer

logger = logging.getLogger("invar")


@dataclass(frozen=True)
class ReadPrompt:
    """A prompt in whatever form it was given."""

    text: str | None
    ids: np.ndarray
    cache_salt: str | None = None
    is_chat: bool = False
    continued: str = ""  # the message that the answer goes on with
    thinks: bool = True  # thoughts have not been switched off


@dataclass(frozen=True)
class Logprob:
    logprob: float
    rank: int | None  # 1 = the most likely
    decoded_token: str | None


@dataclass
class CompletionOutput:
    """One choice."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None  # where logprobs were asked for
    logprobs: list[dict[int, Logprob]] | None = None  # per token: it, then the highest ones
    finish_reason: str | None = None  # "stop", "length" or "error"
    stop_reason: int | str | None = None  # the stop string or stop token id that was asked for
    error: str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestMetrics:
    """Monotonic seconds."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None


@dataclass
class RequestOutput:
    """The answer to one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = 0
    num_truncated_tokens: int = 0  # left out at the prompt's start (truncate_prompt_tokens)


class Pending:
    """A prompt whose answer is being computed."""

    def __init__(
        self,
        request_id: str,
        prompt: ReadPrompt,
        requests: Sequence[EngineRequest],
        params: SamplingParams,
        tokenizer: Tokenizer,
        goes_on: bool,
    ) -> None:
        self.requests = requests
        self.tokenizer = tokenizer
        self.logprobs = params.logprobs is not None
        named = frozenset(params.stop_token_ids or ())
        self.choices = {
            request.id: Choice(index, assembler(tokenizer, request, params, goes_on), named)
            for index, request in enumerate(requests)
        }
        self.found: list[int] = []  # tokens of the prompt that were computed, per choice
        kept = requests[0].prompt_token_ids
        self.output = RequestOutput(
            request_id=request_id,
            prompt=prompt.text,
            prompt_token_ids=kept.tolist(),
            prompt_logprobs=None,
            outputs=[CompletionOutput(index) for index in range(len(requests))],
            finished=False,
            metrics=RequestMetrics(arrival_time=time.monotonic()),
            num_truncated_tokens=len(prompt.ids) - len(kept),
        )

    @property
    def num_tokens(self) -> int:
        return sum(len(completion.token_ids) for completion in self.output.outputs)

    def take(self, output: EngineOutput) -> bool:
        """Books what a step brought; whether the engine must be told to stop this choice."""
        delta, stop_engine = self.choices[output.request_id].take(output)
        completion = self.output.outputs[delta.index]
        completion.text += delta.text
        completion.token_ids += delta.token_ids
        if self.logprobs:
            self._add_logprobs(completion, delta.logprobs)
        if delta.prompt_logprobs is not None:
            self.output.prompt_logprobs = [
                None if one is None else self._alternatives(one) for one in delta.prompt_logprobs
            ]
        self._add_times(output)
        self._add_cached(output.cached_tokens)
        if delta.finish_reason is not None:
            completion.finish_reason = str(delta.finish_reason)
            completion.stop_reason = delta.stop_reason
            completion.error = delta.error
            if delta.finish_reason is FinishReason.ERROR:
                logger.error("request %s failed: %s", self.output.request_id, delta.error)
            self.output.finished = all(one.finished() for one in self.output.outputs)
            self.output.metrics.finished_time = time.monotonic()
        return stop_engine

    def _add_logprobs(
        self, completion: CompletionOutput, logprobs: Iterable[TokenLogprobs]
    ) -> None:
        completion.logprobs = completion.logprobs or []
        completion.cumulative_logprob = completion.cumulative_logprob or 0.0
        for one in logprobs:
            completion.logprobs.append(self._alternatives(one))
            completion.cumulative_logprob += one.logprob

    def _alternatives(self, one: TokenLogprobs) -> dict[int, Logprob]:
        text = self.tokenizer.token_text
        position = {one.token_id: Logprob(one.logprob, one.rank, text(one.token_id))}
        for rank, (token_id, logprob) in enumerate(
            zip(one.top_ids, one.top_logprobs, strict=True), start=1
        ):
            position.setdefault(token_id, Logprob(logprob, rank, text(token_id)))
        return position

    def _add_cached(self, found: int | None) -> None:
        """Choices reuse what the first one computed; what counts is what that one found."""
        if found is not None:
            self.found.append(found)
            self.output.num_cached_tokens = min(self.found)

    def _add_times(self, output: EngineOutput) -> None:
        metrics = self.output.metrics
        if metrics.first_token_time is None and output.token_ids:
            metrics.first_token_time = time.monotonic()
            metrics.first_scheduled_time = output.timing.get("first_scheduled")


class TokensOnly:
    """In place of a `TextAssembler` where no text is wanted (detokenize=False)."""

    def push(self, token_ids: list[int]) -> TextDelta:
        return TextDelta("", False, None, len(token_ids), [0] * len(token_ids))

    def finish(self) -> TextDelta:
        return TextDelta("", True, None, 0)


def assembler(
    tokenizer: Tokenizer,
    request: EngineRequest,
    params: SamplingParams,
    goes_on: bool,
    shown_ids: Collection[int] = (),
) -> TextAssembler | TokensOnly:
    """Of one choice. goes_on: its text goes on with the prompt's, it does not begin one.
    shown_ids: control tokens that whoever reads the text needs to see."""
    if not params.detokenize:
        return TokensOnly()
    return TextAssembler(
        tokenizer,
        stop=params.stop_strings,
        stop_token_ids=request.stop_token_ids,
        include_stop_str_in_output=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
        min_tokens=params.min_tokens,
        at_start=not goes_on,
        shown_ids=shown_ids,
    )
