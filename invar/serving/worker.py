"""The engine on a thread of this process: obey commands, step, report."""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Mapping

from invar.engine.request import EngineOutput, FinishReason
from invar.serving.messages import (
    Abort,
    Command,
    Deliver,
    ResetCache,
    StepEngine,
    StepReport,
)

logger = logging.getLogger("invar.serving")

STATS_S = 0.05  # figures take as long to gather and to hand out as some tokens do
REST_S = 1.0  # without a request, before the engine may do something for itself


class EngineThread:
    """An ``EnginePort`` whose far side is a thread."""

    def __init__(self, engine: StepEngine) -> None:
        self._engine = engine
        self._inbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._live: set[str] = set()
        self._refused: dict[str, str] = {}
        self._failed: list[EngineOutput] = []  # could not be taken in
        self._thread: threading.Thread | None = None
        self._stats = Stats(engine)
        self._rests = True  # the engine has something to do for itself

    def start(self, deliver: Deliver) -> None:
        self._thread = threading.Thread(
            target=self._run, args=(deliver,), name="invar-engine", daemon=True
        )
        self._thread.start()

    def send(self, command: Command) -> None:
        self._inbox.put(command)

    def close(self) -> None:
        if self._thread is not None:
            self._inbox.put(None)
            self._thread.join()
            self._thread = None

    def _run(self, deliver: Deliver) -> None:
        try:
            while self._obey_commands():
                refused, self._refused = self._refused, {}
                outputs, self._failed = self._failed, []
                if self._engine.has_unfinished:
                    outputs += self._step()
                deliver(StepReport(outputs, refused, self._stats.news()))
        except Exception as error:
            logger.exception("the engine has ended")
            deliver(StepReport([], fatal=f"{type(error).__name__}: {error}"))

    def _obey_commands(self) -> bool:
        """Takes what is in the inbox, waiting only while there is nothing to compute."""
        block = not self._engine.has_unfinished and not self._refused and not self._failed
        while True:
            try:
                command = self._inbox.get(block, REST_S if self._rests else None)
            except queue.Empty:
                if not block:
                    return True
                self._rests = self._engine.rest()
                continue
            if command is None:
                return False
            self._obey(command)
            block = False

    def _obey(self, command: Command) -> None:
        if isinstance(command, Abort):
            for request_id in command.request_ids:
                # An answer may have ended while its abort was on the way.
                if request_id in self._live:
                    self._live.discard(request_id)
                    self._engine.abort(request_id)
            return
        if isinstance(command, ResetCache):
            self._engine.reset_prefix_cache()
            return
        for request in command.requests:
            try:
                self._engine.add_request(request)
                self._live.add(request.id)
            except ValueError as error:
                self._refused[request.id] = str(error)
            except Exception as error:
                logger.exception("request %s could not be taken in", request.id)
                self._take_back(request.id)
                self._failed.append(failed(request.id, f"{type(error).__name__}: {error}"))

    def _take_back(self, request_id: str) -> None:
        """What the engine may have kept of a request before it failed at it."""
        try:
            self._engine.abort(request_id)
        except Exception:
            logger.exception("request %s left something behind", request_id)

    def _step(self) -> list[EngineOutput]:
        """One step. If it fails as a whole, all requests end with it; the engine goes on."""
        try:
            outputs = self._engine.step()
        except Exception as error:
            logger.exception("a step failed; its requests are given up")
            outputs = []
            for request_id in sorted(self._live):
                self._engine.abort(request_id)
                outputs.append(failed(request_id, f"the step failed: {error}"))
        for output in outputs:
            if output.finish_reason is not None:
                self._live.discard(output.request_id)
        return outputs


def failed(request_id: str, error: str) -> EngineOutput:
    return EngineOutput(request_id, [], finish_reason=FinishReason.ERROR, error=error)


class Stats:
    """The engine's figures for reports: now and then, and always when nothing more will come."""

    def __init__(self, engine: StepEngine) -> None:
        self._engine = engine
        self._due = 0.0

    def news(self) -> Mapping[str, float]:
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
