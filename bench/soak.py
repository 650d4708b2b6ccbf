"""A server under mixed load whose engine is killed again and again: does anything grow or stick?

python bench/soak.py [MODEL] [--minutes 30] [--streams 32] [--kill-every 70]

Streams of all kinds come and go, a quarter of them leave early. Every so often the engine process
is killed or stopped. Some requests are asked for again and again: their answers must be the same to
the byte. At the end: answers, differences, errors, what is left in the engine, and the slope of
each process's resident memory over the second half, when caches are full. Exit code 1 where
something is wrong.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import psutil

REPEATED = 8  # requests whose answers are compared
SAMPLE_S = 2.0
KILLS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV)


@dataclass
class Soak:
    port: int
    end: float
    counts: Counter[str] = field(default_factory=Counter)
    answers: dict[int, str] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def client(self, seed: int) -> None:
        """One stream after another until the end."""
        draw = random.Random(seed)
        while time.monotonic() < self.end:
            known = draw.randrange(REPEATED) if draw.random() < 0.3 else None
            choose = draw if known is None else random.Random(known)
            body = {
                "prompt": [choose.randrange(3, 250) for _ in range(choose.randint(1, 400))],
                "max_tokens": choose.randint(1, 150),
                "temperature": choose.choice([0, 0.8, 1.2]),
                "seed": choose.randrange(1000),
                "ignore_eos": True,
                "stream": known is None and draw.random() < 0.8,
            }
            leaves = known is None and draw.random() < 0.25
            try:
                outcome = self.ask(body, known, leaves)
            except (OSError, http.client.HTTPException) as error:
                outcome = f"error: {type(error).__name__}"
            with self.lock:
                self.counts[outcome] += 1

    def ask(self, body: dict[str, object], known: int | None, leaves: bool) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            headers = {"content-type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            if leaves:
                answer.read(1)
                return "left"
            data = answer.read()
        finally:
            connection.close()
        if answer.status != 200:
            return f"error: {answer.status}"
        if body["stream"]:
            return "stream" if data.endswith(b"data: [DONE]\n\n") else "error: cut stream"
        if known is None:
            return "plain"
        text = json.dumps(json.loads(data)["choices"])
        with self.lock:
            return "same" if self.answers.setdefault(known, text) == text else "DIFFERENT"


def start(model: str) -> tuple[subprocess.Popen[str], int]:
    command = [sys.executable, "-m", "invar.cli.main", "serve", model, "--port", "0"]
    command += ["--kv-store", "off", "--response-store", "off", "--no-access-log"]
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


def slope_mb_per_hour(samples: list[tuple[float, int]]) -> float:
    """Of the second half: (seconds, bytes) by least squares."""
    half = samples[len(samples) // 2 :]
    if len(half) < 3:
        return 0.0
    seconds, size = (np.array(column, float) for column in zip(*half, strict=True))
    return float(np.polyfit(seconds, size, 1)[0] * 3600 / 1e6)


def run(model: str, minutes: float, streams: int, kill_every_s: float) -> int:
    server, port = start(model)
    http_process = psutil.Process(server.pid)
    soak = Soak(port, time.monotonic() + minutes * 60)
    clients = [threading.Thread(target=soak.client, args=(seed,)) for seed in range(streams)]
    for client in clients:
        client.start()
    memory: list[tuple[float, int]] = []
    kills, next_kill = 0, time.monotonic() + kill_every_s
    while time.monotonic() < soak.end:
        time.sleep(SAMPLE_S)
        memory.append((time.monotonic(), http_process.memory_info().rss))
        engines = http_process.children()
        if time.monotonic() > next_kill and engines:
            engines[0].send_signal(KILLS[kills % len(KILLS)])
            kills, next_kill = kills + 1, time.monotonic() + kill_every_s
    for client in clients:
        client.join()
    time.sleep(1)
    left = {
        name: metric(port, f"vllm:{name}")
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    }
    server.send_signal(signal.SIGTERM)
    code = server.wait(60)
    print(f"{model}: {minutes:g} minutes, {streams} clients, the engine killed {kills} times")
    for outcome, count in sorted(soak.counts.items()):
        print(f"  {outcome:<24}{count:>8}")
    print(f"  left in the engine      {left}")
    print(f"  exit code               {code}")
    print(
        f"  HTTP process            {memory[-1][1] / 1e6:.0f} MB resident, "
        f"{slope_mb_per_hour(memory):+.1f} MB an hour over the second half"
    )
    bad = [one for one in soak.counts if one.startswith(("error", "DIFF"))]
    return int(bool(bad) or any(left.values()) or code != 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="tests/golden/llama_gqa.gguf")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--kill-every", type=float, default=70, metavar="SECONDS")
    arguments = parser.parse_args()
    sys.exit(run(arguments.model, arguments.minutes, arguments.streams, arguments.kill_every))


if __name__ == "__main__":
    main()
