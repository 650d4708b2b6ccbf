"""A loaded model's prefill and decode, without HTTP, beside what the machine could do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from invar import _native
from invar.backends.cpu.memory import usable_threads
from invar.backends.cpu.runner import CpuRunner
from invar.backends.runner import PAGE_TOKENS
from invar.engine.loader import LoadedModel
from invar.engine.request import EngineRequest
from invar.engine.sampling_params import SamplingParams
from invar.measure.limits import Limits, spread
from invar.observe.build import version_text

PREFILL_TOKENS = 512
PROMPT_TOKENS = 128  # before decode is measured
OUTPUT_TOKENS = 64
BATCHES = (1, 8, 32, 64)

PEAK_SLICE_S = 0.3
READ_SLICE_S = 0.5
# Decode goes on in pieces between the slices: as long as a slice, and of so many steps that the
# first one, whose caches the slice has emptied, does not count.
PIECE_S, PIECE_STEPS = READ_SLICE_S, 16


@dataclass(frozen=True)
class Line:
    """What is measured: streams that all begin with a prompt of their own and then decode."""

    streams: int
    prompt_tokens: int


@dataclass
class Figures:
    """Of a line: figures of all its runs. Prefill is measured where there is one stream."""

    prefill_tokens_per_s: list[float] = field(default_factory=list)
    prefill_of_peak: list[float | None] = field(default_factory=list)
    decode_tokens_per_s: list[float] = field(default_factory=list)
    decode_of_dram: list[float | None] = field(default_factory=list)  # per piece
    step_overhead: list[float | None] = field(default_factory=list)  # 1 - time in the plan / wall


def lines_of(batches: Iterable[int], context: int | None) -> list[Line]:
    lines = [Line(1, PREFILL_TOKENS)] + [Line(streams, PROMPT_TOKENS) for streams in batches]
    return lines if context is None else [*lines, Line(1, context)]


def tokens_needed(lines: Iterable[Line], max_tokens_per_step: int) -> int:
    """The model length that the longest line takes."""
    return max(line.prompt_tokens + output_tokens(line, max_tokens_per_step) for line in lines)


def output_tokens(line: Line, max_tokens_per_step: int) -> int:
    """Streams that start early go on while the last prompts run; all outlive the measurement."""
    rows_for_prompts = max(1, max_tokens_per_step - line.streams)
    return OUTPUT_TOKENS + line.streams * line.prompt_tokens // rows_for_prompts + 2


def fitted(line: Line, max_model_len: int, max_tokens_per_step: int) -> Line:
    """With a prompt as short as the model's length asks for. Raises ValueError if none is left."""
    prompt = min(line.prompt_tokens, max_model_len - output_tokens(line, max_tokens_per_step))
    if prompt < 1:
        raise ValueError(
            f"a model length of {max_model_len} tokens leaves no room for a prompt before "
            f"{OUTPUT_TOKENS} tokens of {line.streams} streams are measured"
        )
    return Line(line.streams, prompt)


