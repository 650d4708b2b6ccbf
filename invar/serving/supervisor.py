"""Keeps an engine process up: starts it, notices that it has died or hangs, starts another."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import zmq

from invar.config import EngineConfig
from invar.serving.engine_process import EngineStart, control_address
from invar.serving.messages import (
    EngineDown,
    EngineFacts,
    EngineUp,
    Hello,
    LoadFailed,
    Ready,
    ToClient,
    decode_for_supervisor,
    encode,
)
from invar.serving.quarantine import Quarantine
from invar.serving.run_folder import RunFolder
from invar.serving.shared_page import EngineState, SharedPage

logger = logging.getLogger("invar.serving")

TICK_S = 0.1
# An item of work takes milliseconds; this long without one, while somebody waits, is a hang. It is
# counted in ticks of our own, so that a machine that stands still accuses nobody.
HANG_LIMIT_S = 2.0
LOADING_LIMIT_S = 900.0  # 100 GB from a slow disk
LOADING_STILL_S = 20.0  # without any CPU time: not even a slow disk is read
END_LIMIT_S = 5.0  # for the last pages of the KV store to reach the disk
CRASHES, CRASH_WINDOW_S = 5, 300.0
LONGEST_PAUSE_S = 30.0


class EngineStartError(ValueError):
    """The engine did not come up, for a reason that whoever started it can read."""


class Supervisor:
    """Runs on a thread of its own and owns the run folder. `clients` HTTP processes will connect.

    Crashes are counted: at the first the engine comes back at once, then after 1, 2, 4 … seconds;
    the fifth within five minutes is the last. Deaths by which a quarantine closes in on a culprit
    are not counted beyond the one that began it: they are the search at work, their number is
    bounded, and a server that gave up in the midst of one would refuse everybody for one request.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        clients: int = 1,
        log_level: str = "info",
        command: Sequence[str] | None = None,
        on_dead: Callable[[], object] | None = None,
    ) -> None:
        """``command``: what an engine process is; ``on_dead``: called on the supervisor's thread
        when there will be no other one."""
        self._config = config
        self._num_clients = clients
        self._log_level = log_level
        self._command = command or [*python(), "-m", "invar.serving.engine_process"]
        self._on_dead = on_dead
        self._folder = RunFolder()
        self.run_folder = self._folder.path
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._control = self._context.socket(zmq.ROUTER)
        self._control.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._control.setsockopt(zmq.LINGER, 0)
        self._control.bind(control_address(self.run_folder))
        self._clients: set[bytes] = set()
        self._quarantine = Quarantine()
        self._crashes: list[float] = []  # when, monotonic
        self._number = 0
        self._engine: EngineProcess | None = None
        self._facts: EngineFacts | None = None
        self._loaded: Future[EngineFacts] = Future()
        self._closing = threading.Event()
        self.dead: str | None = None  # why there will be no other engine
        self._thread = threading.Thread(target=self._run, name="invar-supervisor", daemon=True)
        self._thread.start()

    def wait_ready(self) -> EngineFacts:
        """What the engine says of itself once it has loaded. Raises EngineStartError."""
        return self._loaded.result()

    @property
    def engine_pid(self) -> int | None:
        """Of the engine process that is up or loading."""
        engine = self._engine
        return None if engine is None else engine.process.pid

    def client_ended(self, index: int) -> None:
        """Nobody waits any more for what an HTTP process had asked for."""
        engine = self._engine
        if engine is not None:
            engine.page.set_in_flight(index, 0)

    def close(self) -> None:
        """Ends the engine process, by force if it takes its time, and removes the run folder."""
        self._closing.set()
        self._thread.join()
        self._control.close()
        self._context.term()
        self._folder.close()

    # -------------------------------------------------------------------------- on the thread

    def _run(self) -> None:
        try:
            while not self._closing.is_set() and self.dead is None:
                death = self._run_engine()
                if death is not None:
                    self._after(death)
        except Exception as error:
            logger.exception("the supervisor has failed")
            self._give_up(f"the supervisor has failed: {error}")
        if not self._loaded.done():
            self._loaded.set_exception(EngineStartError(self.dead or "the server is ending"))

    def _run_engine(self) -> Death | None:
        """One engine process from start to end; None if it was to end."""
        start = EngineStart(
            config=self._pinned_config(),
            run_folder=self.run_folder,
            number=self._number,
            clients=self._num_clients,
            parent=os.getpid(),
            log_level=self._log_level,
            trials=self._quarantine.trials,
        )
        self._number += 1
        self._engine = engine = EngineProcess(start, self._command)
        try:
            while not self._closing.is_set() and self.dead is None:
                self._hear(TICK_S)
                reason = engine.trouble()
                if reason is not None:
                    self._hear(0)  # its last words
                    return engine.death(reason)
            if engine.ready:
                engine.end()
            return None
        finally:
            engine.kill()
            self._engine = None

    def _after(self, death: Death) -> None:
        culprit, searching = self._quarantine.engine_died(death.step, death.trials_passed)
        if not searching:
            self._crashes.append(time.monotonic())
        logger.error("the engine %s; requests of its step: %d", death.reason, len(death.step))
        condemned = {}
        if culprit is not None:
            condemned[culprit] = (
                f"Request {culprit} ended the engine twice while it ran alone; it is not tried "
                "again."
            )
            logger.error("request %s ends the engine and is refused", culprit)
        if self._facts is None:
            self._give_up(death.load_error or f"the engine {death.reason} while it loaded")
            return
        recent = self._recent_crashes()
        if recent >= CRASHES:
            self._give_up(
                f"the engine has crashed {recent} times in {CRASH_WINDOW_S:.0f} s; the last time "
                f"it {death.reason}"
            )
        self._tell_all(EngineDown(condemned, self.dead))
        if self.dead is None and not searching:
            self._pause(pause_after(recent))

    def _recent_crashes(self) -> int:
        since = time.monotonic() - CRASH_WINDOW_S
        self._crashes = [when for when in self._crashes if when > since]
        return len(self._crashes)

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._closing.is_set() and (left := until - time.monotonic()) > 0:
            self._hear(min(left, TICK_S))

    def _give_up(self, reason: str) -> None:
        self.dead = reason
        if self._loaded.done():
            logger.critical("%s", reason)
            self._tell_all(EngineDown(fatal=reason))
            if self._on_dead is not None:
                self._on_dead()

    def _hear(self, timeout_s: float) -> None:
        """Takes messages for so long, or until the first has come and no other is there."""
        timeout_ms = int(timeout_s * 1000)
        while self._control.poll(timeout_ms):
            sender, message = self._control.recv_multipart()
            self._on_message(sender, decode_for_supervisor(message))
            timeout_ms = 0

    def _on_message(self, sender: bytes, message: Hello | Ready | LoadFailed) -> None:
        engine = self._engine
        if isinstance(message, Hello):
            self._clients.add(sender)
            if self.dead is not None:
                self._tell(sender, EngineDown(fatal=self.dead))
            elif engine is not None and engine.ready:
                self._tell(sender, EngineUp(engine.number))
            elif self._facts is not None:
                self._tell(sender, EngineDown())
        elif engine is None or sender != engine.identity:
            return  # of one that has been killed meanwhile
        elif isinstance(message, LoadFailed):
            engine.load_error = message.error
        elif self._facts is not None and self._facts.fingerprint != message.facts.fingerprint:
            # Answers would not go on as they began.
            self._give_up("the engine came back as another build: the model file has changed")
        else:
            engine.ready = True
            if self._facts is None:
                self._facts = message.facts
                self._loaded.set_result(message.facts)
            self._tell_all(EngineUp(engine.number))

    def _tell_all(self, event: ToClient) -> None:
        for client in self._clients:
            self._tell(client, event)

    def _tell(self, client: bytes, event: ToClient) -> None:
        self._control.send_multipart((client, encode(event)))

    def _pinned_config(self) -> EngineConfig:
        """After the first start, with the sizes it came to: those that are planned from the memory
        that is available would be others now, and so would the build."""
        if self._facts is None:
            return self._config
        pinned = copy.copy(self._config)  # not `replace`, which would say every notice again
        object.__setattr__(pinned, "max_model_len", self._facts.max_model_len)
        object.__setattr__(pinned, "kv_cache_memory_bytes", self._facts.kv_bytes)
        return pinned


