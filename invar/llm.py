"""The offline API: `LLM`, with vLLM's names and meaning.

It composes the same parts as the server (door, engine, text), in the caller's process.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from invar.config import DEFAULT_MODEL, EngineConfig, check_names
from invar.engine.door import ResolvedParams
from invar.engine.loader import LoadedModel, load_engine
from invar.engine.sampling_params import RequestOutputKind, SamplingParams
from invar.grammar.thoughts import Thoughts
from invar.observe.progress import progress_bar
from invar.outputs import (
    CompletionOutput,
    Logprob,
    Pending,
    ReadPrompt,
    RequestMetrics,
    RequestOutput,
)
from invar.text.chat_template import require_template
from invar.text.reply_detection import wants_thoughts
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
        """Answers a conversation, or each of a list of them. tools: as in chat completions; what
        the template has no place for is told in words. Calls stand in the answer's text, in the
        model's own form."""
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
                **(chat_template_kwargs or {}),
            }
            for name in chat_template_kwargs or ():
                if name not in template.source:
                    self._notice(f"chat_template_kwargs.{name}", "the template does not read it")
            read = []
            for conversation in conversations:
                told, options["tools"] = self._fitted(conversation, tools)
                text, ids = template.encode_with_text(self.model.tokenizer, told, **options)
                continued = final_text(conversation) if continue_final_message else ""
                thinks = wants_thoughts(chat_template_kwargs or {})
                read.append(ReadPrompt(text, ids, None, True, continued, thinks))
            return self._run(read, sampling_params, None, use_tqdm, goes_on=continue_final_message)

    def _fitted(
        self, conversation: Conversation, tools: Sequence[Mapping[str, Any]] | None
    ) -> tuple[Conversation, Sequence[Mapping[str, Any]] | None]:
        """Messages and tools as the template can show them."""
        told = any(one.get("tool_calls") or one.get("role") == "tool" for one in conversation)
        replies = self.model.replies if tools or told else None
        return (
            (conversation, tools)
            if replies is None
            else replies.prompt.fitted(conversation, tools or ())
        )

    def get_tokenizer(self) -> Tokenizer:
        return self.model.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What a call without `sampling_params` uses: the model's own, as `generation_config` and
        `override_generation_config` have it."""
        return self.model.defaults.params()

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
            sampling_params = self.get_default_sampling_params()
        params = one_each("sampling_params", sampling_params, len(prompts))
        priorities = one_each("priority", 0 if priority is None else priority, len(prompts))
        self._check_options(params, priorities)
        pending = []
        prepared: dict[int, ResolvedParams] = {}  # by id: most prompts share their parameters
        for index, prompt in enumerate(prompts):
            request_id = str(next(self._request_ids))
            try:
                ready = prepared.get(id(params[index]))
                if ready is None:
                    ready = prepared[id(params[index])] = self._prepare(params[index])
                requests = self.model.door.resolve(
                    request_id,
                    prompt.ids,
                    ready,
                    priority=priorities[index],
                    cache_salt=prompt.cache_salt,
                    thoughts=self._thoughts(prompt, ready),
                )
            except ValueError as error:
                raise ValueError(f"prompts[{index}]: {error}") from None
            pending.append(
                Pending(request_id, prompt, requests, params[index], self.model.tokenizer, goes_on)
            )
        self._drain(pending, use_tqdm)
        return [one.output for one in pending]

    def _thoughts(self, prompt: ReadPrompt, ready: ResolvedParams) -> Thoughts | None:
        """Those that may stand before an answer with a form, or that have a budget. A text that is
        gone on with has some where somebody bounds them."""
        is_bounded = ready.params.thinking_token_budget is not None
        if not is_bounded and not (prompt.is_chat and ready.grammar is not None):
            return None
        replies = self.model.replies
        thoughts = None
        if replies is not None:
            text = self.model.tokenizer.decode_end(prompt.ids)
            thoughts = replies.thoughts(text, continued=prompt.continued, thinks=prompt.thinks)
        if thoughts is None and is_bounded and (replies is None or not replies.has_reasoning):
            self._notice("SamplingParams.thinking_token_budget", "this model does not think")
        return thoughts

    def _prepare(self, params: SamplingParams) -> ResolvedParams:
        ready = self.model.door.prepare(params)
        for warning in ready.warnings:
            self._notice("SamplingParams.structured_outputs", warning)
        return ready

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


def final_text(conversation: Conversation) -> str:
    """The message that an answer goes on with."""
    content = conversation[-1].get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or "" for part in content)


def one_each(name: str, given: T | Sequence[T], count: int) -> Sequence[T]:
    """What holds for all prompts, or one for each."""
    if not isinstance(given, Sequence):
        return [given] * count
    if len(given) != count:
        raise ValueError(f"{name}: {len(given)} given for {count} prompts")
    return given
