"""Two HTTP processes and an engine that dies: totals are exact, and never go backwards."""

from __future__ import annotations

import json
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import psutil
from cli.commands import Serving, serving

from .exposed import samples

TINY = str(Path(__file__).parents[1] / "golden" / "llama_gqa.gguf")
TOKENS = 6
BODY = {"prompt": [3 + n for n in range(40)], "max_tokens": TOKENS, "ignore_eos": True}
WATCHED = ("_total", "_count", "_sum", "_bucket")


class Watcher:
    """Scrapes over new connections, so that either process answers."""

    def __init__(self, server: Serving) -> None:
        self.server = server
        self.last: dict[str, float] = {}

    def scrape(self) -> dict[str, float]:
        with urlopen(f"{self.server.url}/metrics", timeout=20) as answer:
            found = samples(answer.read())
        for series, value in found.items():
            if series.partition("{")[0].endswith(WATCHED):
                assert value >= self.last.get(series, 0.0), series
        assert {s for s in self.last if "{" in s} <= found.keys()
        self.last = found
        return found

    def until(self, name: str, value: float) -> None:
        """By then every process has heard of it."""
        end, seen = time.monotonic() + 20, 0
        while seen < 6:
            seen = seen + 1 if self.sum(name) == value else 0
            assert time.monotonic() < end, f"{name} is {self.sum(name)}, not {value}"

    def sum(self, name: str) -> float:
        return sum(v for s, v in self.scrape().items() if s.partition("{")[0] == name)


def complete(server: Serving, calls: int) -> None:
    for _ in range(calls):
        request = Request(f"{server.url}/v1/completions", json.dumps(BODY).encode())
        request.add_header("content-type", "application/json")
        with urlopen(request, timeout=60) as answer:
            assert answer.status == 200


def processes(server: Serving, what: str) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(server.process.pid).children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            if any(what in word for word in child.cmdline()):
                found.append(child)
    return found


def access_lines(server: Serving) -> list[dict[str, Any]]:
    return [json.loads(line) for line in server.lines if line.startswith('{"time"')]


def test_totals_over_processes_and_restarts() -> None:
    with serving(TINY, "--api-server-count", "2") as server:
        watcher = Watcher(server)
        complete(server, 4)
        watcher.until("vllm:generation_tokens_total", 4 * TOKENS)
        watcher.until("vllm:request_success_total", 4)
        watcher.until("vllm:prompt_tokens_by_source_total", 4 * 40)  # the engine's, not twice
        watcher.until("invar:engine_starts_total", 1)
        (engine,) = processes(server, "engine_process")
        engine.send_signal(signal.SIGKILL)
        complete(server, 2)
        watcher.until("invar:engine_starts_total", 2)
        watcher.until("vllm:generation_tokens_total", 6 * TOKENS)
        watcher.until("vllm:prompt_tokens_by_source_total", 6 * 40)
        https = processes(server, "api_processes")
        assert len(https) == 2
        https[0].send_signal(signal.SIGKILL)
        end = time.monotonic() + 20
        while set(processes(server, "api_processes")) <= set(https):
            assert time.monotonic() < end
            time.sleep(0.05)
        complete(server, 3)
        watcher.until("vllm:generation_tokens_total", 9 * TOKENS)
        watcher.until("vllm:prompt_tokens_by_source_total", 9 * 40)
        watcher.until("invar:engine_starts_total", 2)
        assert watcher.sum("vllm:num_requests_running") == 0
        server.end()
    lines = [line for line in access_lines(server) if line["route"] == "/v1/completions"]
    assert [line["output_tokens"] for line in lines] == 9 * [TOKENS]
    assert len({line["request_id"] for line in lines}) == 9
