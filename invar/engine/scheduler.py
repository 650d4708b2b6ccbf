"""Which tokens of which requests run in the next step.

Progress is guaranteed: whoever comes first in the policy's order is never preempted for another
one, takes pages from the last ones until it has its own, and fits alone (checked at the door).
"""

from __future__ import annotations

import math
import time
from bisect import insort
from collections.abc import Iterator, Sequence

from invar._native import common_ids
from invar.backends.runner import PAGE_TOKENS
from invar.engine.kv import KVMemory
from invar.engine.pace import Pace
from invar.engine.policies import FirstComeFirstServed, tokens_found
from invar.engine.state import Chunk, RequestState
from invar.engine.stored_prefix import StoreError

# What a step of decoding requests may be held up by reading pages for others: about what it takes.
FETCH_S = 0.01


class Plan:
    """The step being put together."""

    def __init__(self, tokens: int) -> None:
        self.tokens_left = tokens
        self.fetch_until_s = math.inf  # monotonic; until then pages are read from disk
        self.preempted = False
        self.displaced = False
        self.chunks: dict[RequestState, Chunk] = {}

    def add(self, chunk: Chunk) -> None:
        self.chunks[chunk.state] = chunk
        self.tokens_left -= chunk.end - chunk.start

    def drop(self, state: RequestState) -> None:
        chunk = self.chunks.pop(state, None)
        if chunk is not None:
            self.tokens_left += chunk.end - chunk.start


