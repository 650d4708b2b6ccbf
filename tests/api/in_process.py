"""The engine's loop on a thread of this process: an `EnginePort` for engines of tests."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Sequence

from invar.serving.messages import (
    Command,
    Deliver,
    EngineDown,
    EngineUp,
    Event,
    StepEngine,
    StepReport,
)
from invar.serving.shared_page import SharedPage
from invar.serving.worker import EngineWorker


class ThreadPort:
    """Also the worker's mailbox. An engine that fails has ended for good."""

    def __init__(self, engine: StepEngine) -> None:
        self._worker = EngineWorker(engine, self, SharedPage.private())
        self._inbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="invar-engine", daemon=True)

    # ------------------------------------------------------------------------ the near side

    def start(self, deliver: Deliver) -> None:
        self._loop, self._deliver = asyncio.get_running_loop(), deliver
        self._thread.start()
        deliver(EngineUp(0))

    def send(self, command: Command) -> None:
        self._inbox.put(command)

    def is_watched(self) -> bool:
        return True

    async def close(self) -> None:
        await asyncio.to_thread(self.stop)

    def stop(self) -> None:
        self._inbox.put(None)
        self._thread.join()

    # ------------------------------------------------------------------------- the far side

    def receive(self, timeout_s: float | None) -> Sequence[tuple[str, Command]] | None:
        commands = []
        try:
            command = self._inbox.get(timeout_s != 0, timeout_s)
            while command is not None:
                commands.append(("client", command))
                command = self._inbox.get_nowait()
        except queue.Empty:
            return commands
        return None

    def report(self, event: Event) -> None:
        try:
            self._loop.call_soon_threadsafe(self._deliver, event)
        except RuntimeError:
            # The loop was closed while the last step ran: nobody is left to hear of it.
            assert self._loop.is_closed()

    def deliver(self, client: str, report: StepReport) -> bool:
        self.report(report)
        return True

    def _run(self) -> None:
        try:
            self._worker.run()
        except Exception as error:
            self.report(EngineDown(fatal=f"{type(error).__name__}: {error}"))
