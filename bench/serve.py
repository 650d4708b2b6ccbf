"""What serving costs: 32 streams over HTTP beside the same requests in the engine alone.

python bench/serve.py [MODEL] [--streams 32] [--tokens 200] [--runs 3]

The client is a loop over raw sockets that counts bytes; its own CPU time is reported, as it takes
the engine's cores. CPU of the HTTP process is that of the process that listens.
"""

from __future__ import annotations

import argparse
import json
import re
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

import numpy as np
import psutil

from invar.config import EngineConfig
from invar.engine.loader import load_engine
from invar.engine.request import EngineRequest, Sampling

PROMPT_TOKENS = 32


@dataclass
class Figures:
    """Of one run over HTTP."""

    tokens_per_s: float
    http_us: float  # CPU microseconds a delivered token
    engine_us: float
    client_us: float


def prompt(index: int, vocab: int) -> list[int]:
    """No two begin alike: nothing is shared. Special tokens have low ids."""
    dice = np.random.default_rng(index)
    ids: list[int] = dice.integers(vocab // 4, vocab, PROMPT_TOKENS).tolist()
    return ids


def start(model: str, streams: int) -> tuple[subprocess.Popen[str], int]:
    command = [sys.executable, "-m", "invar.cli.main", "serve", model, "--port", "0"]
    command += ["--kv-store", "off", "--response-store", "off", "--max-num-seqs", str(streams)]
    server = subprocess.Popen(
        [*command, "--no-access-log"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert server.stdout is not None
    for line in server.stdout:
        if found := re.search(r"Listening on http://[^:]+:(\d+)", line):
            return server, int(found[1])
    raise SystemExit("the server did not start")


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def drive(port: int, streams: int, tokens: int, seed: int, vocab: int) -> None:
    """Opens all streams at once and reads them to their ends."""
    selector = selectors.DefaultSelector()
    for index in range(streams):
        body = {
            "prompt": prompt(seed * 1000 + index, vocab),
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        data = json.dumps(body).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            f"connection: close\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        client = socket.create_connection(("127.0.0.1", port))
        client.sendall(head.encode() + data)
        client.setblocking(False)
        selector.register(client, selectors.EVENT_READ)
    complete = 0
    while selector.get_map():
        for key, _ in selector.select():
            assert isinstance(key.fileobj, socket.socket)
            data = key.fileobj.recv(1 << 16)
            complete += data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            if not data:
                selector.unregister(key.fileobj)
                key.fileobj.close()
    assert complete == streams, f"{streams - complete} streams ended with an error"


def over_http(model: str, streams: int, tokens: int, runs: int, vocab: int) -> list[Figures]:
    server, port = start(model, streams)
    http = psutil.Process(server.pid)
    (engine,) = http.children()
    myself = psutil.Process()
    figures = []
    drive(port, streams, 8, 999, vocab)
    for run in range(runs):
        before = [cpu_s(one) for one in (http, engine, myself)]
        began = time.perf_counter()
        drive(port, streams, tokens, run, vocab)
        seconds = time.perf_counter() - began
        used = [cpu_s(one) - b for one, b in zip((http, engine, myself), before, strict=True)]
        delivered = streams * tokens
        figures.append(Figures(delivered / seconds, *(1e6 * one / delivered for one in used)))
    server.send_signal(signal.SIGTERM)
    server.wait()
    return figures


def offline(model: str, streams: int, tokens: int, runs: int) -> tuple[list[float], int]:
    """Tokens a second of the engine alone for the same requests, and its vocabulary's size."""
    loaded = load_engine(EngineConfig(model=model, max_num_seqs=streams, paces_prompts=True))
    rates, vocab = [], loaded.info.vocab_size
    for run in range(-1, runs):
        for index in range(streams):
            number = run * 1000 + index if run >= 0 else 10**6 + index
            ids = np.array(prompt(number, vocab), np.int32)
            sampling = Sampling(seed=0, temperature=0.0)
            loaded.engine.add_request(EngineRequest(f"{run}-{index}", ids, tokens, sampling))
        began = time.perf_counter()
        while loaded.engine.has_unfinished:
            loaded.engine.step()
        if run >= 0:
            rates.append(streams * tokens / (time.perf_counter() - began))
    loaded.close()
    return rates, vocab


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):,.0f} ({min(values):,.0f} … {max(values):,.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    words = (arguments.model, arguments.streams, arguments.tokens, arguments.runs)
    print(f"{arguments.model}, {arguments.streams} streams of {arguments.tokens} tokens")
    alone, vocab = offline(*words)
    print(f"engine alone            {spread(alone)} tokens/s", flush=True)
    served = over_http(*words, vocab)
    rates = [one.tokens_per_s for one in served]
    print(f"over HTTP               {spread(rates)} tokens/s")
    less = 1 - statistics.median(rates) / statistics.median(alone)
    print(f"less                    {less:.1%}")
    print(f"HTTP process            {spread([one.http_us for one in served])} µs CPU a token")
    print(f"engine process          {spread([one.engine_us for one in served])} µs CPU a token")
    print(f"client                  {spread([one.client_us for one in served])} µs CPU a token")


if __name__ == "__main__":
    main()
