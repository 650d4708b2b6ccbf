"""The offline API: `LLM`, with vLLM's names and meaning.

It composes the same parts as the server (door, engine, text), in the caller's process.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from invar.config import DEFAULT_MODEL, EngineConfig, check_names
from invar.engine.loader import LoadedModel, load_engine
from invar.engine.request import EngineOutput, EngineRequest, FinishReason, TokenLogprobs
from invar.engine.sampling_params import RequestOutputKind, SamplingParams
from invar.observe.progress import progress_bar
from invar.serving.choice import Choice
from invar.text.chat_template import require_template
from invar.text.output import TextAssembler, TextDelta
from invar.text.tokenizer import Tokenizer

__all__ = [
    "LLM",
    "CompletionOutput",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
]

logger = logging.getLogger("invar")

T = TypeVar("T")
Prompt = str | Mapping[str, Any] | Sequence[int]
Conversation = Sequence[Mapping[str, Any]]
PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")


@dataclass(frozen=True)
class ReadPrompt:
    """A prompt in whatever form it was given."""

    text: str | None
    ids: np.ndarray
    cache_salt: str | None = None


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


class LLM:
    """A model in this process, for one thread at a time: a second one gets a RuntimeError.

    Options are those of `invar.config.EngineConfig`, under vLLM's names.
    """

    def __init__(self, model: str | Path = DEFAULT_MODEL, **options: Any) -> None:
        self._in_use = threading.Lock()
        self._model: LoadedModel | None = load_engine(
            EngineConfig.from_args(model=str(model), **options)
        )
        self._request_ids = itertools.count()
        self._noticed: set[str] = set()  # names that have had their notice

    @property
    def model(self) -> LoadedModel:
        """Raises RuntimeError once closed."""
        if self._model is None:
            raise RuntimeError("this LLM has been closed; make a new one to go on")
        return self._model

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answers every prompt; results are in the order of the prompts.

        A prompt is a text, `{"prompt": text}`, `{"prompt_token_ids": ids}` (either with a
        `cache_salt`) or a list of ids. Raises ValueError, before anything runs, for a prompt or
        parameters that cannot be served, TypeError for what is no prompt and no list of them.
        """
        with self._used():
            read = [self._read(index, prompt) for index, prompt in enumerate(listed(prompts))]
            return self._run(read, sampling_params, priority, use_tqdm, goes_on=True)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers a conversation, or each of a list of them."""
        if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
            raise TypeError(
                "messages: expected a list of messages ({'role': …, 'content': …}), or a list of "
                f"such lists, got {type(messages).__name__}"
            )
        with self._used():
            template = require_template(self.model.chat_template)
            single = not messages or isinstance(messages[0], Mapping)
            conversations: Any = [messages] if single else messages
            options: dict[str, Any] = {
                "add_generation_prompt": add_generation_prompt and not continue_final_message,
                "continue_final_message": continue_final_message,
                "tools": tools,
                **(chat_template_kwargs or {}),
            }
            for name in chat_template_kwargs or ():
                if name not in template.source:
                    self._notice(f"chat_template_kwargs.{name}", "the template does not read it")
            read = []
            for conversation in conversations:
                text, ids = template.encode_with_text(self.model.tokenizer, conversation, **options)
                read.append(ReadPrompt(text, ids))
            return self._run(read, sampling_params, None, use_tqdm, goes_on=continue_final_message)

    def get_tokenizer(self) -> Tokenizer:
        return self.model.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams()

    def close(self) -> None:
        """Gives the model's memory back; a second call does nothing."""
        with self._used():
            if self._model is not None:
                self._model.close()
            self._model = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @contextmanager
    def _used(self) -> Iterator[None]:
        """For one call at a time, which would mix up the answers of another otherwise."""
        if not self._in_use.acquire(blocking=False):
            raise RuntimeError(
                "this LLM is answering another call; give all prompts to one call, or take turns"
            )
        try:
            yield
        finally:
            self._in_use.release()

    def _read(self, index: int, prompt: Prompt) -> ReadPrompt:
        text: object = None
        ids: object = prompt
        salt: object = None
        if isinstance(prompt, Mapping):
            check_names(map(str, prompt), PROMPT_KEYS, f"prompts[{index}]", ValueError)
            ids, text, salt = (
                prompt.get(name) for name in ("prompt_token_ids", "prompt", "cache_salt")
            )
        elif isinstance(prompt, str):
            ids, text = None, prompt
        if ids is None and isinstance(text, str):
            ids = self.model.tokenizer.encode(text)
        if not isinstance(ids, Sequence | np.ndarray) or isinstance(ids, str | bytes):
            raise ValueError(
                f"prompts[{index}]: expected a text, {{'prompt': text}}, "
                f"{{'prompt_token_ids': ids}} or a list of token ids"
            )
        if salt is not None and not (isinstance(salt, str) and salt):
            raise ValueError(f"prompts[{index}]: cache_salt: expected a text, got {salt!r}")
        return ReadPrompt(text if isinstance(text, str) else None, np.asarray(ids), salt)

    def reset_prefix_cache(self) -> bool:
        """Later calls reuse nothing computed so far; answers do not depend on it. True."""
        return self.model.engine.reset_prefix_cache()

    def _run(
        self,
        prompts: Sequence[ReadPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
        use_tqdm: bool,
        *,
        goes_on: bool,
    ) -> list[RequestOutput]:
        """goes_on: the answer goes on with the prompt's text, it does not begin one."""
        if sampling_params is None:
            sampling_params = SamplingParams()
        params = one_each("sampling_params", sampling_params, len(prompts))
        priorities = one_each("priority", 0 if priority is None else priority, len(prompts))
        self._check_options(params, priorities)
        pending = []
        for index, prompt in enumerate(prompts):
            request_id = str(next(self._request_ids))
            try:
                ready = self.model.door.prepare(params[index])
                for warning in ready.warnings:
                    self._notice("SamplingParams.structured_outputs", warning)
                requests = self.model.door.resolve(
                    request_id,
                    prompt.ids,
                    ready,
                    priority=priorities[index],
                    cache_salt=prompt.cache_salt,
                )
            except ValueError as error:
                raise ValueError(f"prompts[{index}]: {error}") from None
            pending.append(
                Pending(request_id, prompt, requests, params[index], self.model.tokenizer, goes_on)
            )
        self._drain(pending, use_tqdm)
        return [one.output for one in pending]

    def _check_options(self, params: Sequence[SamplingParams], priorities: Sequence[int]) -> None:
        """What would do nothing here is refused, or noticed where the answer is the same."""
        for one in params:
            if not isinstance(one, SamplingParams):
                raise ValueError(f"sampling_params: expected SamplingParams, got {one!r:.80}")
            if one.output_kind is RequestOutputKind.DELTA:
                self._notice("SamplingParams.output_kind", "generate and chat return whole answers")
            if one.stream_interval not in (None, 1):
                self._notice(
                    "SamplingParams.stream_interval", "generate and chat return whole answers"
                )
        scheduled = self.model.config.scheduling_policy
        if any(priorities) and scheduled != "priority":
            raise ValueError(
                f"priority: it needs LLM(scheduling_policy='priority'), this is {scheduled!r}"
            )

    def _notice(self, name: str, reason: str) -> None:
        if name not in self._noticed:
            self._noticed.add(name)
            logger.warning("%s has nothing to do here: %s", name, reason)

    def _drain(self, pending: Sequence[Pending], use_tqdm: bool) -> None:
        """Steps until every answer is there; an interruption leaves nothing in the engine."""
        engine = self.model.engine
        owners = {request.id: one for one in pending for request in one.requests}
        with progress_bar(len(pending), use_tqdm) as bar:
            try:
                for one in pending:
                    for request in one.requests:
                        engine.add_request(request)
                while engine.has_unfinished:
                    for output in engine.step():
                        owner = owners[output.request_id]
                        if owner.take(output):
                            engine.abort(output.request_id)
                        if bar is not None and owner.output.finished:
                            bar.advance(tokens=owner.num_tokens)
            finally:
                for request_id in owners:
                    engine.abort(request_id)


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
    tokenizer: Tokenizer, request: EngineRequest, params: SamplingParams, goes_on: bool
) -> TextAssembler | TokensOnly:
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
    )


def listed(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """One prompt or a list of them; a list of integers is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence | np.ndarray) or isinstance(prompts, bytes):
        raise TypeError(
            "prompts: expected a text, {'prompt': text}, {'prompt_token_ids': ids}, a list of "
            f"token ids, or a list of such prompts, got {type(prompts).__name__}"
        )
    if len(prompts) and isinstance(prompts[0], int | np.integer):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


def one_each(name: str, given: T | Sequence[T], count: int) -> Sequence[T]:
    """What holds for all prompts, or one for each."""
    if not isinstance(given, Sequence):
        return [given] * count
    if len(given) != count:
        raise ValueError(f"{name}: {len(given)} given for {count} prompts")
    return given
