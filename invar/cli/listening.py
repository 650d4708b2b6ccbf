"""The listening socket, what is printed at start, and a clean end."""

from __future__ import annotations

import asyncio
import errno
import gc
import ipaddress
import logging
import os
import resource
import shlex
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from starlette.types import ASGIApp

from invar.api.protocol import Connection
from invar.api.server import Server
from invar.cli.tables import memory_table, size_text
from invar.cli.tls import Tls

if TYPE_CHECKING:
    from invar.config import EngineConfig
    from invar.serving.messages import EngineFacts, StoreFacts

logger = logging.getLogger("invar.api")

BACKLOG = 2048
MAX_FILES = 65536  # a connection is one; the usual limit of 1024 is soon reached
# Clients that keep connections open must not meet a server that is just closing one: longer than
# the idle times of usual pools and proxies (a minute).
KEEP_ALIVE_S = 75
# After a second signal: an engine in the middle of a long step is not waited for.
FORCED_END_S = 2.0
# What is cut is told so; who does not read it is not waited for.
LAST_WORDS_S = 1.0
POLL_S = 0.05
# How a server that was asked to end has ended. A second signal: 128 and its number.
EXIT_DRAINED = 0
EXIT_CUT = 3  # requests still ran when --drain-timeout was over


class DrainingServer(uvicorn.Server):
    """Ends on a signal: takes no new requests, finishes those that run, cuts what takes too long.

    It goes on listening meanwhile, so that whoever comes hears a 503 and tries elsewhere.
    """

    def __init__(self, config: uvicorn.Config, state: Server, drain_timeout_s: float) -> None:
        super().__init__(config)
        self.exit_code = EXIT_DRAINED
        self._state = state
        self._drain_timeout_s = drain_timeout_s
        # Waits from the beginning: a handler that starts a thread may find its lock held.
        self._forced = threading.Event()
        threading.Thread(target=self._end_by_force, name="invar-end", daemon=True).start()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and not self.force_exit:
            self.force_exit = True
            self.exit_code = 128 + sig
            self._forced.set()
        self._state.draining = self.should_exit = True

    def _end_by_force(self) -> None:
        self._forced.wait()
        time.sleep(FORCED_END_S)
        os._exit(self.exit_code)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for connection in self._busy():
            connection.shutdown()  # at the end of its answer
        end = time.monotonic() + self._drain_timeout_s
        in_background = self._state.background
        while (self._busy() or in_background) and not self.force_exit and time.monotonic() < end:
            await asyncio.sleep(POLL_S)
        for server in self.servers:
            server.close()
        for listener in sockets or ():
            listener.close()
        if cut := len(self._busy()) + len(in_background):
            if not self.force_exit:
                self.exit_code = EXIT_CUT
            logger.warning("%d requests are cut: the server ends", cut)
        if tasks := set(self.server_state.tasks):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=LAST_WORDS_S)
        for idle in list(self.server_state.connections):
            idle.shutdown()
        await self.lifespan.shutdown()

    def _busy(self) -> list[Connection]:
        """Those with a request that runs, or an answer that is still being sent. Idle ones are
        left open: one that is just closed may have a request on its way."""
        connections = self.server_state.connections
        return [one for one in connections if isinstance(one, Connection) and one.busy]


def prepare(listener: socket.socket, stall_timeout_s: float) -> None:
    """For many connections, of which some go without a word: the kernel notices them."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Linux's; what is accepted inherits them.
    for name, value in (
        ("TCP_KEEPIDLE", KEEP_ALIVE_S),
        ("TCP_KEEPINTVL", 15),
        ("TCP_KEEPCNT", 4),
        ("TCP_USER_TIMEOUT", int(2000 * max(stall_timeout_s, KEEP_ALIVE_S))),  # ms unread
    ):
        if hasattr(socket, name):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def listen(host: str, port: int) -> socket.socket:
    """A bound socket. Raises ValueError saying what to do if the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            raise ValueError(
                f"{host}:{port} is in use by another program; choose another --port, or 0 for a "
                "free one"
            ) from None
        raise ValueError(f"cannot listen on {host}:{port}: {error}") from None
    return listener


def is_loopback(listener: socket.socket) -> bool:
    host = listener.getsockname()[0]
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


