"""The end of a server: what its clients hear, how long it takes, what is in the log."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from invar.api.response_store import ResponseStore
from invar.cli.listening import EXIT_CUT, EXIT_DRAINED

from .commands import INVAR, Serving, environment, listening, serving

TINY = str(Path(__file__).parents[1] / "golden" / "llama_gqa.gguf")

SIGNALS = [signal.SIGTERM, signal.SIGINT]


@contextmanager
def scripted(
    timeout_s: int, step_s: float = 0.01, context: int = 100_000, *more: str
) -> Iterator[Serving]:
    script = Path(__file__).with_name("scripted_serve.py")
    words = (timeout_s, step_s, context)
    with listening(sys.executable, str(script), *map(str, words), *more) as server:
        yield server


def connect(server: Serving) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def ask(server: Serving, length: int | None = None, **fields: Any) -> socket.socket:
    """An open request, whose body is announced as ``length`` bytes."""
    client = connect(server)
    body = json.dumps({"prompt": "a", "max_tokens": 50_000, **fields}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    client.sendall(f"{head}content-length: {length or len(body)}\r\n\r\n".encode() + body)
    return client


def rest(client: socket.socket) -> bytes:
    data = b""
    while part := client.recv(65536):
        data += part
    return data


def error_of(answer: bytes) -> dict[str, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503")
    assert b"x-request-id: " in head
    assert b"retry-after: " in head
    if b"transfer-encoding: chunked" in head:
        body = body.split(b"\r\n")[1]
    error: dict[str, Any] = json.loads(body)["error"]
    return error


def wait_for_running(server: Serving, choices: int) -> None:
    end = time.monotonic() + 10
    name = "vllm:num_requests_running{"
    while time.monotonic() < end:
        lines = httpx.get(f"{server.url}/metrics").text.splitlines()
        if float(next(line for line in lines if line.startswith(name)).split()[-1]) == choices:
            return
    raise AssertionError("not all requests have come in")


def log_of(server: Serving) -> str:
    time.sleep(0.1)  # the reader of the pipe
    return server.printed()


@pytest.mark.parametrize("number", SIGNALS)
def test_requests_that_are_not_waited_for_hear_it(number: int) -> None:
    with scripted(timeout_s=1) as server:
        stream, whole = ask(server, stream=True), ask(server)
        assert stream.recv(12) == b"HTTP/1.1 200"
        began = time.monotonic()
        assert server.end(number) == 3
        assert time.monotonic() - began < 4
        said = rest(stream)
        last = said.rstrip().split(b"data: ")[-1].split(b"\n")[0]
        assert json.loads(last)["error"]["code"] == "server_shutting_down"
        assert b"[DONE]" not in said
        assert b'"finish_reason":"' not in said
        assert said.endswith(b"0\r\n\r\n")
        assert error_of(rest(whole))["code"] == "server_shutting_down"
        assert "Traceback" not in log_of(server)
        assert "Exception" not in log_of(server)


def test_requests_that_end_in_time_are_whole() -> None:
    with scripted(timeout_s=20) as server:
        stream = ask(server, stream=True, max_tokens=100)
        assert stream.recv(12) == b"HTTP/1.1 200"
        assert server.end() == 0
        said = rest(stream)
        assert b'"finish_reason":"length"' in said
        assert b"[DONE]" in said


@pytest.mark.parametrize("number", SIGNALS)
def test_a_second_signal_ends_at_once(number: int) -> None:
    with scripted(timeout_s=60) as server:
        stream, whole = ask(server, stream=True), ask(server)
        assert stream.recv(12) == b"HTTP/1.1 200"
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert server.process.poll() is None
        began = time.monotonic()
        assert server.end(number) == 128 + number
        assert time.monotonic() - began < 2
        assert b"server_shutting_down" in rest(stream)
        assert error_of(rest(whole))["code"] == "server_shutting_down"
        assert "Traceback" not in log_of(server)


def test_a_second_signal_does_not_wait_for_a_long_step() -> None:
    with scripted(timeout_s=1, step_s=60) as server:
        whole = ask(server)
        time.sleep(0.5)
        server.process.send_signal(signal.SIGTERM)
        assert error_of(rest(whole))["code"] == "server_shutting_down"
        began = time.monotonic()
        assert server.end() == 128 + signal.SIGTERM
        assert time.monotonic() - began < 4


def test_a_body_that_does_not_come_holds_nothing_up() -> None:
    with scripted(timeout_s=60) as server:
        partial, head = ask(server, length=10_000), connect(server)
        head.sendall(b"GET /health HTTP/1.1\r\nhos")
        time.sleep(0.3)
        began = time.monotonic()
        assert server.end() == 0
        assert time.monotonic() - began < 4
        assert error_of(rest(partial))["code"] == "server_shutting_down"
        assert rest(head) == b""
        assert "Traceback" not in log_of(server)


def test_a_reader_that_has_stopped_holds_nothing_up() -> None:
    with scripted(timeout_s=1, step_s=0) as server:
        stuck = ask(server, stream=True, n=20, temperature=1)
        time.sleep(2)  # until no more can be sent
        began = time.monotonic()
        assert server.end() == 3
        assert time.monotonic() - began < 4
        assert b"[DONE]" not in rest(stuck)
        assert "Traceback" not in log_of(server)


@pytest.mark.parametrize("number", SIGNALS)
def test_b92_a_server_that_drains_says_so_at_once(number: int) -> None:
    with scripted(timeout_s=20) as server, httpx.Client(base_url=server.url) as http:
        assert http.get("/ready").status_code == 200
        stream = ask(server, stream=True, max_tokens=300)
        assert stream.recv(12) == b"HTTP/1.1 200"
        server.process.send_signal(number)
        end = time.monotonic() + 5
        while http.get("/ready").status_code == 200:
            assert time.monotonic() < end
        for path, status in (("/ready", 503), ("/health", 200), ("/metrics", 200)):
            assert httpx.get(server.url + path).status_code == status
        for fields in ({}, {"stream": True}):
            late = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", **fields})
            assert late.status_code == 503
            assert late.json()["error"]["code"] == "server_shutting_down"
            assert late.headers["connection"] == "close"
            assert int(late.headers["retry-after"]) > 0
        said = rest(stream)  # the one that ran is whole
        assert b"[DONE]" in said
        assert b'"finish_reason":"length"' in said
        assert server.process.wait(10) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")


@pytest.mark.parametrize(("timeout_s", "code"), [(0, 3), (1, 3), (30, 0)])
def test_b92_signals_at_every_stage(timeout_s: int, code: int) -> None:
    """Streams and plain requests: each is told, or is whole."""
    with scripted(timeout_s=timeout_s) as server:
        length = 50_000 if code else 40
        clients = [ask(server, stream=i < 3, n=1 + i % 2, max_tokens=length) for i in range(6)]
        wait_for_running(server, 9)
        began = time.monotonic()
        assert server.end() == code
        assert time.monotonic() - began < timeout_s + 4
        for client in clients:
            said = rest(client)
            if code:
                assert b"server_shutting_down" in said
                assert b"[DONE]" not in said
            else:
                assert b'"finish_reason":"length"' in said
        assert "Traceback" not in log_of(server)


def test_b92_an_idle_server_ends_at_once_and_frees_its_port() -> None:
    with scripted(timeout_s=60) as server:
        idle, silent = connect(server), connect(server)
        idle.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert idle.recv(12) == b"HTTP/1.1 200"
        began = time.monotonic()
        assert server.end() == 0
        assert time.monotonic() - began < 3
        assert silent.recv(1) == b""
        host, port = server.url.removeprefix("http://").split(":")
        with socket.socket() as again:
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind((host, int(port)))


@pytest.mark.parametrize(("words", "signals", "codes"), [
    (["--drain-timeout", "30", "--api-server-count", "2"], [signal.SIGTERM], {0}),
    (["--drain-timeout", "0"], [signal.SIGTERM], {3}),
    (["--drain-timeout", "30"], [signal.SIGINT, signal.SIGINT], {130}),
    (["--drain-timeout", "30", "--api-server-count", "2"], [signal.SIGINT, signal.SIGINT], {130}),
])  # fmt: skip
def test_b92_nothing_is_left_of_the_real_one(
    words: list[str], signals: list[int], codes: set[int]
) -> None:
    """With its engine, and the HTTP processes of a larger one."""
    with serving(TINY, *words) as server:
        length = 2000 if codes != {0} else 400
        family = psutil.Process(server.process.pid).children(recursive=True)
        fields = {"prompt": [3, 4], "max_tokens": length, "ignore_eos": True, "temperature": 1}
        clients = [ask(server, stream=True, **fields) for _ in range(4)]
        for client in clients:
            assert client.recv(12) == b"HTTP/1.1 200"
        for number in signals:
            server.process.send_signal(number)
            time.sleep(0.2)
        assert server.process.wait(30) in codes
        for client in clients:
            said = rest(client)
            assert (b"[DONE]" in said) == (codes == {0})
            assert (b"server_shutting_down" in said) == (codes != {0})
        _, alive = psutil.wait_procs(family, timeout=5)
        assert not alive
        assert "Traceback" not in log_of(server)


@pytest.mark.parametrize(
    ("timeout_s", "status", "code"), [(30, "incomplete", EXIT_DRAINED), (1, "failed", EXIT_CUT)]
)
def test_responses_in_the_background_are_waited_for(
    timeout_s: int, status: str, code: int, tmp_path: Path
) -> None:
    with scripted(timeout_s, 0.01, 100_000, str(tmp_path)) as server:
        limit = 150 if code == EXIT_DRAINED else 90_000
        body = {"input": "a", "background": True, "max_output_tokens": limit}
        begun = httpx.post(f"{server.url}/v1/responses", json=body).json()
        assert server.end() == code
    store = ResponseStore(str(tmp_path))
    kept = asyncio.run(store.get("", begun["id"]))
    store.close()
    assert kept is not None
    assert kept.response["status"] == status
    if status == "failed":
        assert "shutting down" in kept.response["error"]["message"]


EARLY_SIGNAL = """
import runpy, signal, sys, uvicorn
factory = uvicorn.Config.get_loop_factory
def signalled(config):
    signal.raise_signal(signal.SIGTERM)
    return factory(config)
