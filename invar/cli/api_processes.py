"""`invar serve --api-server-count N`: HTTP processes that share one listening socket and engine."""

from __future__ import annotations

import argparse
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from invar.api.key_use import KeyUse
from invar.cli.http_side import HttpOptions, http_server, kept_responses, load_text, serve_http
from invar.cli.tls import tls_options
from invar.config import EngineConfig
from invar.observe.catalogue import FOLDER_VARIABLE
from invar.observe.logs import set_up_logging
from invar.serving.client import EngineClient
from invar.serving.engine_process import die_with_parent
from invar.serving.messages import EngineFacts
from invar.serving.supervisor import Supervisor, python

logger = logging.getLogger("invar")

LOOK_S = 0.1
RESTART_PAUSE_S = 1.0


@dataclass(frozen=True)
class ApiStart:
    """What an HTTP process is started with, through its stdin."""

    args: argparse.Namespace
    config: EngineConfig
    facts: EngineFacts
    http: HttpOptions
    run_folder: Path
    index: int
    listener: int  # file descriptor
    parent: int  # process id


class ApiProcesses:
    """Starts them, passes signals on, and replaces one that dies: its connections are lost, the
    others' are not."""

    def __init__(
        self,
        args: argparse.Namespace,
        config: EngineConfig,
        facts: EngineFacts,
        http: HttpOptions,
        listener: socket.socket,
        supervisor: Supervisor,
    ) -> None:
        self._args, self._config, self._facts, self._http = args, config, facts, http
        self._listener = listener
        self._supervisor = supervisor
        # Before `prometheus_client` is imported there: any process answers for all.
        self._metrics = supervisor.run_folder / "metrics"
        self._metrics.mkdir()
        self._key_use: KeyUse | None = None
        if http.keys:
            keys, path = len(http.keys), keys_file(supervisor.run_folder)
            self._key_use = KeyUse(keys, path, args.api_server_count)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._due: dict[int, float] = {}  # when another one is started in its place, monotonic
        self._ending = False

    def run(self) -> int:
        """Until all have ended after a signal: the highest of their exit codes."""
        code = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        for index in range(self._args.api_server_count):
            self._start(index)
        while self._processes or (self._due and not self._ending):
            time.sleep(LOOK_S)
            for index, process in list(self._processes.items()):
                ended = process.poll()
                if ended is None:
                    continue
                del self._processes[index]
                self._supervisor.client_ended(index)
                if self._key_use is not None:
                    self._key_use.free(index)
                if self._ending:
                    # One that had not come up yet is ended by the signal itself.
                    code = max(code, 0 if ended == -signal.SIGTERM else abs(ended))
                else:
                    logger.error("HTTP process %d has ended with code %d", index, ended)
                    self._due[index] = time.monotonic() + RESTART_PAUSE_S
            for index, due in list(self._due.items()):
                if due <= time.monotonic():
                    del self._due[index]
                    self._start(index)
        self._listener.close()
        return code

    def _start(self, index: int) -> None:
        if self._ending:
            return
        descriptor = self._listener.fileno()
        process = subprocess.Popen(
            [*python(), "-m", "invar.cli.api_processes"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,  # what is to be printed has been
            pass_fds=[descriptor],
            env={**os.environ, FOLDER_VARIABLE: str(self._metrics)},
            process_group=0,  # signals come through this process
        )
        assert process.stdin is not None
        start = ApiStart(
            self._args,
            self._config,
            self._facts,
            self._http,
            self._supervisor.run_folder,
            index,
            descriptor,
            os.getpid(),
        )
        try:
            pickle.dump(start, process.stdin)
            process.stdin.close()
        except BrokenPipeError:
            pass  # it has ended, which is noticed like any end
        self._processes[index] = process
        if self._ending:  # the signal came while it was being started
            process.send_signal(signal.SIGTERM)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # The first ends also one that has not come up yet; the second is told by the exit code.
        passed_on = number if self._ending else signal.SIGTERM
        self._ending = True
        for process in self._processes.values():
            process.send_signal(passed_on)


def keys_file(run_folder: Path) -> Path:
    """What keys have used, in all HTTP processes."""
    return run_folder / "keys"


def main() -> int:
    # Until it serves there is nothing to finish: SIGTERM ends it as it ends any process.
    start: ApiStart = pickle.load(sys.stdin.buffer)
    die_with_parent(start.parent)
    set_up_logging(start.args.log_level)
    args = start.args
    port = EngineClient(start.run_folder, start.index)
    text = load_text(start.config)
    server = http_server(start.config, start.facts, text, port, start.http)
    server.responses = kept_responses(args.response_store, args.response_store_size)
    if server.keys:
        server.keys.share(keys_file(start.run_folder), args.api_server_count, start.index)
    return serve_http(args, server, socket.socket(fileno=start.listener), tls_options(args))


if __name__ == "__main__":
    sys.exit(main())
