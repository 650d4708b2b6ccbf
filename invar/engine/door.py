"""The door of the engine: token ids and parameters in, complete engine requests out.

Everything that an answer depends on gets its final value here (law 1): a seed is drawn where none
was given, limits are cut to the context, a prompt that can never fit is refused.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from invar.engine.request import EngineRequest, Sampling
from invar.engine.sampling_params import MIN_TEMPERATURE, SamplingParams, bias_id
from invar.grammar.compiler import CompiledGrammar, GrammarCompiler
from invar.grammar.structured_outputs import StructuredOutputs
from invar.grammar.thoughts import Thoughts

UINT64 = 2**64
SMALLEST_TOP_P = 2.0**-40  # anything less keeps the first token alone, as this does; 0 would be off

TokenIds = npt.NDArray[np.int32]


class SeedSource:
    """Seeds for requests without one: fresh, or in a fixed order where the engine has a seed."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.SystemRandom() if seed is None else random.Random(seed % UINT64)

    def draw(self) -> int:
        return self._random.getrandbits(64)


@dataclass(frozen=True)
class ResolvedParams:
    """Parameters as the model understands them: what is the same for every prompt of a call."""

    params: SamplingParams
    sampling: Sampling  # of the first choice; a seed of its own only if one was given
    stop_token_ids: frozenset[int]
    grammar: CompiledGrammar | None = None

    @property
    def warnings(self) -> tuple[str, ...]:
        """What of the parameters does nothing: keywords of a schema that cannot be enforced."""
        return () if self.grammar is None else self.grammar.warnings


