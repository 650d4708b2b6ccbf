"""Engines that share cores, and one core against two.

    python bench/cores.py MODEL.gguf [--runs 5] [--seconds 3] [--json]

Two engines: two processes on the same cores decode one stream each, first one alone, then both at
once, in turn; a rate counts against the lone rate of the same turn. llama.cpp does the same with
`llama-bench`. One core against two: the same process under an affinity mask of one core, then of
two: prefill of 512 tokens, decode, the DRAM read rate, and a hash of what was answered, logprobs
included, which must be equal.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import llama_cpp


class Worker:
    """An engine in a process of its own, on the given cores; it obeys a line at a time."""

    def __init__(self, model: Path, cores: set[int]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(model), "--worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
        self.answer()  # loaded

    def ask(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def work(model_path: Path) -> None:
    """The worker's side: `decode SECONDS`, `prefill`, `dram` or `answer`; a line of JSON each."""
    import numpy as np

    from invar.backends.cpu.memory import usable_threads
    from invar.config import EngineConfig
    from invar.engine.loader import load_engine
    from invar.engine.sampling_params import SamplingParams
    from invar.measure.engine import PEAK_SLICE_S, PREFILL_TOKENS, PROMPT_TOKENS, READ_SLICE_S
    from invar.measure.limits import Limits

    config = EngineConfig(
        model=str(model_path), max_model_len=8192, max_num_seqs=4, enable_prefix_caching=False
    )
    model = load_engine(config)
    engine = model.engine
    limits = Limits(usable_threads(), PEAK_SLICE_S, READ_SLICE_S)
    random = np.random.default_rng(0)

    def start(prompt_tokens: int, output_tokens: int, **options: Any) -> str:
        params = SamplingParams(max_tokens=output_tokens, ignore_eos=True, **options)
        prompt = random.integers(0, model.info.vocab_size, prompt_tokens)
        (request,) = model.door.resolve("bench", prompt, params)
        engine.add_request(request)
        return request.id

    def decode(seconds: float) -> float:
        request = start(PROMPT_TOKENS, 8192 - PROMPT_TOKENS, temperature=0)
        while not engine.step():
            pass
        began, tokens = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - began) < seconds:
            tokens += len(engine.step())
        engine.abort(request)
        return tokens / elapsed

    def prefill() -> float:
        start(PREFILL_TOKENS, 1, temperature=0)
        began = time.perf_counter()
        while engine.has_unfinished:
            engine.step()
        return PREFILL_TOKENS / (time.perf_counter() - began)

    def dram() -> float:
        limits.measure_read()
        return limits.reads[-1]

    def answer() -> str:
        digest = hashlib.sha256()
        nonlocal random
        random = np.random.default_rng(1)
        start(PREFILL_TOKENS, 64, temperature=0.8, seed=7, logprobs=5)
        while engine.has_unfinished:
            for output in engine.step():
                digest.update(repr((output.token_ids, output.logprobs)).encode())
        return digest.hexdigest()

    prefill()
    print("true", flush=True)
    for line in sys.stdin:
        name, *arguments = line.split()
        verbs = {"decode": decode, "prefill": prefill, "dram": dram, "answer": answer}
        print(json.dumps(verbs[name](*map(float, arguments))), flush=True)
    model.close()


def two_engines(model: Path, runs: int, seconds: float) -> list[float]:
    """Rates of two engines at once over the lone rate of the same turn."""
    cores = os.sched_getaffinity(0)
    workers = [Worker(model, cores), Worker(model, cores)]
    shares = []
    for number in range(runs):
        workers[number % 2].ask(f"decode {seconds}")
        lone = workers[number % 2].answer()
        for worker in workers:
            worker.ask(f"decode {seconds}")
        shares += [worker.answer() / lone for worker in workers]
    for worker in workers:
        worker.close()
    return shares


def two_llama_cpp(model: Path, runs: int, tokens: int) -> list[float]:
    threads = len(os.sched_getaffinity(0))
    binary = llama_cpp.build(threads, "llama-bench") / "llama-bench"
    command = [str(binary), "-m", str(model), "-t", str(threads), "-o", "json", "-r", "1"]
    command += ["-p", "0", "-n", str(tokens)]

    def rates(count: int) -> list[float]:
        pipe = subprocess.PIPE
        running = [
            subprocess.Popen(command, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
            for _ in range(count)
        ]
        return [json.loads(process.communicate()[0])[0]["avg_ts"] for process in running]

    shares = []
    for _ in range(runs):
        (lone,) = rates(1)
        shares += [rate / lone for rate in rates(2)]
    return shares


def one_against_two(model: Path, runs: int, seconds: float) -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise SystemExit("one core against two: this process may use one core only")
    one, two = Worker(model, {cores[0]}), Worker(model, set(cores))
    scaling: dict[str, list[float]] = {"prefill": [], "decode": [], "dram": []}
    for _ in range(runs):
        for name, command in (
            ("prefill", "prefill"),
            ("decode", f"decode {seconds}"),
            ("dram", "dram"),
        ):
            figures = []
            for worker in (one, two):
                worker.ask(command)
                figures.append(worker.answer())
            scaling[name].append(figures[1] / figures[0])
    answers = []
    for worker in (one, two):
        worker.ask("answer")
        answers.append(worker.answer())
        worker.close()
    return {**scaling, "equal_bits": answers[0] == answers[1]}


def spread(figures: list[float]) -> str:
    return f"{statistics.median(figures):.2f} ({min(figures):.2f} … {max(figures):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3, help="of each decode")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return work(arguments.model)
    shares = two_engines(arguments.model, arguments.runs, arguments.seconds)
    peer = two_llama_cpp(arguments.model, arguments.runs, 128)
    scaling = one_against_two(arguments.model, arguments.runs, arguments.seconds)
    if arguments.json:
        print(json.dumps({"two_engines": shares, "two_llama_cpp": peer, "cores": scaling}))
        return
    print(f"{arguments.model.name}, {arguments.runs} runs, medians (ranges)")
    print(f"two engines at once, each of its lone rate   {spread(shares)}")
    print(f"two llama.cpp at once, each of its lone rate {spread(peer)}")
    for name in ("prefill", "decode", "dram"):
        print(f"two cores over one, {name:<25}{spread(scaling[name])}")
    print(f"equal bits on one core and two: {scaling['equal_bits']}")


if __name__ == "__main__":
    main()
