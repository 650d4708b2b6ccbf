"""Invar beside its peers on the same files, in turn, as a table for bench/README.md.

    python bench/compare.py MODEL.gguf [MODEL.gguf …] [--runs 5] [--batches 1,8,32]

Each run is one of every engine, A B C A B C, so that a machine whose speed drifts changes all of
them; Invar and llama.cpp are whole processes, OpenVINO GenAI stays loaded (see openvino_peer.py).
The figures are medians over the runs, with the range; the ratio is the median, run by run, of Invar
over the best peer of that run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import llama_cpp
import openvino_peer

PEERS = ("llama.cpp", "openvino-genai")


@dataclass
class Figures:
    """Of one line: a figure per run of every engine."""

    invar: list[float] = field(default_factory=list)
    peers: dict[str, list[float]] = field(default_factory=dict)
    limit: list[float] = field(default_factory=list)  # fraction of the machine's, Invar only

    def row(self, name: str) -> str:
        cells = [name, spread(self.invar), *map(spread, self.peers.values())]
        best = [max(rates) for rates in zip(*self.peers.values(), strict=True)]
        ratios = [ours / theirs for ours, theirs in zip(self.invar, best, strict=False)]
        cells.append(f"{statistics.median(ratios):.2f}" if ratios else "")
        return f"| {' | '.join(cells)} | {statistics.median(self.limit):.0%} |"


def spread(figures: list[float]) -> str:
    return f"{statistics.median(figures):,.1f} ({min(figures):,.1f} … {max(figures):,.1f})"


def run_invar(model: Path, threads: int, batches: list[int]) -> dict[str, Any]:
    command = [sys.executable, "-m", "invar.cli.main", "bench", "engine", str(model), "--json"]
    command += ["--runs", "1", "--threads", str(threads), "--batches", ",".join(map(str, batches))]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return dict(json.loads(done.stdout))


def add_invar(lines: dict[str, Figures], report: dict[str, Any]) -> None:
    prefill = report["prefill"][0]
    lines["prefill"].invar.append(prefill["tokens_per_s"]["median"])
    lines["prefill"].limit.append(prefill["of_peak"]["median"])
    for line in report["decode"]:
        if line["prompt_tokens"] == 128:
            lines[str(line["streams"])].invar.append(line["tokens_per_s"]["median"])
            lines[str(line["streams"])].limit.append(line["of_dram"]["median"])


def add_peer(lines: dict[str, Figures], report: dict[str, Any]) -> None:
    rates = {"prefill": report["prefill_tokens_per_s"], **report["decode_tokens_per_s"]}
    for name, rate in rates.items():
        lines[name].peers.setdefault(report["engine"], []).append(rate)


def compare(model: Path, runs: int, threads: int, batches: list[int], peers: list[str]) -> str:
    turns: list[Callable[[], dict[str, Any]]] = []
    if "llama.cpp" in peers:
        binaries = llama_cpp.build(threads, "llama-bench", "llama-batched-bench")
        turns.append(lambda: llama_cpp.run(binaries, model, threads, batches))
    openvino = None
    if "openvino-genai" in peers:
        try:
            openvino = openvino_peer.Peer(model, threads, batches)
            openvino.run()
            turns.append(openvino.run)
        except RuntimeError as error:
            print(f"{model.name}: {error}", file=sys.stderr)
    lines = {name: Figures() for name in ("prefill", *map(str, batches))}
    for number in range(runs):
        ours = run_invar(model, threads, batches)
        add_invar(lines, ours)
        for turn in turns:
            add_peer(lines, turn())
        print(f"{model.name}: run {number + 1} of {runs}", file=sys.stderr)
    if openvino is not None:
        openvino.close()
    title = f"**{model.name}**, {ours['isa']}, {threads} threads, {runs} runs in turn\n\n"
    return title + markdown(lines)


def markdown(lines: dict[str, Figures]) -> str:
    head = ["tokens/s", "Invar", *lines["prefill"].peers, "to the best", "of the limit"]
    text = f"| {' | '.join(head)} |\n|{'---|' * len(head)}\n"
    for name, figures in lines.items():
        streams = f"decode, {name} stream{'s' * (name != '1')}"
        text += figures.row("prefill, 512 tokens" if name == "prefill" else streams) + "\n"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    arguments = parser.parse_args()
    batches = [int(batch) for batch in arguments.batches.split(",")]
    for model in arguments.models:
        table = compare(model, arguments.runs, arguments.threads, batches, arguments.peers)
        print(table, flush=True)


if __name__ == "__main__":
    main()