def announce(
    config: EngineConfig,
    path: Path,
    facts: EngineFacts,
    listener: socket.socket,
    *,
    chats: bool,
    needs_key: bool,
    sampling: str | None = None,
    tls: Tls | None = None,
) -> None:
    """What the model takes, where it is, and a command that works.

    From here on the socket listens: who types the command at once waits, and is not turned away.
    """
    listener.listen(BACKLOG)
    host, port = listener.getsockname()[:2]
    reachable = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)
    if ":" in reachable and not reachable.startswith("["):
        reachable = f"[{reachable}]"
    print(f"Invar serves {', '.join(config.names)} ({path.name})")
    print(memory_table(facts.memory))
    print(
        f"  {facts.max_model_len} tokens a request, {config.max_num_seqs} requests together, "
        f"{config.max_num_batched_tokens} tokens a step"
    )
    print(f"  {kv_store(facts.store)}")
    if sampling is not None:
        print(f"  Sampling, where a request does not say: {sampling}")
    url = f"{'https' if tls else 'http'}://{reachable}:{port}"
    print(f"\nListening on {url}   (Ctrl-C ends)\n")
    print(curl(url, chats, needs_key, tls))
    sys.stdout.flush()


def kv_store(store: StoreFacts | None) -> str:
    """Where prompts are kept, since they are what users wrote."""
    if store is None:
        return "KV store: none, nothing of a prompt is kept on disk"
    size = store.limit_bytes
    limit = "which is only read" if size is None else f"up to {size_text(size)}"
    return f"KV store: {store.folder}, {limit}; {store.tokens} tokens of earlier prompts are there"


def curl(url: str, chats: bool, needs_key: bool, tls: Tls | None = None) -> str:
    """A request that works as it stands; a key is left to be filled in, as logs are kept."""
    if chats:
        path = "/v1/chat/completions"
        message = '{"role": "user", "content": "Why is the sky blue?"}'
        body = f'{{"messages": [{message}], "max_tokens": 100}}'
    else:
        path, body = "/v1/completions", '{"prompt": "The sky is", "max_tokens": 50}'
    lines = [f"curl {url}{path}", "-H 'Content-Type: application/json'"]
    if tls is not None:
        lines.append(f"--cacert {shlex.quote(tls.certfile)}")
    if needs_key:
        lines.append("-H 'Authorization: Bearer KEY'")
    return "  " + " \\\n    ".join([*lines, f"-d '{body}'"])


def run_server(
    app: ASGIApp,
    state: Server,
    listener: socket.socket,
    *,
    drain_timeout_s: float,
    tls: Tls | None = None,
) -> int:
    """Serves until SIGTERM or SIGINT; running requests get some time, a second signal ends it.

    Returns how it ended: EXIT_DRAINED, EXIT_CUT, or 128 and the number of the second signal.
    """
    prepare(listener, state.limits.stall_timeout_s)
    server = DrainingServer(
        uvicorn.Config(
            app,
            loop="uvloop",
            http=Connection,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            ssl_certfile=tls.certfile if tls else None,
            ssl_keyfile=tls.keyfile if tls else None,
            ssl_ca_certs=tls.ca_certs if tls else None,
            ssl_cert_reqs=tls.cert_reqs if tls else ssl.CERT_NONE,
        ),
        state,
        drain_timeout_s,
    )
    # Uvicorn takes the signals over only once its loop runs; one that comes before is not lost.
    on_signal(server.handle_exit)
    server.run(sockets=[listener])
    on_signal(signal.SIG_IGN)  # nothing is left to end
    listener.close()
    gc.freeze()  # the process ends: collecting all there is takes 0.3 s of it
    return server.exit_code


def on_signal(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


class EarlyEnd:
    """While the model is read there is nothing to finish: SIGTERM and Ctrl-C end it at once.

    What a handler raises comes to nothing where a destructor runs, so that what was asked for is
    looked at once more between the stages; and it is not raised where it would leave things behind,
    nor twice.
    """

    def __init__(self) -> None:
        self._asked = False
        self._held = False
        on_signal(self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        first, self._asked = not self._asked, True
        if first and not self._held:
            raise SystemExit(0)

    def check(self) -> None:
        if self._asked:
            raise SystemExit(0)

    def hold(self) -> None:
        """Until `release` a signal is noted only."""
        self._held = True

    def release(self) -> None:
        self._held = False
        self.check()