class EngineBench:
    """Measures one loaded model; random prompts, greedy, that nothing but the limit ends."""

    def __init__(self, model: LoadedModel, seed: int) -> None:
        runner = model.engine.runner
        assert isinstance(runner, CpuRunner)
        self.model, self.engine, self.runner = model, model.engine, runner
        self.random = np.random.default_rng(seed)
        threads = min(model.config.num_threads or usable_threads(), usable_threads())
        self.limits = Limits(threads, PEAK_SLICE_S, READ_SLICE_S)
        assert model.info.work is not None
        self.work = model.info.work.row_ops  # per prompt token, by the peak that bounds them
        runner.set_profile(True)

    def run(self, line: Line, figures: Figures) -> None:
        requests = self.requests(line)
        if line.streams == 1:
            self.prefill(line, requests, figures)
        else:
            self.start(requests)
        self.decode(line, figures)
        for request in requests:
            self.engine.abort(request.id)

    def warm_up(self) -> None:
        """Touches every page of weights and workspace once."""
        requests = self.requests(self.fitted(Line(1, PREFILL_TOKENS)))
        self.start(requests)
        self.engine.abort(requests[0].id)

    def fitted(self, line: Line) -> Line:
        return fitted(line, self.engine.max_model_len, self.runner.info.max_tokens_per_step)

    def prefill(self, line: Line, requests: Sequence[EngineRequest], figures: Figures) -> None:
        """Up to and with the first token of the answer."""
        for peak in self.work:
            self.limits.measure_peak(peak)
        seconds = self.start(requests)
        for peak in self.work:
            self.limits.measure_peak(peak)
        figures.prefill_tokens_per_s.append(line.prompt_tokens / seconds)
        figures.prefill_of_peak.append(self.of_peak(line.prompt_tokens, seconds))

    def requests(self, line: Line) -> list[EngineRequest]:
        tokens = output_tokens(line, self.runner.info.max_tokens_per_step)
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        vocab, length = self.model.info.vocab_size, line.prompt_tokens
        prompts = self.random.integers(0, vocab, (line.streams, length), np.int32)
        resolve = self.model.door.resolve
        return [resolve(f"bench-{n}", prompt, params)[0] for n, prompt in enumerate(prompts)]

    def start(self, requests: Sequence[EngineRequest]) -> float:
        """Seconds until all of them have their first token."""
        waiting = {request.id for request in requests}
        started = time.perf_counter()
        for request in requests:
            self.engine.add_request(request)
        while waiting:
            waiting -= {output.request_id for output in self.engine.step()}
        return time.perf_counter() - started

    def decode(self, line: Line, figures: Figures) -> None:
        """The first token is there already: 63 steps, cut into pieces by slices of reading."""
        steps, elapsed, in_plan = 0, 0.0, 0.0
        self.limits.measure_read()
        while steps < OUTPUT_TOKENS - 1:
            plan_before, began = self.plan_seconds(), time.perf_counter()
            count, seconds = 0, 0.0
            while steps + count < OUTPUT_TOKENS - 1 and not (
                count >= PIECE_STEPS and seconds >= PIECE_S
            ):
                delivered = len(self.engine.step())
                assert delivered == line.streams, "a stream ended while it was measured"
                count += 1
                seconds = time.perf_counter() - began
            in_plan += self.plan_seconds() - plan_before
            self.limits.measure_read()
            kv_len = line.prompt_tokens + steps + count // 2
            gbs = self.step_bytes(line.streams, kv_len) * count / seconds / 1e9
            figures.decode_of_dram.append(gbs / self.limits.read_between())
            steps, elapsed = steps + count, elapsed + seconds
        figures.decode_tokens_per_s.append(line.streams * steps / elapsed)
        figures.step_overhead.append(1 - in_plan / elapsed)

    def plan_seconds(self) -> float:
        return sum(nanoseconds for _, _, nanoseconds in self.runner.profile()) / 1e9

    def of_peak(self, tokens: int, seconds: float) -> float | None:
        """The time that the products alone would take at the machine's peaks, of what it took."""
        least = 0.0
        for peak, operations in self.work.items():
            limit = self.limits.peak_between(peak)
            if not limit:
                return None
            least += tokens * operations / (limit * 1e9)
        return least / seconds

    def step_bytes(self, streams: int, kv_len: int) -> int:
        """Packed weights and KV that a decode step reads."""
        info = self.runner.info
        kv = sum(
            group.page_bytes / PAGE_TOKENS * min(kv_len, group.window or kv_len)
            for group in info.groups
        )
        assert info.work is not None
        return int(info.work.weights_read(streams) + streams * kv)


def measure(
    model: LoadedModel,
    lines: Sequence[Line],
    runs: int,
    seed: int,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Medians and ranges over `runs` runs, in each of which every line has its turn."""
    bench = EngineBench(model, seed)
    bench.warm_up()
    figures = {bench.fitted(line): Figures() for line in lines}
    for number in range(runs):
        for line, of_line in figures.items():
            progress(f"run {number + 1} of {runs}: {line.streams} × {line.prompt_tokens} tokens …")
            bench.run(line, of_line)
    return {
        "engine": "invar",
        "version": version_text(),
        "model": model.path.name,
        "isa": _native.cpu_info()["isa"],
        "threads": bench.limits.threads,
        "runs": runs,
        "limits": bench.limits.as_json(),
        "prefill": prefill_json(figures),
        "decode": [decode_json(line, of_line) for line, of_line in figures.items()],
    }


def prefill_json(figures: Mapping[Line, Figures]) -> list[dict[str, Any]]:
    """Of the lines with one stream; a 128-token prompt is too short to say much."""
    alone = {line: f for line, f in figures.items() if line.streams == 1}
    first = next(iter(alone.values())).prefill_tokens_per_s
    return [
        {
            "prompt_tokens": line.prompt_tokens,
            "tokens_per_s": spread(found.prefill_tokens_per_s),
            "of_peak": spread(found.prefill_of_peak),
            # run by run, of the shorter prompt that was measured just before
            "of_first": spread(
                rate / base for rate, base in zip(found.prefill_tokens_per_s, first, strict=True)
            ),
        }
        for line, found in alone.items()
    ]


def decode_json(line: Line, found: Figures) -> dict[str, Any]:
    return {
        "streams": line.streams,
        "prompt_tokens": line.prompt_tokens,
        "tokens_per_s": spread(found.decode_tokens_per_s),
        "of_dram": spread(found.decode_of_dram),
        "step_overhead": spread(found.step_overhead),
    }
