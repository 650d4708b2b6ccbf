"""The engine process: `python -m invar.serving.engine_process`, started by the supervisor.

What it is to do comes through stdin, which stays open as long as the parent wants it to run.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import pickle
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from invar.backends.runner import PAGE_TOKENS
from invar.config import EngineConfig
from invar.observe.logs import set_up_logging
from invar.serving.messages import (
    Command,
    EngineFacts,
    LoadFailed,
    Ready,
    StepEngine,
    StepReport,
    StoreFacts,
    decode_command,
    encode,
)
from invar.serving.quarantine import Groups, TrialGate
from invar.serving.shared_page import EngineState, SharedPage
from invar.serving.worker import EngineWorker

if TYPE_CHECKING:
    from invar.engine.page_store import PageStore

logger = logging.getLogger("invar.serving")

PR_SET_PDEATHSIG = 1  # linux/prctl.h
LAST_WORDS_MS = 2000  # for a message to leave before the process does


@dataclass(frozen=True)
class EngineStart:
    """What an engine process is started with."""

    config: EngineConfig
    run_folder: Path
    number: int  # of this process, counted from 0
    clients: int
    parent: int  # process id
    log_level: str = "info"
    trials: Groups = ()

    @property
    def page(self) -> Path:
        return self.run_folder / f"page-{self.number}"


def engine_address(run_folder: Path, number: int) -> str:
    return f"ipc://{run_folder}/engine-{number}"


def control_address(run_folder: Path) -> str:
    return f"ipc://{run_folder}/control"


Load = Callable[[EngineConfig, SharedPage], tuple[StepEngine, EngineFacts]]


def load_model(config: EngineConfig, page: SharedPage) -> tuple[StepEngine, EngineFacts]:
    from invar.engine.loader import load_engine_alone

    loaded = load_engine_alone(config)
    loaded.engine.runner.count_progress_in(page.work_items)
    facts = EngineFacts(
        vocab_size=loaded.info.vocab_size,
        max_model_len=loaded.engine.max_model_len,
        kv_capacity_tokens=loaded.engine.kv_capacity_tokens,
        kv_bytes=loaded.info.slabs * loaded.info.slab_bytes,
        fingerprint=loaded.info.fingerprint,
        memory=loaded.memory_table,
        store=store_facts(loaded.engine.page_store),
    )
    return loaded.engine, facts


def store_facts(store: PageStore | None) -> StoreFacts | None:
    if store is None:
        return None
    limit = None if store.writer is None else store.size
    return StoreFacts(str(store.folder.parent), limit, store.num_pages * PAGE_TOKENS)


class SocketMailbox:
    """A ``Mailbox`` over ZeroMQ. It ends when stdin does."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self._socket = context.socket(zmq.ROUTER)
        # Nothing is ever dropped, a client that has gone is noticed, and one that comes back under
        # its name takes its place.
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(address)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(sys.stdin.fileno(), zmq.POLLIN)

    def receive(self, timeout_s: float | None) -> Sequence[tuple[str, Command]] | None:
        ready = dict(self._poller.poll(None if timeout_s is None else int(timeout_s * 1000)))
        if sys.stdin.fileno() in ready:
            return None
        commands = []
        while self._socket in ready:
            try:
                client, message = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            commands.append((client.decode(), decode_command(message)))
        return commands

    def deliver(self, client: str, report: StepReport) -> bool:
        try:
            self._socket.send_multipart((client.encode(), encode(report)))
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True


def main(load: Load = load_model) -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # ending is the parent's affair
    start: EngineStart = pickle.load(sys.stdin.buffer)
    die_with_parent(start.parent)
    set_up_logging(start.log_level)
    page = SharedPage.open(start.page)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    control = context.socket(zmq.DEALER)
    control.setsockopt(zmq.IDENTITY, f"engine-{start.number}".encode())
    control.setsockopt(zmq.LINGER, LAST_WORDS_MS)
    control.connect(control_address(start.run_folder))
    gc.disable()  # loading makes many objects and hardly any garbage
    try:
        engine, facts = load(start.config, page)
    except (ValueError, OSError, MemoryError) as error:
        control.send(encode(LoadFailed(str(error))))
        context.destroy(LAST_WORDS_MS)
        return 1
    gc.freeze()  # it stays: no collection need go through it
    gc.enable()
    page.state = EngineState.IDLE
    mailbox = SocketMailbox(context, engine_address(start.run_folder, start.number))
    control.send(encode(Ready(facts)))
    gate = TrialGate(start.trials)
    EngineWorker(engine, mailbox, page, gate=gate, clients=start.clients).run()
    engine.close()
    return 0


def die_with_parent(parent: int) -> None:
    """However the parent ends, this process does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before that
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(main())
