"""The listening socket, what is printed at start, and a clean end."""

from __future__ import annotations

import errno
import ipaddress
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from starlette.types import ASGIApp

from invar.api.protocol import Connection
from invar.backends.runner import PAGE_TOKENS
from invar.cli.tables import memory_table, size_text

if TYPE_CHECKING:
    from invar.engine.loader import LoadedModel

BACKLOG = 2048
# Clients that keep connections open must not meet a server that is just closing one: longer than
# the idle times of usual pools and proxies (a minute).
KEEP_ALIVE_S = 75
# After a second signal: an engine in the middle of a long step is not waited for.
FORCED_END_S = 2.0


class DrainingServer(uvicorn.Server):
    """Ends with its running requests on the first signal, and at once on a second one."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and not self.force_exit:
            self.force_exit = True
            watch = threading.Timer(FORCED_END_S, os._exit, (1,))
            watch.daemon = True
            watch.start()
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Requests that are not waited for are cancelled, which they tell their clients."""
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn does neither then
            for task in self.server_state.tasks:
                task.cancel()
            await self.lifespan.shutdown()


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
    loaded: LoadedModel, names: Sequence[str], listener: socket.socket, *, needs_key: bool
) -> None:
    """What the model takes, where it is, and a command that works.

    From here on the socket listens: who types the command at once waits, and is not turned away.
    """
    listener.listen(BACKLOG)
    host, port = listener.getsockname()[:2]
    reachable = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)
    if ":" in reachable and not reachable.startswith("["):
        reachable = f"[{reachable}]"
    config = loaded.config
    print(f"Invar serves {', '.join(names)} ({loaded.path.name})")
    print(memory_table(loaded.memory_table))
    print(
        f"  {loaded.door.max_model_len} tokens a request, {config.max_num_seqs} requests together, "
        f"{config.max_num_batched_tokens} tokens a step"
    )
    print(f"  {kv_store(loaded)}")
    print(f"\nListening on http://{reachable}:{port}   (Ctrl-C ends)\n")
    print(curl(f"http://{reachable}:{port}", loaded.chat_template is not None, needs_key))
    sys.stdout.flush()


def kv_store(loaded: LoadedModel) -> str:
    """Where prompts are kept, since they are what users wrote."""
    store = loaded.engine.page_store
    if store is None:
        return "KV store: none, nothing of a prompt is kept on disk"
    limit = f"up to {size_text(store.size)}" if store.writer is not None else "which is only read"
    tokens = store.num_pages * PAGE_TOKENS
    return f"KV store: {store.folder.parent}, {limit}; {tokens} tokens of earlier prompts are there"


def curl(url: str, chats: bool, needs_key: bool) -> str:
    """A request that works as it stands; a key is left to be filled in, as logs are kept."""
    if chats:
        path = "/v1/chat/completions"
        message = '{"role": "user", "content": "Why is the sky blue?"}'
        body = f'{{"messages": [{message}], "max_tokens": 100}}'
    else:
        path, body = "/v1/completions", '{"prompt": "The sky is", "max_tokens": 50}'
    lines = [f"curl {url}{path}", "-H 'Content-Type: application/json'"]
    if needs_key:
        lines.append("-H 'Authorization: Bearer KEY'")
    return "  " + " \\\n    ".join([*lines, f"-d '{body}'"])


def run_server(app: ASGIApp, listener: socket.socket, *, shutdown_timeout_s: int) -> None:
    """Serves until SIGTERM or SIGINT; running requests get some time, a second signal ends it."""
    server = DrainingServer(
        uvicorn.Config(
            app,
            loop="uvloop",
            http=Connection,
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=shutdown_timeout_s,
        )
    )
    # Once the server has stopped there is nothing left to end.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, ignore)
    server.run(sockets=[listener])
    listener.close()


def end_on_signal() -> None:
    """While the model is read there is nothing to finish: SIGTERM and Ctrl-C end it at once."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, leave)


def leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


def ignore(number: int, frame: FrameType | None) -> None:
    return None