@dataclass(frozen=True)
class Door:
    """What the model and its engine allow, and how a request becomes complete."""

    vocab_size: int
    max_model_len: int
    kv_capacity_tokens: int
    eos_token_ids: frozenset[int]  # end an answer unless ignore_eos
    encode: Callable[[str], TokenIds]  # plain text, without special tokens, for bad_words
    max_logprobs: int = 20
    seeds: SeedSource = field(default_factory=SeedSource)
    grammars: GrammarCompiler | None = None  # None: no request may have one
    leading_space: bool = False  # the tokenizer's words begin with one, so JSON may
    form_defaults: Mapping[str, bool] = field(default_factory=dict)  # of `StructuredOutputs`

    def resolve(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int] | TokenIds,
        params: SamplingParams | ResolvedParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: str | None = None,
        thoughts: Thoughts | None = None,
    ) -> list[EngineRequest]:
        """One engine request per choice, with ids `request_id-0`, `request_id-1` …

        thoughts: how those that may stand before the answer are written; its grammar begins behind
        them, and the budget of the parameters bounds them.

        Raises ValueError naming the field or both lengths.
        """
        ready = self.prepare(params) if isinstance(params, SamplingParams) else params
        params = ready.params
        prompt = self._prompt(prompt_token_ids, params.truncate_prompt_tokens)
        max_tokens = self._max_tokens(len(prompt), params)
        thoughts = self._bounded(thoughts, ready)
        self._check_room(ready, max_tokens, thoughts)
        seed = self.seeds.draw() if params.seed is None else ready.sampling.seed
        first = replace(ready.sampling, seed=seed, thoughts=thoughts)
        # The scores of a prompt are the same for every choice: the first one reports them.
        others = replace(first, prompt_logprobs=None)
        return [
            EngineRequest(
                id=f"{request_id}-{choice}",
                prompt_token_ids=prompt,
                max_tokens=max_tokens,
                sampling=replace(others, choice=choice) if choice else first,
                stop_token_ids=ready.stop_token_ids,
                min_tokens=params.min_tokens,
                priority=priority,
                cache_salt=cache_salt,
                tenant=tenant,
                reads_cache=not params.skip_reading_prefix_cache,
            )
            for choice in range(params.n)
        ]

    def normalised(self, form: StructuredOutputs) -> str:
        """The form's grammar as `GrammarCompiler` takes it. Raises ValueError."""
        try:
            whole = form.with_defaults(self.form_defaults)
            return whole.normalised(leading_space=self.leading_space)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"structured_outputs: {error}") from None

    def prepare(self, params: SamplingParams, grammar: str | None = None) -> ResolvedParams:
        """Once for all prompts of a call: lists may be as long as the vocabulary.

        grammar: the normalised form of the parameters' `structured_outputs`, if it is known.
        """
        params.validate()
        self._check_ids("stop_token_ids", params.stop_token_ids or ())
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        stops = frozenset(params.stop_token_ids or ())
        if not params.ignore_eos:
            stops |= self.eos_token_ids
        sampling = self._sampling(params)
        self._check_remaining(sampling, stops, params.min_tokens)
        ready = ResolvedParams(params, sampling, stops)
        if params.structured_outputs is None:
            return ready
        return self._with_grammar(ready, grammar)

    def _with_grammar(self, ready: ResolvedParams, text: str | None) -> ResolvedParams:
        """Compiles the grammar, which may take seconds; a known one costs nothing."""
        wanted = ready.params.structured_outputs
        if self.grammars is None:
            raise ValueError("structured_outputs: this engine compiles no grammars")
        text = self.normalised(wanted) if text is None else text
        try:
            grammar = self.grammars.check(text)
        except ValueError as error:
            raise ValueError(f"structured_outputs: {error}") from None
        sampling = replace(ready.sampling, grammar=text, completes_grammar=wanted.complete_at_limit)
        ready = replace(ready, sampling=sampling, grammar=grammar)
        if ready.params.max_tokens is not None:
            self._check_room(ready, ready.params.max_tokens)
        return ready

    def _bounded(self, thoughts: Thoughts | None, ready: ResolvedParams) -> Thoughts | None:
        """With the budget of the parameters, which goes before their own; None where nothing
        begins behind them or bounds them."""
        if thoughts is None:
            return None
        asked = ready.params.thinking_token_budget
        if self.grammars is None:
            if asked not in (None, -1):
                raise ValueError(
                    "thinking_token_budget: this engine compiles no grammars, which bound thoughts"
                )
            return None
        if asked is not None:
            thoughts = replace(thoughts, budget=None if asked == -1 else asked)
        return None if ready.grammar is None and thoughts.budget is None else thoughts

    def _check_room(
        self, ready: ResolvedParams, max_tokens: int, thoughts: Thoughts | None = None
    ) -> None:
        """The shortest answer that fits the grammar fits the limit too."""
        if ready.grammar is None or not ready.sampling.completes_grammar:
            return
        closing = 0
        if thoughts is not None and thoughts.have_begun:
            closing = thoughts.longest_closing(ready.grammar.vocabulary.raw)
        fewest = closing + ready.grammar.fewest_tokens(max_tokens - closing)
        if fewest > max_tokens:
            behind = f", {closing} of them to end its thoughts" if closing else ""
            raise ValueError(
                f"max_tokens: {max_tokens} tokens hold no answer of the form that is "
                f"asked for; the shortest one found has {fewest}{behind}"
            )

    def score(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int] | TokenIds,
        logprobs: int | None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: str | None = None,
    ) -> EngineRequest:
        """A request that says how likely a prompt is and answers nothing; the prompt may fill the
        context.

        The engine draws at least one token, so the last one of the prompt is the one it must draw:
        its score is that of the answer. (A prompt of one token has none; what is drawn after it
        means nothing.)
        """
        prompt = self._prompt(prompt_token_ids, None)
        if len(prompt) > self.max_model_len:
            raise ValueError(
                f"This model's maximum context length is {self.max_model_len} tokens. However, "
                f"your prompt has {len(prompt)} tokens. Please shorten the prompt."
            )
        last = (int(prompt[-1]),) if len(prompt) > 1 else None
        before = prompt if last is None else prompt[:-1]
        self._check_memory(len(before))
        logprobs = self._logprobs("logprobs", logprobs)
        return EngineRequest(
            id=request_id,
            prompt_token_ids=before,
            max_tokens=1,
            sampling=Sampling(
                seed=0,
                temperature=0.0,
                allowed_token_ids=last,
                logprobs=logprobs,
                prompt_logprobs=logprobs,
            ),
            priority=priority,
            cache_salt=cache_salt,
            tenant=tenant,
        )

    def _prompt(self, token_ids: Sequence[int] | TokenIds, truncate: int | None) -> TokenIds:
        ids = np.asarray(token_ids)
        if ids.ndim != 1 or (ids.dtype.kind not in "iu" and ids.size):
            raise ValueError("prompt: expected a list of token ids")
        if not ids.size:
            raise ValueError("prompt: it is empty, and the model has no token to begin with")
        wrong = ids[(ids < 0) | (ids >= self.vocab_size)]
        if wrong.size:
            raise ValueError(self._beyond("prompt", int(wrong[0])))
        if truncate is not None:
            # One position stays for the answer.
            longest = min(self.max_model_len - 1, self.kv_capacity_tokens)
            ids = ids[-(longest if truncate == -1 else truncate) :]
        return ids.astype(np.int32)

    def _max_tokens(self, prompt: int, params: SamplingParams) -> int:
        """max_tokens cut to the context; a prompt that leaves no room is refused."""
        if prompt >= self.max_model_len:
            raise ValueError(
                f"This model's maximum context length is {self.max_model_len} tokens. However, "
                f"your prompt has {prompt} tokens, which leaves no room for an answer. "
                f"Please shorten the prompt."
            )
        self._check_memory(prompt)
        # The last token of an answer is sampled but never written to KV memory.
        room = min(self.max_model_len - prompt, self.kv_capacity_tokens - prompt + 1)
        if params.min_tokens > room:
            raise ValueError(
                f"min_tokens: {params.min_tokens} tokens after a prompt of {prompt} do not fit; "
                f"there is room for {room}"
            )
        return room if params.max_tokens is None else min(params.max_tokens, room)

    def _check_memory(self, prompt: int) -> None:
        if prompt > self.kv_capacity_tokens:
            raise ValueError(
                f"KV memory holds {self.kv_capacity_tokens} tokens of one request. However, your "
                f"prompt has {prompt} tokens. Please shorten the prompt, or start the engine with "
                f"more memory (kv_cache_memory_bytes, gpu_memory_utilization)."
            )

    def _sampling(self, params: SamplingParams) -> Sampling:
        """Sampling of the first choice. All share the seed: a draw is keyed by (seed, choice)."""
        temperature = abs(float(params.temperature))  # −0.0 is 0
        if 0 < temperature < MIN_TEMPERATURE:
            temperature = MIN_TEMPERATURE
        greedy = temperature == 0
        allowed = params.allowed_token_ids
        return Sampling(
            seed=0 if params.seed is None else int(params.seed) % UINT64,
            temperature=temperature,
            top_k=0 if greedy else max(0, min(int(params.top_k), self.vocab_size)),
            top_p=1.0 if greedy else max(float(params.top_p), SMALLEST_TOP_P),
            min_p=0.0 if greedy else float(params.min_p),
            repetition_penalty=float(params.repetition_penalty),
            frequency_penalty=float(params.frequency_penalty),
            presence_penalty=float(params.presence_penalty),
            bias=self._bias(params),
            allowed_token_ids=None if allowed is None else tuple(sorted(set(allowed))),
            bad_sequences=self._bad_sequences(params.bad_words or ()),
            logprobs=self._logprobs("logprobs", params.logprobs),
            prompt_logprobs=self._logprobs("prompt_logprobs", params.prompt_logprobs),
        )

    def _check_remaining(self, sampling: Sampling, stops: frozenset[int], min_tokens: int) -> None:
        """Something must be left to draw; no bias forbids a token, however low it is."""
        banned = {bad[0] for bad in sampling.bad_sequences if len(bad) == 1}
        if self._leaves_nothing(sampling, banned):
            raise ValueError("bad_words: they forbid every token that is allowed")
        if min_tokens and self._leaves_nothing(sampling, banned | stops):
            raise ValueError(
                f"min_tokens: every token that is allowed would end the answer, so there is none "
                f"for the first {min_tokens}"
            )

    def _leaves_nothing(self, sampling: Sampling, forbidden: Collection[int]) -> bool:
        if sampling.allowed_token_ids is None:
            return len(forbidden) >= self.vocab_size
        return all(token_id in forbidden for token_id in sampling.allowed_token_ids)

    def _bias(self, params: SamplingParams) -> tuple[tuple[int, float], ...]:
        bias = {bias_id(key): float(value) for key, value in (params.logit_bias or {}).items()}
        self._check_ids("logit_bias", bias)
        return tuple(sorted(bias.items()))

    def _bad_sequences(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as it is written at the start of a text and after a space (as in vLLM)."""
        sequences = set()
        for word in words:
            for spelling in (word.lstrip(), f" {word.lstrip()}"):
                if ids := tuple(self.encode(spelling).tolist()):
                    sequences.add(ids)
        return tuple(sorted(sequences))

    def _logprobs(self, name: str, count: int | None) -> int | None:
        """−1 asks for the whole vocabulary."""
        if count is None:
            return None
        wanted = self.vocab_size if count == -1 else count
        if wanted > self.max_logprobs:
            raise ValueError(
                f"{name}: {wanted} is more than max_logprobs ({self.max_logprobs}); "
                f"start the engine with a larger max_logprobs"
            )
        return wanted

    def _check_ids(self, name: str, token_ids: Collection[int]) -> None:
        largest = max(token_ids, default=0)  # what is below 0 has been refused with the parameters
        if largest >= self.vocab_size:
            raise ValueError(self._beyond(name, largest))

    def _beyond(self, name: str, token_id: int) -> str:
        return f"{name}: token id {token_id} is outside the vocabulary (0 … {self.vocab_size - 1})"
