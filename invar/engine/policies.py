"""In which order requests get their turn, and who gives way to whom.

| policy   | whose turn it is                               | who gives way                     |
|----------|------------------------------------------------|-----------------------------------|
| fcfs     | the oldest's                                   | the youngest                      |
| priority | the lowest value's, then the oldest's          | the highest value's youngest      |
| lpm      | of the oldest ones the longest cached prefix's | the youngest                      |
| fair     | that of the tenant who was served least        | the most served tenant's youngest |

Under every policy the first one in `rank` among those that run yields to nobody, so that it ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

from invar.engine.kv import KVMemory
from invar.engine.state import RequestState

# Under `lpm`: a request that others passed this often is next, whatever is cached of it.
MAX_PASSED_OVER = 16
# So many prompts are looked up for one turn, at about 5 µs each.
LOOK_AHEAD = 32

# Under `fair`: what a token of output costs, in tokens of a prompt. Sheng et al., "Fairness in
# Serving Large Language Models" (OSDI 2024), section 5.1.
OUTPUT_COST = 2

Order = tuple[int, ...]


class FirstComeFirstServed:
    """Every policy's hooks, and what they do unless one says otherwise."""

    def __init__(self, memory: KVMemory, max_tokens_per_step: int) -> None:
        self.memory = memory
        self.max_tokens_per_step = max_tokens_per_step

    def rank(self, state: RequestState) -> Order:
        """Never changes: `waiting` and `running` are kept in this order."""
        return (state.arrival,)

    def urgency(self, state: RequestState) -> Order:
        """Now: prompts get their rows in this order, and the last one gives way."""
        return self.rank(state)

    def next(self, waiting: Sequence[RequestState]) -> RequestState:
        """Whose turn it is to be admitted. Nobody is admitted around it."""
        return waiting[0]

    def displaces(self, waiting: RequestState, running: RequestState) -> bool:
        """Whether one that finds no room takes it from one that runs.

        Who runs must have got on since it was admitted; if it had lost what was computed before, by
        more than that and up to its next token. Then at least half of what is computed is new, and
        whoever is displaced again and again ends all the same.
        """
        return False

    def arrived(self, state: RequestState) -> None: ...

    def admitted(self, state: RequestState, waiting: Sequence[RequestState]) -> None: ...

    def ran(self, state: RequestState, computed: int) -> None:
        """The request's first `computed` tokens are computed now."""

    def left(self, state: RequestState) -> None: ...


class ByPriority(FirstComeFirstServed):
    """Lower values first, then age."""

    def rank(self, state: RequestState) -> Order:
        return (state.request.priority, state.arrival)


class LongestPrefixMatch(FirstComeFirstServed):
    """Of the `LOOK_AHEAD` oldest ones, who finds most of its prompt computed."""

    def next(self, waiting: Sequence[RequestState]) -> RequestState:
        if waiting[0].num_passed_over >= MAX_PASSED_OVER:
            return waiting[0]
        return max(waiting[:LOOK_AHEAD], key=partial(tokens_found, self.memory))

    def admitted(self, state: RequestState, waiting: Sequence[RequestState]) -> None:
        for other in waiting[:LOOK_AHEAD]:
            other.num_passed_over += other.arrival < state.arrival


class FairShares(FirstComeFirstServed):
    """Virtual token counters: every tenant's tokens are counted, and who has had least is next.

    Who comes back to a busy engine does not make up for the time when it asked for nothing: its
    counter is lifted to the least of those who have requests here. While it finds no room, others
    get at most a step's tokens ahead of it before one of theirs gives way, once that one has what
    it lost the last time it did. (The same paper, algorithm 2; displacing is ours.)
    """

    def __init__(self, memory: KVMemory, max_tokens_per_step: int) -> None:
        super().__init__(memory, max_tokens_per_step)
        self.served: dict[str | None, int] = {}  # tenant → its counter
        self.live: Counter[str | None] = Counter()  # tenant → its requests here
        self.level = 0  # the least counter of those with requests here; only rises

    def urgency(self, state: RequestState) -> Order:
        return (self.served[state.request.tenant], state.arrival)

    def next(self, waiting: Sequence[RequestState]) -> RequestState:
        return min(waiting, key=self.urgency)

    def displaces(self, waiting: RequestState, running: RequestState) -> bool:
        ahead = self.served[running.request.tenant] - self.served[waiting.request.tenant]
        got_on = running.num_charged_tokens > running.yields_after_tokens
        return got_on and ahead >= self.max_tokens_per_step

    def arrived(self, state: RequestState) -> None:
        tenant = state.request.tenant
        if not self.live[tenant]:
            del self.live[tenant]
            self._raise_level()
            self.served[tenant] = max(self.served.get(tenant, 0), self.level)
        self.live[tenant] += 1

    def admitted(self, state: RequestState, waiting: Sequence[RequestState]) -> None:
        charged = state.num_charged_tokens
        lost = charged - state.num_computed_tokens
        state.yields_after_tokens = (
            max(charged + lost, state.num_tokens - 1) if lost > 0 else charged
        )

    def ran(self, state: RequestState, computed: int) -> None:
        """Costs what was run; nothing what was found, or is computed again after a preemption."""
        prompt = state.num_prompt_tokens
        charged = max(state.num_charged_tokens, state.num_computed_tokens)
        if computed > charged:
            output = max(computed, prompt) - max(charged, prompt)
            cost = computed - charged + (OUTPUT_COST - 1) * output
            self.served[state.request.tenant] += cost
            state.num_charged_tokens = computed

    def left(self, state: RequestState) -> None:
        tenant = state.request.tenant
        self.live[tenant] -= 1
        if self.live[tenant]:
            return
        del self.live[tenant]
        if not self.live:
            self.level = max(self.level, self.served[tenant])
        self._raise_level()
        # Whoever is not here and not above the level would be lifted to it.
        self.served = {
            name: count
            for name, count in self.served.items()
            if name in self.live or count > self.level
        }

    def _raise_level(self) -> None:
        if self.live:
            self.level = max(self.level, min(self.served[tenant] for tenant in self.live))


def tokens_found(memory: KVMemory, state: RequestState) -> int:
    """Tokens of a waiting request that are computed already."""
    return memory.match(state.token_ids, state.num_reusable, state.request.cache_salt).tokens


POLICIES: dict[str, type[FirstComeFirstServed]] = {
    "fcfs": FirstComeFirstServed,
    "priority": ByPriority,
    "lpm": LongestPrefixMatch,
    "fair": FairShares,
}