uvicorn.Config.get_loop_factory = signalled
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_b92_a_signal_before_the_loop_runs_is_not_lost() -> None:
    script = str(Path(__file__).with_name("scripted_serve.py"))
    command = [sys.executable, "-c", EARLY_SIGNAL, script, "20", "0.01", "1000"]
    ended = subprocess.run(command, env=environment(), capture_output=True, timeout=60, check=False)
    assert ended.returncode == EXIT_DRAINED
    assert b"Traceback" not in ended.stderr


# SIGTERM at places where what its handler raises comes to nothing, or leaves something behind.
SIGNAL_IN_A_DESTRUCTOR = """
import signal, sys
from invar.cli.main import main
from invar.engine import loader
class Signals:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)
load = loader.load_text_alone
def load_with_signal(config):
    Signals()
    return load(config)
loader.load_text_alone = load_with_signal
sys.exit(main())
"""
SIGNAL_WHILE_STARTING = """
import signal, sys
from invar.cli.main import main
from invar.serving import supervisor
class Signalled(supervisor.RunFolder):
    def __init__(self):
        super().__init__()
        signal.raise_signal(signal.SIGTERM)
supervisor.RunFolder = Signalled
sys.exit(main())
"""
SIGNAL_WHILE_ENDING = """
import signal, sys
from invar.cli.main import main
from invar.serving.supervisor import Supervisor
close = Supervisor.close
def close_with_signals(self):
    signal.raise_signal(signal.SIGTERM)
    close(self)
    signal.raise_signal(signal.SIGINT)
Supervisor.close = close_with_signals
def fail(self):
    raise ValueError("no engine")
Supervisor.wait_ready = fail
sys.exit(main())
"""


@pytest.mark.parametrize(("script", "code"), [
    (SIGNAL_IN_A_DESTRUCTOR, 0), (SIGNAL_WHILE_STARTING, 0), (SIGNAL_WHILE_ENDING, 1),
])  # fmt: skip
def test_b92_a_signal_at_a_bad_moment(script: str, code: int, tmp_path: Path) -> None:
    words = ["serve", TINY, "--port", "0", "--kv-store", "off", "--response-store", "off"]
    ended = subprocess.run(
        [sys.executable, "-c", script, *words],
        env=environment() | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == code, ended.stderr
    assert not list(tmp_path.iterdir())


def test_b92_a_signal_while_the_model_is_read_leaves_nothing() -> None:
    command = [*INVAR, "serve", TINY, "--port", "0", "--kv-store", "off", "--response-store", "off"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, env=environment(), stdout=pipe, stderr=subprocess.STDOUT)
    family: list[psutil.Process] = []
    end = time.monotonic() + 30
    while not family and time.monotonic() < end:  # until the engine's process is there
        family = psutil.Process(process.pid).children(recursive=True)
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert b"Traceback" not in said
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not alive