class Scheduler:
    """Owner of all request states. `waiting` and `running` are kept in the policy's `rank`."""

    def __init__(
        self,
        memory: KVMemory,
        policy: type[FirstComeFirstServed],
        *,
        max_tokens_per_step: int,
        max_running: int,
        pace: Pace | None = None,
    ) -> None:
        """pace: how many rows of prompts run beside requests that decode; None: all there is room
        for"""
        self.memory = memory
        self.policy = policy(memory, max_tokens_per_step)
        self.max_tokens_per_step = max_tokens_per_step
        self.max_running = max_running
        self.pace = pace
        self.waiting: list[RequestState] = []
        self.running: list[RequestState] = []
        self.last_victim: RequestState | None = None
        # The request that found no room, and how many releases of pages there had been.
        self.found_no_room: tuple[RequestState, int] | None = None
        self.num_preemptions = 0
        self.num_queried_tokens = 0  # of prompts, looked up in the cache
        self.num_reused_tokens = 0  # of them, found
        # Tokens of prompts, each request's once, by where their K and V came from.
        self.num_prompt_computed = 0
        self.num_prompt_from_memory = 0
        self.num_prompt_from_store = 0

    def add(self, state: RequestState) -> None:
        self.policy.arrived(state)
        insort(self.waiting, state, key=self.policy.rank)

    def schedule(self) -> list[Chunk]:
        """The chunks of the next step. Empty only when there is no request, or all that run wait
        for their masks."""
        plan = Plan(self.max_tokens_per_step)

        # Those that decode first: they need one row each, and nobody's next token waits on a
        # stranger's prompt.
        able = [state for state in self.running if not state.waits_for_mask]
        reading = [state for state in able if not state.decodes]
        decoding = [state for state in able if state.decodes]
        if decoding:
            plan.fetch_until_s = time.monotonic() + FETCH_S
        for state in decoding:
            if state.slot is not None:  # not preempted by one before it
                self._extend(state, plan)

        if self.pace is not None:
            plan.tokens_left = self.pace.prompt_rows(len(plan.chunks), plan.tokens_left)

        # Then prompts in the policy's order, those in progress and those that wait.
        for state in sorted(reading, key=self.policy.urgency):
            self._admit_before(state, reading, plan)
            if state.slot is not None and state not in plan.chunks:
                self._read_on(state, plan)
        self._admit_before(None, reading, plan)
        return list(plan.chunks.values())

    def took(self, chunks: Sequence[Chunk], seconds: float) -> None:
        """What the step with these chunks took, from one token of a request to its next."""
        if self.pace is not None:
            rows = sum(chunk.end - chunk.start for chunk in chunks)
            decoding = sum(chunk.end - chunk.start == 1 for chunk in chunks)
            self.pace.observe(decoding, rows - decoding, seconds)

    def advance(self, state: RequestState, computed: int) -> None:
        """The request's first `computed` tokens have been run."""
        assert state.slot is not None
        self.policy.ran(state, computed)
        state.num_computed_tokens = computed
        self.memory.advance(state.slot, computed)

    def remove(self, state: RequestState) -> None:
        """Forgets a request in any state: finished, failed or cancelled."""
        self.policy.left(state)
        if state.slot is None:
            self.waiting.remove(state)
            return
        self.running.remove(state)
        self.memory.give_back(state.slot)
        state.slot = None

    def preempt(self, state: RequestState) -> None:
        """Takes a running request's pages. It comes back by recomputation of what the cache lost
        by then, and loses no token."""
        assert state.slot is not None
        self.memory.store(state.slot, all_of_it=True)
        self._set_back(state)
        state.num_preemptions += 1
        self.num_preemptions += 1
        self.last_victim = state

    def _set_back(self, state: RequestState) -> None:
        """A running request waits again."""
        assert state.slot is not None
        self.running.remove(state)
        self.memory.give_back(state.slot)
        state.slot = None
        state.num_computed_tokens = 0
        insort(self.waiting, state, key=self.policy.rank)

    def states(self) -> Iterator[RequestState]:
        yield from self.running
        yield from self.waiting

    def _admit_before(
        self, reading: RequestState | None, all_reading: list[RequestState], plan: Plan
    ) -> None:
        """Admits waiting requests in order while they come before a prompt in progress (None:
        all), and plans their first rows.

        Never around the first: what it needs becomes free in the end.
        """
        while self.waiting and plan.tokens_left:
            state = self.policy.next(self.waiting)
            if reading is not None and self.policy.urgency(reading) < self.policy.urgency(state):
                return
            if self._must_wait(state, all_reading, plan):
                return
            if self._open(state):
                self.waiting.remove(state)
                insort(self.running, state, key=self.policy.rank)
                all_reading.append(state)
                self.policy.admitted(state, self.waiting)
                self._read_on(state, plan)
            elif not self._displace_for(state, plan):
                return

    def _must_wait(self, state: RequestState, reading: list[RequestState], plan: Plan) -> bool:
        # Not beside a preemption, whose victim would come straight back, unless nothing else runs.
        if plan.preempted and plan.chunks:
            return True
        # Pages of strangers in half-used slabs can leave a request short although it fits alone;
        # once that has happened it runs with nobody beside it.
        if self.running and (state.needs_all_memory or self.running[0].needs_all_memory):
            return True
        return self._prefix_is_coming(state, reading)

    def _open(self, state: RequestState) -> bool:
        """Gives a waiting request its slot, with what is computed of it already.

        One that found no room is not tried again before somebody gives up pages: looking costs a
        match of its prompt.
        """
        if len(self.running) >= self.max_running:
            return False
        if self.running and self.found_no_room == (state, self.memory.num_releases):
            return False
        opened = self.memory.open(
            state.token_ids,
            state.num_tokens,
            state.num_reusable,
            state.request.cache_salt,
            alone=state.needs_all_memory,
        )
        if opened is None:
            self.found_no_room = (state, self.memory.num_releases)
            return False
        state.slot, state.num_computed_tokens = opened
        state.num_from_memory = state.num_computed_tokens
        return True

    def _read_on(self, state: RequestState, plan: Plan) -> None:
        if self._fetch(state, plan):
            self._extend(state, plan)

    def _fetch(self, state: RequestState, plan: Plan) -> bool:
        """Reads on what the page store has of a running request; whether all of it is there."""
        assert state.slot is not None
        if not self.memory.is_fetching(state.slot):
            return True
        until_s = plan.fetch_until_s if plan.chunks else math.inf  # a step has something to run
        try:
            state.num_computed_tokens = self.memory.fetch(state.slot, until_s)
        except StoreError:  # what is there without the lost page is found when it comes again
            self._set_back(state)
            return False
        return not self.memory.is_fetching(state.slot)

    def _count_reuse(self, state: RequestState) -> None:
        """Once for each request: what it finds of itself after a preemption is not reuse."""
        state.num_cached_tokens = min(state.num_computed_tokens, state.num_prompt_tokens)
        if self.memory.caching and state.request.reads_cache:
            self.num_queried_tokens += state.num_prompt_tokens
            self.num_reused_tokens += state.num_cached_tokens
        from_memory = min(state.num_from_memory, state.num_prompt_tokens)
        self.num_prompt_from_memory += from_memory
        self.num_prompt_from_store += state.num_cached_tokens - from_memory
        self.num_prompt_computed += state.num_prompt_tokens - state.num_cached_tokens

    def _prefix_is_coming(self, state: RequestState, reading: list[RequestState]) -> bool:
        """Whether one of the prompts in progress that comes before this request is about to compute
        a page of it or more: then it waits for that. (Less is computed twice rather than waited
        for.)"""
        if not self.memory.caching:
            return False
        ids = state.token_ids[: state.num_reusable]
        for other in reading:
            if (
                other.slot is None
                or other.num_remaining < PAGE_TOKENS
                or other.request.cache_salt != state.request.cache_salt
                or self.policy.urgency(other) > self.policy.urgency(state)
            ):
                continue
            common = common_ids(other.token_ids[: other.num_tokens], ids)
            spared = common - other.num_computed_tokens
            if spared >= PAGE_TOKENS and common - tokens_found(self.memory, state) >= PAGE_TOKENS:
                return True
        return False

    def _extend(self, state: RequestState, plan: Plan) -> None:
        """Plans the request's next rows; when pages are short, the last in order give theirs."""
        assert state.slot is not None
        if state.num_cached_tokens is None:
            self._count_reuse(state)
        start = state.num_computed_tokens
        count = min(state.num_remaining, plan.tokens_left)
        if not count:
            return
        while not self.memory.extend(state.slot, start + count):
            plan.preempted = True
            if len(self.running) == 1:
                state.needs_all_memory = True
            # The first in rank yields to nobody.
            victim = self._give_way(self.running[1:] or self.running, plan)
            if victim is state:
                return
        plan.add(Chunk.of(state, start, start + count))

    def _displace_for(self, state: RequestState, plan: Plan) -> bool:
        """Where the policy says so, one that runs gives way to one that found no room: one in a
        step."""
        others = [other for other in self.running if self.policy.displaces(state, other)]
        if plan.displaced or not others:
            return False
        plan.displaced = True
        self._give_way(others, plan)
        return True

    def _give_way(self, states: list[RequestState], plan: Plan) -> RequestState:
        """Preempts the last in the policy's order, but not the last victim once more while another
        one can yield."""
        victim = max(
            [state for state in states if state is not self.last_victim] or states,
            key=self.policy.urgency,
        )
        plan.drop(victim)
        self.preempt(victim)
        return victim
