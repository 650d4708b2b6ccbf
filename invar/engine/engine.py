"""The engine: requests in, tokens out, one step at a time.

It belongs to one thread. Whoever shares it between threads hands commands to that thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from invar.backends.runner import Runner, StepResult
from invar.engine import failures
from invar.engine.batch import BatchBuilder
from invar.engine.failures import Failure
from invar.engine.guidance import Guidance
from invar.engine.kv import KVMemory
from invar.engine.kv_use import KVUse, kv_use
from invar.engine.pace import Pace
from invar.engine.policies import POLICIES
from invar.engine.request import EngineOutput, EngineRequest, FinishReason, TokenLogprobs
from invar.engine.results import StepReader
from invar.engine.scheduler import Scheduler
from invar.engine.state import Chunk, RequestState
from invar.engine.stats import EngineStats, stats_of
from invar.engine.stored_prefix import StoredPrefixes
from invar.engine.work import Work
from invar.grammar.compiler import GrammarCompiler

if TYPE_CHECKING:
    from invar.engine.page_store import PageStore

# Of those at work: about what whoever hears them has room for. Naming takes time in every step.
MAX_NAMED = 4096

logger = logging.getLogger("invar.engine")


class Engine:
    """Schedules requests over one runner."""

    def __init__(
        self,
        runner: Runner,
        *,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        policy: str = "fcfs",
        prefix_caching: bool = True,
        store: PageStore | None = None,
        store_salted: bool = False,
        paces_prompts: bool = False,
        grammars: GrammarCompiler | None = None,
        jump_forward: bool = True,
        clock: Callable[[], float] = time.perf_counter,
        poison_freed_pages: bool = False,
    ) -> None:
        """The limits default to the runner's own. prefix_caching: computed prefixes are kept and
        reused. store: on disk too; the engine's from now on. store_salted: also those of requests
        with a `cache_salt`. paces_prompts: rows of prompts beside requests that decode are no more
        than these feel little of, as measured by the clock in seconds. grammars: compiles those of
        requests; None: they may have none. jump_forward: tokens that a grammar forces are not
        drawn one by one, to the same answer. poison_freed_pages: fill them with NaN (tests)."""
        info = runner.info
        self.runner = runner
        self.page_store = store
        prefixes = None
        if store is not None:
            prefixes = StoredPrefixes(store, runner, info.groups, salted=store_salted)
        self.max_model_len = min(max_model_len or info.max_model_len, info.max_model_len)
        chunk = min(max_num_batched_tokens or info.max_tokens_per_step, info.max_tokens_per_step)
        self.memory = KVMemory(
            info,
            max_model_len=self.max_model_len,
            max_chunk=chunk,
            copy_pages=runner.copy_pages,
            caching=prefix_caching,
            prefixes=prefixes,
            on_free=runner.clear_pages if poison_freed_pages else None,
        )
        self.scheduler = Scheduler(
            self.memory,
            POLICIES[policy],
            max_tokens_per_step=chunk,
            max_running=min(max_num_seqs or info.max_sequences, info.max_sequences),
            pace=Pace() if paces_prompts else None,
        )
        self.clock = clock
        # Hears the ids of those that are scheduled, then of those that run, before either begins.
        self.on_step: Callable[[list[str]], None] | None = None
        self.builder = BatchBuilder(info, self.memory)
        self.guidance = Guidance(grammars, info.vocab_size, jumps=jump_forward)
        self.states: dict[str, RequestState] = {}
        self.finished_at_door: dict[str, EngineOutput] = {}
        self.arrivals = 0
        self.steps = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.num_corrupted = 0
        self.started = time.time()
        self.work = Work(runner)

    @property
    def kv_capacity_tokens(self) -> int:
        """Most tokens whose K and V one request can hold when it is alone."""
        return self.memory.capacity_tokens

    @property
    def has_unfinished(self) -> bool:
        return bool(self.states or self.finished_at_door)

    def add_request(self, request: EngineRequest) -> None:
        """Takes a request in. Raises ValueError for one that can never run, or an id in use."""
        self._check(request)
        state = RequestState(request, arrival=self.arrivals)
        self.arrivals += 1
        if ending := ending_of(state):  # resumed after its last token
            reason, stop = ending
            self.finished_at_door[request.id] = EngineOutput(
                request.id, [], finish_reason=reason, stop_reason=stop
            )
            return
        if request.sampling.is_guided:
            self.guidance.begin(state)
        else:
            self.scheduler.add(state)
        self.states[request.id] = state

    def abort(self, request_id: str) -> bool:
        """Forgets a request in any state; no output comes for it. False where it is not known."""
        if self.finished_at_door.pop(request_id, None) is not None:
            return True
        state = self.states.pop(request_id, None)
        if state is None:
            return False
        self._remove(state)
        return True

    def reset_prefix_cache(self) -> bool:
        """Nothing computed so far is reused by a later request; running ones lose nothing. True."""
        self.memory.clear_cache()
        return True

    def step(self) -> list[EngineOutput]:
        """Runs one batch: what it brought, for each request that got a token or ended."""
        began = self.clock()
        outputs = self._open_door()
        chunks = self._schedule()
        for part, result in self._run(chunks):
            outputs += self._postprocess(part, result)
        self.scheduler.took(chunks, self.clock() - began)
        return outputs

    def stats(self) -> EngineStats:
        return stats_of(self)

    def rest(self) -> bool:
        """Asked while nothing is to be computed: measures a limit of the machine that metrics are
        held against, for 20 ms. False when all are known."""
        return self.work.measure_limit()

    def kv_use(self) -> KVUse:
        """What pages are used for now, in bytes."""
        running = self.scheduler.running
        known = [(one.slot, one.num_tokens) for one in running if one.slot is not None]
        return kv_use(self.memory, known)

    def check_integrity(self) -> None:
        """Tests: raises AssertionError unless every page and every request is in one place."""
        self.memory.check_integrity()
        use = self.kv_use()
        assert 0 <= use.unfilled <= use.owned
        assert min(use.saved_by_sharing, use.saved_by_windows) >= 0
        states = [*self.scheduler.states(), *(one for one, _ in self.guidance.compiling.values())]
        assert len(states) == len(set(states)) == len(self.states)
        assert set(states) == set(self.states.values())
        assert {state.slot for state in self.scheduler.running} == set(self.memory.held)
        for state in self.scheduler.running:
            assert state.slot is not None
            holding = self.memory.held[state.slot]
            assert holding.computed == state.num_computed_tokens
            assert np.shares_memory(holding.ids, state.token_ids)
        for state in self.scheduler.waiting:
            assert state.slot is None
            assert state.num_computed_tokens == 0

    def close(self) -> None:
        """Writes what is on its way to disk, and gives all memory back."""
        self.guidance.close()
        if self.page_store is not None:
            self.page_store.close()
        self.runner.close()

    def _open_door(self) -> list[EngineOutput]:
        """What ends before it runs; requests whose grammars are ready go to the scheduler."""
        outputs = list(self.finished_at_door.values())
        self.finished_at_door.clear()
        for state, failure in self.guidance.ready():
            if failure is None:
                state.ending = ending_of(state)
                self.scheduler.add(state)
            else:
                del self.states[state.request.id]
                outputs.append(failure.of(state))
        return outputs

    def _check(self, request: EngineRequest) -> None:
        prompt, tokens = len(request.prompt_token_ids), request.max_tokens
        resumed = 0 if request.output_token_ids is None else len(request.output_token_ids)
        if request.id in self.states or request.id in self.finished_at_door:
            raise ValueError(f"request {request.id}: a request with this id is running")
        if prompt < 1 or tokens < 1 or resumed > tokens:
            raise ValueError(
                f"request {request.id}: {prompt} prompt tokens, at most {tokens} output tokens and "
                f"{resumed} of them given; at least 1, at least 1 and no more than the most allowed"
            )
        if prompt + tokens > self.max_model_len:
            raise ValueError(
                f"request {request.id}: {prompt} prompt tokens and max_tokens {tokens} exceed the "
                f"maximum context length of {self.max_model_len} tokens"
            )
        # The last token is sampled but never written.
        if prompt + tokens - 1 > self.kv_capacity_tokens:
            raise ValueError(
                f"request {request.id}: {prompt} prompt tokens and max_tokens {tokens} exceed what "
                f"KV memory holds for one request ({self.kv_capacity_tokens} tokens)"
            )

    def _schedule(self) -> list[Chunk]:
        self._announce(self.scheduler.states())
        return self.scheduler.schedule()

    def _run(self, chunks: list[Chunk]) -> list[tuple[list[Chunk], StepResult | Exception]]:
        """The step's parts, each with the backend's result or with what it raised.

        All is one part, unless the batch is refused or fails: then each request is tried alone, so
        that only the guilty one fails. A step that runs again writes what it has written.
        """
        if not chunks:
            self.guidance.wait()
            return []
        now = time.monotonic()
        for chunk in chunks:
            if chunk.state.first_scheduled_s is None:
                chunk.state.first_scheduled_s = now
        self.steps += 1
        result = self._submit(chunks)
        if isinstance(result, Exception) and len(chunks) > 1:
            logger.warning("step %d failed; its requests are tried one by one", self.steps)
            return [([chunk], self._submit([chunk])) for chunk in chunks]
        return [(chunks, result)]

    def _announce(self, states: Iterable[RequestState]) -> None:
        """Says whom the engine is at work on, so that its death is blamed on nobody else."""
        if self.on_step is not None:
            self.on_step([state.request.id for state in islice(states, MAX_NAMED)])

    def _submit(self, chunks: list[Chunk]) -> StepResult | Exception:
        began = self.clock()
        self._announce(chunk.state for chunk in chunks)
        try:
            self.guidance.write_masks(chunks)
            batch = self.builder.build(chunks)
            result = self.runner.submit(batch).result()
            self.work.ran(batch, self.clock() - began)
            return result
        except Exception as error:
            logger.exception("step %d failed for %d requests", self.steps, len(chunks))
            return error

    def _postprocess(
        self, chunks: list[Chunk], result: StepResult | Exception
    ) -> list[EngineOutput]:
        if isinstance(result, Exception):
            failure = Failure(f"the step failed: {result}")
            return [self._fail(chunk.state, failure) for chunk in chunks]
        reader = StepReader(result)
        outputs = []
        for sequence, fault in result.faults.items():
            failures.note_fault(chunks[sequence].state, fault)
        for chunk in chunks:
            rows = reader.take_rows(chunk.num_logit_rows)
            if not reader.finite(rows):
                failure = failures.of_row(chunk.state)
                self.num_corrupted += not failure.refused
                outputs.append(self._fail(chunk.state, failure))
            elif output := self._advance(chunk, rows, reader):
                outputs.append(output)
        return outputs

    def _advance(self, chunk: Chunk, rows: range, reader: StepReader) -> EngineOutput | None:
        """Books a chunk that has run; an output when it brought tokens or the answer's end."""
        state = chunk.state
        logprobs = self._book_scores(chunk, rows, reader)
        self.prompt_tokens += max(0, min(chunk.end, state.num_prompt_tokens) - chunk.start)
        computed = chunk.end
        if chunk.samples and not self._draw(state, rows[-1], reader, logprobs):
            computed -= 1  # the last row is run again
        self.scheduler.advance(state, computed)
        if failure := failures.of_guide(state):
            return self._fail(state, failure)
        return self._report(state, logprobs)

    def _book_scores(self, chunk: Chunk, rows: range, reader: StepReader) -> list[TokenLogprobs]:
        """Of the prompt, which are kept; returns those of forced tokens of the output."""
        state, sampling, logprobs = chunk.state, chunk.state.request.sampling, []
        for token, row in zip(chunk.score_rows, rows, strict=False):
            if token < state.num_prompt_tokens - 1:
                state.prompt_logprobs.append(reader.logprobs(row, sampling.prompt_logprobs or 0))
            else:
                logprobs.append(reader.logprobs(row, sampling.logprobs or 0))
        return logprobs

    def _draw(
        self, state: RequestState, row: int, reader: StepReader, logprobs: list[TokenLogprobs]
    ) -> bool:
        """Appends what was drawn and what follows from it; whether the row has done its work."""
        state.was_skipped = reader.skipped(row)
        if state.was_skipped:
            return False
        count = state.request.sampling.logprobs
        token = reader.token_ids[row]
        new = [token] if state.guide is None else state.guide.take(token)
        state.append(new)
        state.num_forced = len(new)
        state.ending = ending_of(state)
        self.generated_tokens += len(new)
        is_kept = new[:1] == [token]
        if is_kept and count is not None:
            logprobs.append(reader.logprobs(row, count))
        return is_kept or (bool(new) and count is None)

    def _report(self, state: RequestState, logprobs: list[TokenLogprobs]) -> EngineOutput | None:
        """What goes out of the tokens that are known: with logprobs, those whose own is known."""
        if state.scores_prompt:  # whose scores go with the first output
            return None
        scores = state.request.sampling.logprobs is not None
        first = state.num_reported
        last = first + len(logprobs) if scores else state.num_output_tokens
        ending = state.ending if last == state.num_output_tokens else None
        if first == last and ending is None:
            return None
        output = EngineOutput(state.request.id, state.output_token_ids[first:last].tolist())
        state.num_reported = last
        if scores:
            output.logprobs = logprobs
        if not state.has_reported:
            self._report_first(state, output)
        if state.num_preemptions:
            output.timing["preemptions"] = state.num_preemptions
        if state.guide is not None and state.guide.steered:
            output.timing["steered"] = 1.0
        if ending is not None:
            output.finish_reason, output.stop_reason = ending
            self._forget(state)
        return output

    def _report_first(self, state: RequestState, output: EngineOutput) -> None:
        """What a request's first output carries and no other."""
        state.has_reported = True
        if state.request.sampling.prompt_logprobs is not None:
            output.prompt_logprobs = state.prompt_logprobs
        assert state.first_scheduled_s is not None
        assert state.num_cached_tokens is not None
        output.cached_tokens = state.num_cached_tokens
        output.timing = {"arrival": state.arrival_s, "first_scheduled": state.first_scheduled_s}

    def _fail(self, state: RequestState, failure: Failure) -> EngineOutput:
        self._forget(state)
        return failure.of(state)

    def _forget(self, state: RequestState) -> None:
        del self.states[state.request.id]
        self._remove(state)

    def _remove(self, state: RequestState) -> None:
        if self.guidance.compiling.pop(state.request.id, None) is None:
            self.scheduler.remove(state)


def ending_of(state: RequestState) -> tuple[FinishReason, int | None] | None:
    """Why the last known token ends the answer, if it does, and the stop token that it is."""
    request, produced, guide = state.request, state.num_output_tokens, state.guide
    last = int(state.token_ids[state.num_tokens - 1])
    # An answer that was led to its end has been cut short.
    by_itself = FinishReason.LENGTH if guide and guide.steered else FinishReason.STOP
    if produced > request.min_tokens and last in request.stop_token_ids:
        return by_itself, last
    if guide is not None and guide.finished:
        return by_itself, None
    return (FinishReason.LENGTH, None) if produced >= request.max_tokens else None
