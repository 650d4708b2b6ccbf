"""Invar beside llama.cpp on the same files, in turn, as a table for bench/README.md.

    python bench/compare.py MODEL.gguf [MODEL.gguf …] [--runs 5]

Each run is a whole process of each engine, A B A B, so that a machine whose speed drifts changes
both. The figures are medians over the runs, with the range; the ratio is the median of the ratios
pair by pair.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import llama_cpp

BATCHES = [1, 8, 32]


@dataclass
class Figures:
    """Of one line: a figure per run of either engine."""

    invar: list[float] = field(default_factory=list)
    peer: list[float] = field(default_factory=list)
    limit: list[float] = field(default_factory=list)  # fraction of the machine's, Invar only

    def row(self, name: str) -> str:
        ratios = [ours / theirs for ours, theirs in zip(self.invar, self.peer, strict=True)]
        return (
            f"| {name} | {spread(self.invar)} | {spread(self.peer)} "
            f"| {statistics.median(ratios):.2f} | {statistics.median(self.limit):.0%} |"
        )


def spread(figures: list[float]) -> str:
    return f"{statistics.median(figures):,.1f} ({min(figures):,.1f} … {max(figures):,.1f})"


def run_invar(model: Path, threads: int) -> dict[str, object]:
    command = [sys.executable, "-m", "invar.cli.main", "bench", "engine", str(model), "--json"]
    command += ["--runs", "1", "--threads", str(threads), "--batches", ",".join(map(str, BATCHES))]
    command += ["--max-model-len", "1024"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    report: dict[str, object] = json.loads(done.stdout)
    return report


def compare(model: Path, runs: int, threads: int) -> str:
    binaries = llama_cpp.build(threads)
    lines = {name: Figures() for name in ("prefill", *map(str, BATCHES))}
    for number in range(runs):
        ours = run_invar(model, threads)
        theirs = llama_cpp.run(binaries, model, threads, BATCHES)
        lines["prefill"].invar.append(ours["prefill_tokens_per_s"]["median"])
        lines["prefill"].peer.append(theirs["prefill_tokens_per_s"])
        lines["prefill"].limit.append(ours["prefill_of_int8_peak"])
        for batch in map(str, BATCHES):
            lines[batch].invar.append(ours["decode_tokens_per_s"][batch]["median"])
            lines[batch].peer.append(theirs["decode_tokens_per_s"][batch])
            lines[batch].limit.append(ours["decode_of_dram"][batch])
        print(f"{model.name}: run {number + 1} of {runs}", file=sys.stderr)
    head = f"**{model.name}**, {ours['isa']}, {threads} threads, {runs} runs in turn\n\n"
    head += f"| tokens/s | Invar | llama.cpp {llama_cpp.VERSION} | ratio | of the limit |\n"
    head += "|---|---|---|---|---|\n"
    names = {"prefill": "prefill, 512 tokens"} | {
        str(b): f"decode, {b} stream{'s' * (b > 1)}" for b in BATCHES
    }
    return head + "\n".join(lines[key].row(name) for key, name in names.items()) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    for model in arguments.models:
        print(compare(model, arguments.runs, arguments.threads), flush=True)


if __name__ == "__main__":
    main()
