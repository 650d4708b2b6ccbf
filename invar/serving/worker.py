"""The engine's loop: obey commands, step, report."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Protocol

from invar.engine.request import EngineOutput, EngineRequest, FinishReason
from invar.serving.messages import Abort, Command, ResetCache, Resume, StepEngine, StepReport
from invar.serving.quarantine import TrialGate
from invar.serving.shared_page import EngineState, SharedPage

logger = logging.getLogger("invar.serving")

# A trial waits so long for what clients have of it. They resume in milliseconds; one that does not
# has ended and taken its requests with it.
RESUME_LIMIT_S = 5.0
STATS_S = 0.05  # figures take as long to gather and to hand out as some tokens do
REST_S = 1.0  # without a request, before the engine may do something for itself
WAITING_ROUND_S = 0.1  # of a loop that waits for clients: it must be seen to go on


class Mailbox(Protocol):
    """Commands of all clients, and the way back."""

    def receive(self, timeout_s: float | None) -> Sequence[tuple[str, Command]] | None:
        """What has come, waiting for it so long (None: for ever); None: the engine is to end."""

    def deliver(self, client: str, report: StepReport) -> bool:
        """False where the client has gone."""


class EngineWorker:
    """Runs one engine for its clients until the mailbox ends it."""

    def __init__(
        self,
        engine: StepEngine,
        mailbox: Mailbox,
        page: SharedPage,
        *,
        gate: TrialGate | None = None,
        clients: int = 1,
    ) -> None:
        """``clients``: how many will come, for which a trial waits."""
        self._engine = engine
        self._mailbox = mailbox
        self._page = page
        self._gate = gate or TrialGate(())
        self._clients_expected = clients
        self._resume_until = time.monotonic() + RESUME_LIMIT_S
        self._clients: dict[str, None] = {}  # that have resumed, in order
        self._owner: dict[str, str] = {}  # request → client, of all that are live
        self._waiting: dict[str, EngineRequest] = {}  # have come and may not run yet
        self._refused: dict[str, tuple[str, str]] = {}  # id → client, why
        self._outputs: dict[str, list[EngineOutput]] = defaultdict(list)  # by client
        self._stats = Stats(engine)
        self._rests = True  # the engine has something to do for itself
        engine.on_step = page.set_running

    def run(self) -> None:
        """Raises whatever the engine raises: then it has ended."""
        while (commands := self._receive()) is not None:
            self._page.begin_round()
            for client, command in commands:
                self._obey(client, command)
            self._admit()
            if self._engine.has_unfinished:
                for output in self._engine.step():
                    self._take(output)
            self._report()

    def _receive(self) -> Sequence[tuple[str, Command]] | None:
        """What is in the inbox, waiting only while there is nothing to compute."""
        if self._engine.has_unfinished:
            return self._mailbox.receive(0)
        self._page.state = EngineState.IDLE
        if self._waiting:
            return self._mailbox.receive(WAITING_ROUND_S)
        commands = self._mailbox.receive(REST_S if self._rests else None)
        if self._rests and commands is not None and not commands:
            self._rests = self._engine.rest()  # which is reported
        return commands

    def _obey(self, client: str, command: Command) -> None:
        if isinstance(command, ResetCache):
            self._engine.reset_prefix_cache()
        elif isinstance(command, Abort):
            for request_id in command.request_ids:
                # An answer may have ended while its abort was on the way.
                if self._owner.get(request_id) == client:
                    self._forget(request_id)
        else:
            if isinstance(command, Resume):
                self._forget_client(client)
                self._clients[client] = None
            for request in command.requests:
                self._owner[request.id] = client
                self._waiting[request.id] = request

    def _admit(self) -> None:
        """Gives to the engine what may run. Everybody may, unless a culprit is looked for."""
        if not self._gate.is_open:
            all_there = len(self._clients) >= self._clients_expected
            if not all_there and time.monotonic() < self._resume_until:
                return
        admitted = self._gate.next_group(list(self._waiting))
        self._page.trials_passed = self._gate.passed
        for request_id in admitted or ():
            self._add(self._waiting.pop(request_id))

    def _add(self, request: EngineRequest) -> None:
        client = self._owner[request.id]
        self._page.set_running([request.id])
        try:
            self._engine.add_request(request)
        except ValueError as error:
            self._refused[request.id] = client, str(error)
        except Exception as error:
            logger.exception("request %s could not be taken in", request.id)
            self._take_back(request.id)
            self._outputs[client].append(failed(request.id, f"{type(error).__name__}: {error}"))
        else:
            return
        self._gate.gone(request.id)
        del self._owner[request.id]

    def _take_back(self, request_id: str) -> None:
        """What the engine may have kept of a request before it failed at it."""
        try:
            self._engine.abort(request_id)
        except Exception:
            logger.exception("request %s left something behind", request_id)

    def _forget(self, request_id: str) -> None:
        del self._owner[request_id]
        self._gate.gone(request_id)
        if self._waiting.pop(request_id, None) is None:
            self._engine.abort(request_id)

    def _forget_client(self, client: str) -> None:
        for request_id in [one for one, owner in self._owner.items() if owner == client]:
            self._forget(request_id)
        self._outputs.pop(client, None)

    def _take(self, output: EngineOutput) -> None:
        client = self._owner[output.request_id]
        self._gate.saw(output)
        if output.finish_reason is not None:
            del self._owner[output.request_id]
        self._outputs[client].append(output)

    def _report(self) -> None:
        """One message to every client."""
        stats = self._stats.news()
        outputs, self._outputs = self._outputs, defaultdict(list)
        refused, self._refused = self._refused, {}
        for client in list(self._clients):
            reasons = {one: why for one, (owner, why) in refused.items() if owner == client}
            report = StepReport(outputs.get(client, []), reasons, stats)
            if not self._mailbox.deliver(client, report):
                logger.info("%s has gone; its requests are dropped", client)
                del self._clients[client]
                self._forget_client(client)


def failed(request_id: str, error: str) -> EngineOutput:
    return EngineOutput(request_id, [], finish_reason=FinishReason.ERROR, error=error)


class Stats:
    """The engine's figures for reports: now and then, and always when nothing more will come."""

    def __init__(self, engine: StepEngine) -> None:
        self._engine = engine
        self._due = 0.0

    def news(self) -> dict[str, float]:
        """Empty where the last ones are fresh enough."""
        now = time.monotonic()
        if now < self._due and self._engine.has_unfinished:
            return {}
        self._due = now + STATS_S
        return stats_by_name(self._engine.stats())


def stats_by_name(stats: object) -> dict[str, float]:
    """The numbers among the fields of ``stats``, those of its mappings too."""
    if isinstance(stats, Mapping):
        fields = dict(stats)
    elif dataclasses.is_dataclass(stats):
        fields = {f.name: getattr(stats, f.name) for f in dataclasses.fields(stats)}
    else:
        fields = vars(stats)
    numbers: dict[str, float] = {}
    for name, value in fields.items():
        if isinstance(value, Mapping):
            numbers |= stats_by_name(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            numbers[name] = float(value)
    return numbers
