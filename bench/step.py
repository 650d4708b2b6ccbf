"""Where the time of a decode step goes, beside what its kernels do alone.

    python bench/step.py MODEL [--streams 32] [--runs 5] [--json]

Every phase of the plan is timed while streams decode after 128-token prompts; phases of products
are held against the int8, bf16 or fp32 peak. The limit of a step is the time that its products take
at the rate of their kernels alone (that many rows, weights in L2, all threads at once, each with
weights of its own) and its K and V at the DRAM read rate. Decoding and slices of
all that alternate; figures are medians over the runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from invar import _native
from invar.backends.cpu.lowered import Call
from invar.backends.cpu.work import peak_name, segments_of
from invar.backends.runner import PAGE_TOKENS
from invar.config import EngineConfig
from invar.engine.loader import load_engine
from invar.measure.engine import OUTPUT_TOKENS, PROMPT_TOKENS, EngineBench, Line, output_tokens
from invar.measure.limits import spread

KERNEL_SLICE_S = 0.1  # of each format
STEPS = OUTPUT_TOKENS - 16  # of a run


@dataclass
class Kind:
    """Phases of all layers that do the same."""

    phases: list[int] = field(default_factory=list)
    operations: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # by format
    shares: list[float] = field(default_factory=list)  # of the time in the plan
    gops: list[float] = field(default_factory=list)
    of_peak: list[float] = field(default_factory=list)


def kinds_of(phases: list[list[Call]], streams: int) -> dict[str, Kind]:
    found: dict[str, Kind] = defaultdict(Kind)
    for index, calls in enumerate(phases):
        kind = found[" + ".join(dict.fromkeys(name_of(call) for call in calls))]
        kind.phases.append(index)
        for call in calls:
            for use in segments_of(call):
                rows = round(streams * use.share)
                weight = use.weight
                kind.operations[weight.weight_format] += 2 * weight.rows * weight.columns * rows
    return found


def name_of(call: Call) -> str:
    return call.method if call.op is None else f"{call.method} ({type(call.op).__name__})"


class Alone:
    """The kernels of some formats, on all threads at once."""

    def __init__(self, formats: set[str], rows: int, threads: int) -> None:
        self.rates = {name: [_native.LinearRates(name) for _ in range(threads)] for name in formats}
        self.pool = ThreadPoolExecutor(threads)
        self.rows = rows

    def measure(self) -> dict[str, float]:
        """GOPS of each format."""
        return {
            name: sum(self.pool.map(lambda one: one.gemm_gops(self.rows, KERNEL_SLICE_S), rates))
            for name, rates in self.rates.items()
        }


class Machine:
    """What a step is held against, measured before and after it."""

    def __init__(self, bench: EngineBench, formats: set[str], rows: int) -> None:
        self.limits, self.peaks = bench.limits, {peak_name(name) for name in formats}
        self.alone = Alone(formats, rows, bench.limits.threads)
        self.kernels: list[dict[str, float]] = []

    def measure(self) -> None:
        for peak in self.peaks:
            self.limits.measure_peak(peak)
        self.kernels.append(self.alone.measure())
        self.limits.measure_read()

    def kernel_between(self, name: str) -> float:
        return statistics.fmean(rates[name] for rates in self.kernels[-2:])


def measure(model_name: str, streams: int, runs: int) -> dict[str, Any]:
    line = Line(streams, PROMPT_TOKENS)
    length = PROMPT_TOKENS + output_tokens(line, EngineConfig().max_num_batched_tokens)
    config = EngineConfig(model=model_name, max_num_seqs=streams, max_model_len=length)
    model = load_engine(config)
    bench = EngineBench(model, seed=0)
    bench.warm_up()
    kinds = kinds_of(bench.runner.plan_sizes.lowered.phases, streams)
    machine = Machine(bench, {name for kind in kinds.values() for name in kind.operations}, streams)
    kv_bytes = streams * sum(
        group.page_bytes / PAGE_TOKENS * (PROMPT_TOKENS + STEPS / 2)
        for group in bench.runner.info.groups
    )
    rates, limits, fractions = [], [], []
    for _ in range(runs):
        requests = bench.requests(line)
        bench.start(requests)
        machine.measure()
        seconds, times = timed_steps(bench, streams)
        machine.measure()
        for request in requests:
            bench.engine.abort(request.id)
        least = kv_bytes / (bench.limits.read_between() * 1e9)
        for kind in kinds.values():
            took = sum(times[phase] for phase in kind.phases)
            at_peak = 0.0
            for name, operations in kind.operations.items():
                least += operations / (machine.kernel_between(name) * 1e9)
                peak = bench.limits.peak_between(peak_name(name)) * 1e9
                at_peak += operations / peak if peak else 0.0
            kind.shares.append(took / sum(times))
            kind.gops.append(sum(kind.operations.values()) / took / 1e9)
            kind.of_peak.append(at_peak / took)
        rates.append(streams / seconds)
        limits.append(streams / least)
        fractions.append(least / seconds)
    model.close()
    return {
        "model": model.path.name,
        "streams": streams,
        "threads": bench.limits.threads,
        "runs": runs,
        "tokens_per_s": spread(rates),
        "limit_tokens_per_s": spread(limits),
        "of_limit": spread(fractions),
        "kernels_alone_gops": {
            name: spread(rates[name] for rates in machine.kernels) for name in machine.kernels[0]
        },
        "limits": bench.limits.as_json(),
        "phases": {
            name: {"share": spread(kind.shares)}
            | (
                {"gops": spread(kind.gops), "of_peak": spread(kind.of_peak)}
                if kind.operations
                else {}
            )
            for name, kind in kinds.items()
        },
    }


def timed_steps(bench: EngineBench, streams: int) -> tuple[float, list[float]]:
    """Seconds of a step, and of each phase of it. A first step, whose caches the slices have
    emptied, does not count."""
    bench.engine.step()
    before, began = bench.runner.profile(), time.perf_counter()
    for _ in range(STEPS):
        delivered = len(bench.engine.step())
        assert delivered == streams, "a stream ended while it was measured"
    elapsed = time.perf_counter() - began
    after = bench.runner.profile()
    times = [(b[2] - a[2]) / 1e9 / STEPS for a, b in zip(before, after, strict=True)]
    return elapsed / STEPS, times


def text_of(report: dict[str, Any]) -> str:
    rate, limit = report["tokens_per_s"], report["limit_tokens_per_s"]
    reached = f"{rate['median']:,.0f} tokens/s ({rate['low']:,.0f} … {rate['high']:,.0f})"
    allowed = f"kernels alone and K and V at the DRAM rate allow {limit['median']:,.0f}"
    lines = [
        f"{report['model']}, {report['streams']} streams, {report['threads']} threads, "
        f"{report['runs']} runs",
        f"{reached}; {allowed}: {report['of_limit']['median']:.0%}",
        "",
        "| phase | of the plan's time | GOPS | of the peak |",
        "|---|---|---|---|",
    ]
    phases = sorted(report["phases"].items(), key=lambda item: -item[1]["share"]["median"])
    for name, of in phases:
        rates = (
            [f"{of['gops']['median']:.0f}", f"{of['of_peak']['median']:.0%}"]
            if "gops" in of
            else []
        )
        cells = [name, f"{of['share']['median']:.1%}", *(rates or ["", ""])]
        lines.append(f"| {' | '.join(cells)} |")
    alone = ", ".join(
        f"{name} {of['median']:.0f}" for name, of in report["kernels_alone_gops"].items()
    )
    peaks = ", ".join(f"{name} {of['median']:.0f}" for name, of in report["limits"].items() if of)
    return "\n".join([*lines, "", f"kernels alone, GOPS: {alone}; {peaks}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    report = measure(arguments.model, arguments.streams, arguments.runs)
    print(json.dumps(report) if arguments.json else text_of(report))


if __name__ == "__main__":
    main()
