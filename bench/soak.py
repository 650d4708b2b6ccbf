"""A server under mixed load whose engine is killed again and again: does anything grow or stick?

python bench/soak.py [MODEL] [--minutes 30] [--streams 32] [--kill-every 80] [--api-server-count 1]

Requests of all kinds come and go, a quarter of the clients leave early. Some are asked for again
and again, as streams and plain: their text must be the one they had from an idle server. In the
first half the engine process is killed, stopped or crashed every so often; in the second it is left
alone. Of each half the first third is warming up. What is reported of each process is the slope of
its resident memory over the rest of a half, by least squares through the means of ten pieces, with
twice the standard error of that; within it of 0 it is none. A minute of memory says nothing of an
hour, so that windows below JUDGED_S are shown and not judged. (Each start of an engine costs the
HTTP process some 40 kB: the totals of all engines before it.)

Exit code 1 where something is wrong: an error, another text, something left in the engine, a
process that is left, or memory that grows by more than GROWTH beyond the error.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import psutil

from invar.serving.supervisor import CRASH_WINDOW_S, CRASHES, HANG_LIMIT_S

REPEATED = 8  # requests whose answers are compared
SAMPLE_S = 1.0
KILLS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV)
# Kills at shorter distances would be the crash loop that ends a server; a hang is seen late.
LEAST_PAUSE_S = CRASH_WINDOW_S / (CRASHES - 1) + HANG_LIMIT_S + 1
PIECES = 10  # of a window: neighbouring samples are not independent, their means nearly are
GROWTH = 5.0  # MB an hour: a process that has it for a month needs 3.6 GB
JUDGED_S = 300.0
# Small enough to be full of cached prefixes within minutes: until then the engine's pages of KV,
# which are planned, become resident one by one.
KV_BYTES = 32 << 20


@dataclass
class Soak:
    port: int
    end: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    answers: dict[int, str] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def learn(self) -> None:
        """What the repeated requests answer while nothing else is there."""
        for known in range(REPEATED):
            self.answers[known] = self.text(body_of(random.Random(known)), stream=False)

    def client(self, seed: int) -> None:
        """One request after another until the end."""
        draw = random.Random(seed)
        while time.monotonic() < self.end:
            known = draw.randrange(REPEATED) if draw.random() < 0.3 else None
            body = body_of(draw if known is None else random.Random(known))
            stream = draw.random() < 0.7
            try:
                if known is None and draw.random() < 0.35:
                    outcome = self.leave(body, stream, draw.random() * 0.3)
                else:
                    text = self.text(body, stream=stream)
                    kind = "stream" if stream else "plain"
                    same = known is None or text == self.answers[known]
                    outcome = f"{kind}{'' if known is None else ', repeated'}"
                    outcome = outcome if same else f"DIFFERENT: {kind}"
            except (OSError, http.client.HTTPException, ValueError) as error:
                outcome = f"error: {type(error).__name__} {str(error)[:60]}"
            with self.lock:
                self.counts[outcome] += 1

    def text(self, body: dict[str, object], *, stream: bool) -> str:
        """Raises ValueError where there is no whole answer."""
        connection = self.send(body, stream)
        try:
            answer = connection.getresponse()
            data = answer.read()
        finally:
            connection.close()
        if answer.status != 200:
            raise ValueError(f"{answer.status} {data[:60]!r}")
        if not stream:
            return str(json.loads(data)["choices"][0]["text"])
        events = [line[6:] for line in data.split(b"\n") if line.startswith(b"data: ")]
        if events.pop() != b"[DONE]":
            raise ValueError("cut stream")
        return "".join(json.loads(event)["choices"][0]["text"] for event in events)

    def leave(self, body: dict[str, object], stream: bool, after_s: float) -> str:
        """A client that does not stay: while it waits, or in the midst of a stream."""
        connection = self.send(body, stream)
        try:
            if stream:
                connection.getresponse().read(1)
            time.sleep(after_s)
        finally:
            connection.close()
        return "left"

    def send(self, body: dict[str, object], stream: bool) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        headers = {"content-type": "application/json"}
        text = json.dumps({**body, "stream": stream})
        connection.request("POST", "/v1/completions", text, headers)
        return connection


def body_of(draw: random.Random) -> dict[str, object]:
    return {
        "prompt": [draw.randrange(3, 250) for _ in range(draw.randint(1, 400))],
        "max_tokens": draw.randint(1, 150),
        "temperature": draw.choice([0, 0.8, 1.2]),
        "seed": draw.randrange(1000),
        "ignore_eos": True,
    }


@dataclass(frozen=True)
class Sample:
    seconds: float
    resident: int  # bytes
    files: int  # open descriptors


class Watch:
    """What each process of a server has: by what it is and its id, since engines come and go."""

    def __init__(self, server: psutil.Process) -> None:
        self.server = server
        self.samples: dict[tuple[str, int], list[Sample]] = defaultdict(list)

    def look(self) -> None:
        for process in (self.server, *self.server.children()):
            name = self.name(process)
            try:
                memory, files = process.memory_info().rss, process.num_fds()
            except psutil.Error:
                continue  # it is just ending
            sample = Sample(time.monotonic(), memory, files)
            self.samples[name, process.pid].append(sample)

    def name(self, process: psutil.Process) -> str:
        try:
            words = " ".join(process.cmdline())
        except psutil.Error:
            return "ended"
        known = {"engine_process": "engine", "api_processes": "HTTP"}
        return next((name for word, name in known.items() if word in words), "main")

    def engine(self) -> psutil.Process | None:
        found = [one for one in self.server.children() if self.name(one) == "engine"]
        return found[0] if found else None

    def report(self, title: str, begin: float, end: float) -> Iterable[str]:
        """Prints of each process that was there for all of a window; yields what grows."""
        print(f"  {title}")
        for (name, pid), samples in sorted(self.samples.items()):
            window = [one for one in samples if begin <= one.seconds <= end]
            if len(window) < 3 * PIECES or window[-1].seconds - window[0].seconds < 0.9 * (
                end - begin
            ):
                continue
            slope, error = slope_mb_per_hour(window)
            first, last = window[0], window[-1]
            print(
                f"    {name + ' ' + str(pid):<16}{first.resident / 1e6:7.1f} → "
                f"{last.resident / 1e6:.1f} MB, {slope:+.1f} ± {error:.1f} MB an hour, "
                f"{first.files} → {last.files} open files"
            )
            if end - begin >= JUDGED_S and slope - error > GROWTH:
                yield f"{name} grows"


def slope_mb_per_hour(samples: list[Sample]) -> tuple[float, float]:
    """The slope and twice its standard error."""
    pieces = np.array_split(np.array([(one.seconds, one.resident) for one in samples]), PIECES)
    hours, size = np.array([piece.mean(axis=0) for piece in pieces]).T / [[3600], [1e6]]
    hours = hours - hours.mean()
    slope = (hours @ size) / (hours @ hours)
    residual = size - size.mean() - slope * hours
    error = np.sqrt((residual @ residual) / (PIECES - 2) / (hours @ hours))
    return float(slope), float(2 * error)


def start(model: str, http_processes: int) -> tuple[subprocess.Popen[str], int]:
    command = [sys.executable, "-m", "invar.cli.main", "serve", model, "--port", "0"]
    command += ["--kv-store", "off", "--response-store", "off", "--no-access-log"]
    command += ["--kv-cache-memory-bytes", str(KV_BYTES)]
    command += ["--api-server-count", str(http_processes)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    for line in server.stdout:
        if found := re.search(r"Listening on http://[^:]+:(\d+)", line):
            return server, int(found[1])
    raise SystemExit("the server did not start")


def metric(port: int, name: str) -> float:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))


def load(soak: Soak, watch: Watch, minutes: float, streams: int, kill_every_s: float) -> int:
    """Returns how often the engine was killed."""
    began = time.monotonic()
    soak.end, half = began + minutes * 60, began + minutes * 30
    clients = [
        threading.Thread(target=soak.client, args=(seed,), daemon=True) for seed in range(streams)
    ]
    for client in clients:
        client.start()
    kills, next_kill = 0, began + kill_every_s
    while time.monotonic() < soak.end:
        time.sleep(SAMPLE_S)
        if watch.server.status() == psutil.STATUS_ZOMBIE:
            raise SystemExit("the server has ended by itself")
        watch.look()
        engine = watch.engine()
        if next_kill < time.monotonic() < half and engine is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                engine.send_signal(KILLS[kills % len(KILLS)])
            kills, next_kill = kills + 1, time.monotonic() + kill_every_s
    for client in clients:
        client.join()
    return kills


def run(arguments: argparse.Namespace) -> int:
    server, port = start(arguments.model, arguments.api_server_count)
    try:
        return judged(arguments, server, port)
    finally:
        server.kill()


def judged(arguments: argparse.Namespace, server: subprocess.Popen[str], port: int) -> int:
    watch = Watch(psutil.Process(server.pid))
    soak = Soak(port)
    soak.learn()
    kills = load(soak, watch, arguments.minutes, arguments.streams, arguments.kill_every)
    time.sleep(1)
    left = {
        name: metric(port, f"vllm:{name}")
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    }
    family = watch.server.children(recursive=True)
    server.send_signal(signal.SIGTERM)
    code = server.wait(60)
    _, alive = psutil.wait_procs(family, timeout=5)
    print(
        f"{arguments.model}: {arguments.minutes:g} minutes, {arguments.streams} clients, "
        f"the engine killed {kills} times"
    )
    for outcome, count in sorted(soak.counts.items()):
        print(f"  {outcome:<40}{count:>8}")
    print(f"  left in the engine      {left}")
    print(f"  exit code               {code}, {len(alive)} processes left")
    third = arguments.minutes * 10
    bad = [one for one in soak.counts if one.startswith(("error", "DIFF"))]
    killed_until = soak.end - 3 * third
    bad += watch.report("while the engine is killed", killed_until - 2 * third, killed_until)
    bad += watch.report("while nothing is killed", soak.end - 2 * third, soak.end)
    if any(left.values()) or code or alive:
        bad.append("something is left")
    print("  all is well" if not bad else f"  WRONG: {', '.join(bad)}")
    return int(bool(bad))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="tests/golden/llama_gqa.gguf")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--kill-every", type=float, default=80, metavar="SECONDS")
    parser.add_argument("--api-server-count", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.kill_every < LEAST_PAUSE_S:
        parser.error(
            f"--kill-every: below {LEAST_PAUSE_S:.0f} s the server ends at the fifth, as it should"
        )
    sys.exit(run(arguments))


if __name__ == "__main__":
    main()
