"""The engine as the event loop sees it: submit a call, iterate over what comes, cancel."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from invar.engine.request import EngineOutput, EngineRequest, FinishReason
from invar.observe.metrics import Metrics
from invar.observe.requests import RequestRecord, current_record
from invar.serving.choice import Assembler, Choice, ChoiceDelta
from invar.serving.messages import (
    Abort,
    Add,
    EngineDown,
    EnginePort,
    EngineUp,
    Event,
    ResetCache,
    Resume,
    StepReport,
)

EngineStatus = Literal["loading", "ready", "restarting", "dead"]


class EngineDeadError(RuntimeError):
    """The engine has ended; nothing can be generated any more."""


@dataclass(frozen=True)
class ChoiceRequest:
    """One choice of a call: what the engine computes and who turns it into text."""

    request: EngineRequest
    assembler: Assembler
    named_stop_ids: frozenset[int] = frozenset()


@dataclass(slots=True)
class _Live:
    """An engine request in flight and the clock of its tokens (monotonic seconds)."""

    generation: Generation
    choice: Choice
    request: EngineRequest
    record: RequestRecord | None  # of the HTTP request that it is part of
    arrival: float
    received: list[int] = field(default_factory=list)  # from the engine, with what is not shown
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    steered: bool = False  # by its grammar, to an end before max_tokens

    def resumed(self) -> EngineRequest:
        """The same request for another engine, which goes on after the last token received.

        It stays the same request (law 1): limits, penalties and draws count from the end of its
        prompt. Scores of the prompt came with the first token.
        """
        if not self.received:
            return self.request
        return dataclasses.replace(
            self.request,
            output_token_ids=np.array(self.received, np.int32),
            was_steered=self.steered,
            sampling=dataclasses.replace(self.request.sampling, prompt_logprobs=None),
        )


@dataclass(slots=True)
class _StepNews:
    """What a report brought, added up: the rest of a step's work is done once for all streams."""

    now: float  # monotonic seconds
    tokens: int = 0
    gaps: dict[float, int] = field(default_factory=dict)  # seconds → tokens that came after it
    generations: dict[Generation, None] = field(default_factory=dict)  # in their order


@dataclass(eq=False, slots=True)
class Generation:
    """The answer to one call, all its choices together.

    Iterating gives lists of deltas, at most one per choice: whatever has come since the last look.
    The caller must ``cancel()`` when it stops before the end; cancelling twice does nothing.

    While the iterator waits, news go to ``direct`` first, where there is one: if that says True,
    they are dealt with and the iterator's task sleeps on. It must not raise.
    """

    id: str  # unique in this process and, by its random part, beyond it
    _engine: AsyncEngine
    _unfinished: set[str] = field(default_factory=set)
    _pending: dict[int, ChoiceDelta] = field(default_factory=dict)
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    direct: Callable[[list[ChoiceDelta]], bool] | None = None
    _waiting: bool = False  # the iterator, for news
    _open: int = 0  # choices that have not ended
    _longest: int = 0  # tokens of one that has

    @property
    def finished(self) -> bool:
        """Nothing more will come, though some may wait to be read."""
        return not self._unfinished

    @property
    def unread_bytes(self) -> int:
        """Of what waits to be read: text, and about what tokens and logprobs take as JSON."""
        return sum(len(delta.text) + 64 * delta.items for delta in self._pending.values())

    async def __aiter__(self) -> AsyncIterator[list[ChoiceDelta]]:
        try:
            while self._pending or self._unfinished:
                self._waiting = not self._pending
                await self._news.wait()
                self._waiting = False
                self._news.clear()
                deltas = self._in_order()
                self._pending.clear()
                if deltas:
                    yield deltas
        finally:
            self.cancel()

    def cancel(self) -> None:
        if self._unfinished:
            self._engine.abort(self._unfinished)
            self._unfinished = set()
            self._news.set()

    def put(self, request_id: str, delta: ChoiceDelta) -> None:
        if delta.index in self._pending:
            self._pending[delta.index].extend(delta)
        else:
            self._pending[delta.index] = delta
        if delta.finish_reason is not None:
            self._unfinished.discard(request_id)

    def tell(self) -> None:
        """What was put is all for now."""
        if self._waiting and self.direct is not None and self.direct(self._in_order()):
            self._pending.clear()
        else:
            self._waiting = False
            self._news.set()

    def _in_order(self) -> list[ChoiceDelta]:
        pending = self._pending
        if len(pending) == 1:
            return list(pending.values())
        return [pending[index] for index in sorted(pending)]


