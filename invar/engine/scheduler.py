"""Which tokens of which requests run in the next step.

Progress is guaranteed: whoever comes first in the policy's order is never preempted for another
one, takes pages from the last ones until it has its own, and fits alone (checked at the door).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from typing import Protocol

from invar.engine.kv import KVMemory
from invar.engine.state import Chunk, RequestState


class Policy(Protocol):
    """An order of requests: the first one runs first, the last one is the victim."""

    def key(self, state: RequestState) -> tuple[int, ...]: ...


class FirstComeFirstServed:
    def key(self, state: RequestState) -> tuple[int, ...]:
        return (state.arrival,)


class ByPriority:
    """Lower values first, then age."""

    def key(self, state: RequestState) -> tuple[int, ...]:
        return (state.request.priority, state.arrival)


POLICIES: dict[str, type[Policy]] = {"fcfs": FirstComeFirstServed, "priority": ByPriority}


class Plan:
    """The step being put together."""

    def __init__(self, tokens: int) -> None:
        self.tokens_left = tokens
        self.preempted = False
        self.chunks: dict[RequestState, Chunk] = {}

    def add(self, chunk: Chunk) -> None:
        self.chunks[chunk.state] = chunk
        self.tokens_left -= chunk.end - chunk.start

    def drop(self, state: RequestState) -> None:
        chunk = self.chunks.pop(state, None)
        if chunk is not None:
            self.tokens_left += chunk.end - chunk.start


class Scheduler:
    """Owner of all request states. `waiting` and `running` are kept in the policy's order."""

    def __init__(
        self,
        memory: KVMemory,
        policy: Policy,
        *,
        max_tokens_per_step: int,
        max_running: int,
    ) -> None:
        self.memory = memory
        self.policy = policy
        self.max_tokens_per_step = max_tokens_per_step
        self.max_running = max_running
        self.waiting: list[RequestState] = []
        self.running: list[RequestState] = []
        self.num_preemptions = 0

    def add(self, state: RequestState) -> None:
        insort(self.waiting, state, key=self.policy.key)

    def schedule(self) -> list[Chunk]:
        """The chunks of the next step. Empty only when there is no request."""
        plan = Plan(self.max_tokens_per_step)

        # Running requests first. Those that decode need one row each and come before prompts in
        # progress, so that nobody's next token waits on a stranger's prompt.
        for state in sorted(self.running, key=lambda state: state.num_remaining > 1):
            if state.slot is not None:  # not preempted by one before it
                self._extend(state, plan)

        # Then waiting ones in order, never around the first: what it needs becomes free in the end.
        # Not beside a preemption, whose victim would come straight back.
        while not plan.preempted and self._can_admit(plan):
            state = self.waiting[0]
            state.slot = self.memory.open(state.num_tokens)
            if state.slot is None:
                break
            insort(self.running, self.waiting.pop(0), key=self.policy.key)
            self._extend(state, plan)
        return list(plan.chunks.values())

    def remove(self, state: RequestState) -> None:
        """Forgets a request in any state: finished, failed or cancelled."""
        if state.slot is None:
            self.waiting.remove(state)
            return
        self.running.remove(state)
        self.memory.give_back(state.slot)
        state.slot = None

    def preempt(self, state: RequestState) -> None:
        """Takes a running request's pages. It comes back by recomputation and loses no token."""
        assert state.slot is not None
        self.running.remove(state)
        self.memory.give_back(state.slot)
        state.slot = None
        state.num_computed_tokens = 0
        state.num_preemptions += 1
        self.num_preemptions += 1
        insort(self.waiting, state, key=self.policy.key)

    def states(self) -> Iterator[RequestState]:
        yield from self.running
        yield from self.waiting

    def _can_admit(self, plan: Plan) -> bool:
        if not self.waiting or len(self.running) >= self.max_running or not plan.tokens_left:
            return False
        # Pages of strangers in half-used slabs can leave a request short although it fits alone;
        # once that has happened it runs with nobody beside it.
        return not self.running or not (
            self.waiting[0].needs_all_memory or self.running[0].needs_all_memory
        )

    def _extend(self, state: RequestState, plan: Plan) -> None:
        """Plans the request's next rows; when pages are short, the last in order give theirs."""
        assert state.slot is not None
        start = state.num_computed_tokens
        count = min(state.num_remaining, plan.tokens_left)
        if not count:
            return
        while not self.memory.extend(state.slot, start, start + count):
            victim = self.running[-1]
            plan.drop(victim)
            plan.preempted = True
            if len(self.running) == 1:
                victim.needs_all_memory = True
            self.preempt(victim)
            if victim is state:
                return
        plan.add(Chunk.of(state, start, start + count))
