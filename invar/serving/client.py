"""The HTTP process's end of the boundary: sockets to the engine and to its supervisor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path

import zmq

from invar.serving.engine_process import control_address, engine_address
from invar.serving.messages import (
    Abort,
    Add,
    Command,
    Deliver,
    EngineDown,
    EngineUp,
    Hello,
    Resume,
    StepReport,
    decode_for_client,
    decode_report,
    encode,
)
from invar.serving.shared_page import SharedPage

# The supervisor looks at the engine ten times a second.
WATCH_LIMIT_S = 5.0


class EngineClient:
    """An ``EnginePort`` to the engine process that a supervisor keeps up.

    Every engine process has a socket of its own, so that nothing meant for one reaches another.
    """

    def __init__(self, run_folder: Path, index: int = 0) -> None:
        """``index``: of this HTTP process among those that share the engine."""
        self._run_folder = run_folder
        self._index = index
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._control: LoopSocket | None = None
        self._engine: LoopSocket | None = None
        self._page: SharedPage | None = None
        self._in_flight: set[str] = set()

    def start(self, deliver: Deliver) -> None:
        self._deliver = deliver
        self._control = self._connect(control_address(self._run_folder), self._on_control)
        self._control.send(encode(Hello()))

    def send(self, command: Command) -> None:
        if self._engine is None:
            return
        if isinstance(command, Add | Resume):
            self._in_flight.update(request.id for request in command.requests)
        elif isinstance(command, Abort):
            self._in_flight.difference_update(command.request_ids)
        self._note_in_flight()
        self._engine.send(encode(command))

    def is_watched(self) -> bool:
        return self._page is None or self._page.unwatched_s < WATCH_LIMIT_S

    async def close(self) -> None:
        for socket in (self._control, self._engine):
            if socket is not None:
                socket.close()
        self._control = self._engine = None
        self._context.term()

    def _connect(self, address: str, on_message: Callable[[bytes], None]) -> LoopSocket:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, f"http-{self._index}".encode())
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        return LoopSocket(socket, on_message)

    def _on_control(self, message: bytes) -> None:
        event = decode_for_client(message)
        if self._engine is not None:
            # What the engine said before it died is heard before the news of its death.
            self._engine.drain()
            self._engine.close()
        self._engine = self._page = None
        self._in_flight.clear()
        if isinstance(event, EngineUp):
            try:
                self._page = SharedPage.open(self._run_folder / f"page-{event.number}")
            except FileNotFoundError:
                event = EngineDown()  # it has gone already, which is the next news
            else:
                address = engine_address(self._run_folder, event.number)
                self._engine = self._connect(address, self._on_report)
        self._deliver(event)

    def _on_report(self, message: bytes) -> None:
        report = decode_report(message)
        self._in_flight.difference_update(ended(report))
        self._note_in_flight()
        self._deliver(report)

    def _note_in_flight(self) -> None:
        if self._page is not None:
            self._page.set_in_flight(self._index, len(self._in_flight))


class LoopSocket:
    """A socket whose messages are handed over on the running event loop.

    ZeroMQ's descriptor tells only that something has changed since it was last looked at, so it is
    looked at after every send as well.
    """

    def __init__(self, socket: zmq.Socket[bytes], on_message: Callable[[bytes], None]) -> None:
        self._socket = socket
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._looking = False
        self._loop.add_reader(self._descriptor, self.drain)

    def send(self, message: bytes) -> None:
        self._socket.send(message)
        if not self._looking:
            self._looking = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._looking = False
        self.drain()

    def drain(self) -> None:
        while not self._socket.closed:
            try:
                message = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._on_message(message)
            except BaseException:
                self._loop.call_soon(self.drain)  # of what came after it nobody else would tell
                raise

    def close(self) -> None:
        self._loop.remove_reader(self._descriptor)
        self._socket.close()


def ended(report: StepReport) -> Iterable[str]:
    yield from report.refused
    for output in report.outputs:
        if output.finish_reason is not None:
            yield output.request_id