class AsyncEngine:
    """Owns the near end of the process boundary. Every method is called on the event loop.

    It keeps each request and the tokens received of it: when the engine dies, another one goes on
    from there, and who reads the answer notices a pause.
    """

    def __init__(self, port: EnginePort, metrics: Metrics) -> None:
        self._port = port
        self._metrics = metrics
        self._live: dict[str, _Live] = {}
        self._prefix = uuid.uuid4().hex[:12]
        self._counter = itertools.count()
        self._reset_missed = False  # while no engine was there to hear it
        # What the engine's side does now; requests are taken in unless it is dead.
        self.status: EngineStatus = "loading"
        self.fatal: str | None = None
        self.waiting = 0  # requests in the engine's queue, as of its last step

    @property
    def unfinished(self) -> int:
        """Engine requests in flight."""
        return len(self._live)

    @property
    def is_watched(self) -> bool:
        """Whether requests would go on if the engine died now."""
        return self._port.is_watched()

    async def start(self) -> None:
        self._port.start(self._deliver)

    async def close(self) -> None:
        """Lets go of the engine; whoever still waits for an answer hears that none will come."""
        await self._port.close()
        self._end_all("the server is shutting down")

    def submit(self, choices: Sequence[ChoiceRequest]) -> Generation:
        """Sends a call to the engine under ids of our own: a caller's id may be in use twice.

        Raises EngineDeadError.
        """
        if self.fatal is not None:
            raise EngineDeadError(self.fatal)
        call = f"{self._prefix}-{next(self._counter)}"
        now = time.monotonic()
        generation = Generation(call, self)
        record = current_record.get()
        requests = []
        for index, choice in enumerate(choices):
            request = dataclasses.replace(choice.request, id=f"{call}-{index}")
            state = Choice(index, choice.assembler, choice.named_stop_ids)
            self._live[request.id] = _Live(generation, state, request, record, arrival=now)
            if record is not None:
                record.submit(request, len(request.prompt_token_ids))
            generation._unfinished.add(request.id)
            generation._open += 1
            requests.append(request)
        self._port.send(Add(tuple(requests)))
        return generation

    def abort(self, request_ids: set[str]) -> None:
        """Forgets requests and tells the engine, which drops them before its next step."""
        for request_id in sorted(request_ids):
            live = self._live.pop(request_id, None)
            if live is not None:
                self._observe_end(live, "abort")
        self._port.send(Abort(tuple(sorted(request_ids))))

    def reset_prefix_cache(self) -> None:
        """Calls submitted after this reuse nothing computed before. Raises EngineDeadError."""
        if self.fatal is not None:
            raise EngineDeadError(self.fatal)
        self._reset_missed = self.status != "ready"
        self._port.send(ResetCache())

    def _deliver(self, event: Event) -> None:
        if isinstance(event, StepReport):
            self._on_report(event)
        elif isinstance(event, EngineUp):
            self._on_up()
        else:
            self._on_down(event)

    def _on_up(self) -> None:
        """An engine is there, the first or another one: it hears of all that is in flight."""
        self.status = "ready"
        if self._reset_missed:
            self._reset_missed = False
            self._port.send(ResetCache())
        self._port.send(Resume(tuple(live.resumed() for live in self._live.values())))

    def _on_down(self, event: EngineDown) -> None:
        self.status = "restarting"
        for request_id, reason in event.condemned.items():
            live = self._live.get(request_id)
            if live is not None:
                self._end(live, failed_delta(live.choice, reason))
        if event.fatal is not None:
            self._end_all(event.fatal)

    def _on_report(self, report: StepReport) -> None:
        self.waiting = int(report.stats.get("waiting", self.waiting))
        self._metrics.observe_report(report.stats)
        for request_id, reason in report.refused.items():
            self._refuse(request_id, reason)
        news, stops = _StepNews(time.monotonic()), []
        for output in report.outputs:
            live = self._live.get(output.request_id)
            if live is not None and self._take(live, output, news):
                stops.append(output.request_id)
        if stops:
            self._port.send(Abort(tuple(stops)))
        if news.tokens:
            self._metrics.observe_tokens(news.tokens)
        for gap, tokens in news.gaps.items():
            self._metrics.observe_gap(gap, tokens)
        for generation in news.generations:
            generation.tell()

    def _refuse(self, request_id: str, reason: str) -> None:
        live = self._live.get(request_id)
        if live is not None:
            delta = failed_delta(live.choice, reason)
            delta.refused = True
            self._end(live, delta)

    def _take(self, live: _Live, output: EngineOutput, news: _StepNews) -> bool:
        """Puts an output where it belongs; returns whether the engine must be told to stop."""
        if live.received:  # what an engine that resumed it says once more
            output.cached_tokens = output.prompt_logprobs = None
        live.received += output.token_ids
        live.steered |= "steered" in output.timing
        try:
            delta, stop_engine = live.choice.take(output)
        except Exception as error:
            # Text that cannot be assembled is the fault of this request alone.
            delta, stop_engine = failed_delta(live.choice, f"text assembly failed: {error}"), True
        self._observe_tokens(live, output, len(delta.token_ids), news)
        if delta.finish_reason is not None:
            del self._live[live.request.id]
            self._observe_end(live, delta.finish_reason)
        live.generation.put(live.request.id, delta)
        news.generations[live.generation] = None
        return stop_engine

    def _observe_tokens(
        self, live: _Live, output: EngineOutput, tokens: int, news: _StepNews
    ) -> None:
        if live.first_scheduled is None:
            live.first_scheduled = output.timing.get("first_scheduled")
        if not tokens:
            return
        if output.timing:
            live.preemptions = int(output.timing.get("preemptions", live.preemptions))
        now = news.now
        if live.last_token is None:
            live.first_token, live.cached_tokens = now, output.cached_tokens or 0
            self._metrics.observe_first_token(
                now - live.arrival, len(live.request.prompt_token_ids), live.cached_tokens
            )
        else:
            gap = (now - live.last_token) / tokens
            news.gaps[gap] = news.gaps.get(gap, 0) + tokens
        live.last_token = now
        live.tokens += tokens
        news.tokens += tokens

    def _observe_end(self, live: _Live, reason: str) -> None:
        self._metrics.observe_end(
            reason=reason,
            arrival=live.arrival,
            first_scheduled=live.first_scheduled,
            first_token=live.first_token,
            last_token=live.last_token,
            end=time.monotonic(),
            prompt_tokens=len(live.request.prompt_token_ids),
            cached_tokens=live.cached_tokens,
            output_tokens=live.tokens,
            max_tokens=live.request.max_tokens,
            preemptions=live.preemptions,
        )
        if live.record is not None:
            live.record.end_choice(
                live.request,
                reason=reason,
                cached_tokens=live.cached_tokens,
                output_tokens=live.tokens,
                first_scheduled=live.first_scheduled,
                first_token=live.first_token,
                last_token=live.last_token,
            )
        generation = live.generation
        generation._longest = max(generation._longest, live.tokens)
        generation._open -= 1
        if not generation._open:
            self._metrics.observe_longest(generation._longest)

    def _end(self, live: _Live, delta: ChoiceDelta) -> None:
        """Ends a request here, of which the engine knows nothing any more."""
        del self._live[live.request.id]
        self._observe_end(live, "error")
        live.generation.put(live.request.id, delta)
        live.generation.tell()

    def _end_all(self, reason: str) -> None:
        self.fatal, self.status = reason, "dead"
        for live in list(self._live.values()):
            self._end(live, failed_delta(live.choice, reason))


def failed_delta(choice: Choice, error: str) -> ChoiceDelta:
    return ChoiceDelta(choice.index, finish_reason=FinishReason.ERROR, error=error)