@dataclass(frozen=True)
class Death:
    """How an engine process ended, and what it was doing."""

    reason: str
    step: list[str]
    trials_passed: int
    load_error: str | None


class EngineProcess:
    """A running engine process as its supervisor sees it."""

    def __init__(self, start: EngineStart, command: Sequence[str]) -> None:
        self.number = start.number
        self.identity = f"engine-{start.number}".encode()
        self.page = SharedPage.create(start.page)
        self._page_path = start.page
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            process_group=0,  # Ctrl-C is for us alone
        )
        self.ready = False
        self.load_error: str | None = None
        self._began = self._last_tick = time.monotonic()
        self._last_advance = self.page.advance
        self._still_ticks = 0
        assert self.process.stdin is not None
        try:
            pickle.dump(start, self.process.stdin)
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended already, which is noticed as any end is

    def trouble(self) -> str | None:
        """What is wrong with it, if anything."""
        self.page.note_look()
        code = self.process.poll()
        if code is not None:
            return end_of(code)
        now = time.monotonic()
        if not self.ready and now - self._began > LOADING_LIMIT_S:
            return f"has not loaded within {LOADING_LIMIT_S:.0f} s"
        if now - self._last_tick < TICK_S / 2:
            return None
        self._last_tick = now
        advance, page = self.page.advance if self.ready else self._cpu_time(), self.page
        has_work = not self.ready or page.in_flight or page.state == EngineState.WORKING
        if advance != self._last_advance or not has_work:
            self._last_advance, self._still_ticks = advance, 0
            return None
        self._still_ticks += 1
        limit_s = HANG_LIMIT_S if self.ready else LOADING_STILL_S
        if self._still_ticks < round(limit_s / TICK_S):
            return None
        return f"has done nothing for {limit_s:.0f} s with work to do"

    def _cpu_time(self) -> tuple[int, int]:
        """Ticks of user and system time (proc(5)); where the system does not say, it counts up."""
        try:
            stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        except OSError:
            return self._last_advance[0] + 1, 0
        fields = stat.rpartition(")")[2].split()
        return int(fields[11]), int(fields[12])

    def death(self, reason: str) -> Death:
        self.kill()
        if self.load_error is not None:
            reason = f"could not be loaded: {self.load_error}"
        working = self.page.state == EngineState.WORKING
        step = self.page.running if working else []
        return Death(reason, step, self.page.trials_passed, self.load_error)

    def end(self) -> None:
        """Asks it to end, and waits."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            logger.warning("the engine did not end within %.0f s and is killed", END_LIMIT_S)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()
        self._page_path.unlink(missing_ok=True)


def pause_after(crashes: int) -> float:
    """Seconds before the next start: none after the first crash, then 1, 2, 4 …"""
    return 0.0 if crashes < 2 else min(LONGEST_PAUSE_S, 2.0 ** (crashes - 2))


def end_of(code: int) -> str:
    """code: as `subprocess` has it, negative for a signal."""
    if code >= 0:
        return f"ended with code {code}"
    if code == -signal.SIGBUS:
        return "was killed by SIGBUS: a file that it has in memory was cut short, or a disk failed"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def python() -> list[str]:
    """This interpreter, which looks for modules where this process does."""
    here = {"", os.getcwd()} & set(sys.path)
    return [sys.executable] if here else [sys.executable, "-P"]
