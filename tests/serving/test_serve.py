"""`invar serve` and its processes: one dies, and which others must not notice, or must end too."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
from cli.commands import Serving, listening, serving

from invar.cli.serve import EXIT_ENGINE_DEAD
from invar.serving.run_folder import sweep

from .served_engine import TINY

WORDS = (str(TINY), "--response-store", "off", "--max-num-seqs", "16")


@contextmanager
def tiny_server(*words: str) -> Iterator[Serving]:
    """Ends with nothing of it left: no process, no folder."""
    with serving(*WORDS, *words) as server:
        main = psutil.Process(server.process.pid)
        (lock,) = [Path(one.path) for one in main.open_files() if one.path.endswith("/lock")]
        assert lock.parent.stat().st_mode & 0o777 == 0o700
        family = main.children(recursive=True)
        yield server
        if server.process.poll() is None:
            family += main.children(recursive=True)
            assert server.end() == 0
            assert not lock.parent.exists()
    _, alive = psutil.wait_procs(family, 5)
    assert not alive
    sweep(lock.parents[1])  # as the next server does after one that was killed
    assert not lock.parent.exists()


def children(server: Serving, module: str = "") -> list[psutil.Process]:
    found = []
    for one in psutil.Process(server.process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # zombies are among these
            if module in " ".join(one.cmdline()):
                found.append(one)
    return found


def engine_of(server: Serving) -> psutil.Process:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        if found := children(server, "engine_process"):
            return found[0]
        time.sleep(0.01)
    raise AssertionError(server.printed())


def stream(url: str, index: int, on_event: Any = lambda: None) -> bytes:
    """What a client reads of a stream, but for its id and time."""
    body = {
        "prompt": [3 + index] * (5 + 13 * index % 70),
        "max_tokens": 60,
        "seed": index,
        "temperature": 0.9 * (index % 3),
        "ignore_eos": True,
        "logprobs": 1 if index % 2 else None,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    pieces = []
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                del event["id"], event["created"]
                event.pop("usage") if not event["choices"] else None
                pieces.append(event)
                on_event()
    return joined(pieces)


def joined(events: list[dict[str, Any]]) -> bytes:
    """Steps may come one by one or together: the answer as a whole."""
    text, tokens, logprobs = "", [], []
    for event in events:
        for choice in event["choices"]:
            text += choice["text"]
            scores = choice["logprobs"] or {"tokens": [], "token_logprobs": []}
            tokens += scores["tokens"]
            logprobs += scores["token_logprobs"]
    return json.dumps([text, tokens, logprobs, events[-2]["choices"][0]["finish_reason"]]).encode()


def test_two_http_processes_share_an_engine_that_is_killed() -> None:
    with tiny_server("--api-server-count", "2") as server, ThreadPoolExecutor(32) as pool:
        expected = list(pool.map(lambda index: stream(server.url, index), range(32)))
        count, lock = 0, threading.Lock()

        def on_event() -> None:
            nonlocal count
            with lock:
                count += 1
                if count == 200:
                    engine_of(server).kill()

        again = list(pool.map(lambda index: stream(server.url, index, on_event), range(32)))
        assert again == expected
        assert len(children(server, "api_processes")) == 2
        # One of them dies: the other answers, and soon there are two again.
        children(server, "api_processes")[0].kill()
        assert stream(server.url, 1) == expected[1]
        end = time.monotonic() + 20
        while len(children(server, "api_processes")) < 2:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert stream(server.url, 2) == expected[2]


# No other one comes in the place of an HTTP process that has died.
NEVER_AGAIN = """
import sys
from invar.cli import api_processes, main
api_processes.RESTART_PAUSE_S = 1000
sys.exit(main.main())
"""


def test_an_http_process_that_is_killed_leaves_no_slot_of_a_key_taken(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    file.write_text('{"keys": [{"name": "a", "key": "sk-a", "max_parallel_requests": 2}]}')
    words = [*WORDS, "--port", "0", "--kv-store", "off", "--api-server-count", "2"]
    command = [sys.executable, "-c", NEVER_AGAIN, "serve", *words, "--api-key-file", str(file)]
    body = {"prompt": [3, 4], "max_tokens": 2000, "ignore_eos": True, "stream": True}
    headers = {"authorization": "Bearer sk-a"}
    with listening(*command) as server, httpx.Client(headers=headers, timeout=60) as http:
        url = f"{server.url}/v1/completions"

        def is_full() -> bool:
            fields = body | {"stream": False, "max_tokens": 1}
            return httpx.post(url, headers=headers, json=fields, timeout=60).status_code == 429

        with http.stream("POST", url, json=body), http.stream("POST", url, json=body):
            assert is_full()
            processes = children(server, "api_processes")
            next(one for one in processes if serves(one)).kill()
            end = time.monotonic() + 10
            while is_full():
                assert time.monotonic() < end
        assert server.end() == 0


def serves(process: psutil.Process) -> bool:
    return any(one.status == psutil.CONN_ESTABLISHED for one in process.net_connections("tcp"))


def test_a_server_whose_main_process_stands_still_serves_and_is_not_ready() -> None:
    with tiny_server("--api-server-count", "2") as server, contextlib.ExitStack() as stack:
        clients = connected_to_all(server, stack)

        def wait_for(status: int, message: str = "") -> None:
            end = time.monotonic() + 30
            for client in clients:
                while (answer := client.get("/ready")).status_code != status:
                    assert time.monotonic() < end
                    time.sleep(0.1)
                assert message in answer.text

        wait_for(200)
        expected = stream(server.url, 1)
        os.kill(server.process.pid, signal.SIGSTOP)
        wait_for(503, "not watched")
        assert stream(server.url, 1) == expected
        # An engine that dies meanwhile is replaced when somebody looks again.
        engine_of(server).kill()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(stream, server.url, 1)
            time.sleep(0.5)
            os.kill(server.process.pid, signal.SIGCONT)
            assert waiting.result(60) == expected
        wait_for(200)


def connected_to_all(server: Serving, stack: contextlib.ExitStack) -> list[httpx.Client]:
    """Clients whose connections are open, to each of the two HTTP processes one at least."""
    clients: list[httpx.Client] = []
    while sum(serves(one) for one in children(server, "api_processes")) < 2:
        client = httpx.Client(base_url=server.url, timeout=30)
        clients.append(stack.enter_context(client))
        client.get("/health")
    return clients


def test_everything_ends_with_the_main_process() -> None:
    with tiny_server() as server:
        engine = engine_of(server)
        os.kill(engine.pid, signal.SIGSTOP)  # also where it could not notice by itself
        server.process.kill()
        server.process.wait(10)
        _, alive = psutil.wait_procs([engine], 5)
        assert not alive


def test_a_crash_loop_ends_the_server_with_a_code_of_its_own() -> None:
    with tiny_server() as server:
        killed = set()
        while server.process.poll() is None:
            for engine in children(server, "engine_process"):
                ready = is_ready(server.url)
                if engine.pid not in killed and ready:
                    killed.add(engine.pid)
                    engine.kill()
            time.sleep(0.05)
        assert server.process.wait() == EXIT_ENGINE_DEAD
        assert len(killed) == 5
        assert "crashed 5 times" in server.printed()


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=5).status_code == 200
    except httpx.TransportError:
        return False
