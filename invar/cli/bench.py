"""`invar bench engine`: what the engine does per second, beside what the machine could do."""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from invar.backends.runner import PAGE_TOKENS
from invar.cli.engine_options import engine_config, load, say
from invar.cli.parser import CommandParser, add_engine_options, positive, whole
from invar.cli.tables import table

if TYPE_CHECKING:
    from invar.engine.loader import LoadedModel

PREFILL_TOKENS = 512
PROMPT_TOKENS = 128  # before decode is measured
OUTPUT_TOKENS = 64
BATCHES = (1, 8, 32)
READ_SLICE_S = 0.5  # of the DRAM read rate, in turn with decode, since both drift together
PEAK_SLICE_S = 0.3


@dataclass(frozen=True)
class Spread:
    """Median and range of repeated figures."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, figures: list[float]) -> Spread:
        return cls(statistics.median(figures), min(figures), max(figures))

    def text(self, digits: int = 0) -> str:
        return f"{self.median:,.{digits}f} ({self.low:,.{digits}f} … {self.high:,.{digits}f})"


def parser() -> CommandParser:
    parser = CommandParser(
        "bench", "Measures the engine beside the machine's limits.", words="engine [MODEL]"
    )
    parser.add_argument("what", type=subject, metavar="engine", help="the engine without HTTP")
    parser.model()
    parser.flag("--json", help="one line for programs")
    parser.value("--runs", type=positive, default=5, help="of each figure; the median is reported")
    default = ",".join(map(str, BATCHES))
    parser.value("--batches", type=batch_sizes, default=default, help="streams that decode")
    parser.value("--seed", type=whole, default=0, help="of the random prompts")
    add_engine_options(parser)
    return parser


def subject(text: str) -> str:
    if text != "engine":
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r} cannot be measured; try: invar bench engine {shlex.quote(text[:40])}"
        )
    return text


def batch_sizes(text: str) -> list[int]:
    return [positive(item) for item in text.split(",")]


def execute(args: argparse.Namespace) -> int:
    batches = args.batches
    started = time.perf_counter()
    options = {"max_num_seqs": max(args.max_num_seqs or 0, *batches, 1)}
    model = load(engine_config(args, **options))
    startup_s = time.perf_counter() - started
    try:
        report = measure(model, batches, args.runs, args.seed)
    finally:
        model.close()
    report["startup_s"] = round(startup_s, 3)
    if args.json:
        print(json.dumps(report))
    else:
        print(as_text(report))
    return 0


def measure(model: LoadedModel, batches: list[int], runs: int, seed: int) -> dict[str, Any]:
    """All figures; medians of `runs`, each run measuring the machine beside the engine."""
    import numpy as np

    from invar import _native

    macs = multiplied_weights(model)
    cores = _native.cpu_info()["usable_cores"]
    threads = min(model.config.num_threads or cores, cores)
    random = np.random.default_rng(seed)
    prefill_tokens = min(PREFILL_TOKENS, model.engine.max_model_len - 1)
    prefill(model, random, prefill_tokens)  # touches every page once
    prefills, peaks, reads = [], [], []
    for _ in range(runs):
        peaks.append(_native.int8_peak_gops(threads, PEAK_SLICE_S))
        prefills.append(prefill(model, random, prefill_tokens))
    decodes: dict[int, list[float]] = {batch: [] for batch in batches}
    fractions: dict[int, list[float]] = {batch: [] for batch in batches}
    for _ in range(runs):
        for batch in batches:
            rate = _native.read_rate_gbs(threads, seconds=READ_SLICE_S)
            reads.append(rate)
            tokens_per_s = decode(model, random, batch)
            decodes[batch].append(tokens_per_s)
            step_bytes = bytes_per_step(model, batch)
            fractions[batch].append(tokens_per_s / batch * step_bytes / 1e9 / rate)
        progress(f"decode {decodes}")
    work = [2 * macs * rate / 1e9 for rate in prefills]
    return {
        "engine": "invar",
        "model": model.path.name,
        "isa": _native.cpu_info()["isa"],
        "threads": threads,
        "runs": runs,
        "prefill_tokens": prefill_tokens,
        "prefill_tokens_per_s": vars(Spread.of(prefills)),
        "decode_tokens_per_s": {str(b): vars(Spread.of(rates)) for b, rates in decodes.items()},
        "int8_peak_gops": vars(Spread.of(peaks)),
        "dram_read_gbs": vars(Spread.of(reads)),
        "prefill_of_int8_peak": statistics.median(w / p for w, p in zip(work, peaks, strict=True)),
        "decode_of_dram": {str(b): statistics.median(f) for b, f in fractions.items()},
    }


def prefill(model: LoadedModel, random: Any, tokens: int) -> float:
    """Tokens per second of one prompt, up to and with its first answer token."""
    requests = make_requests(model, random, 1, tokens, 1)
    started = time.perf_counter()
    run_until_done(model, requests)
    return tokens / (time.perf_counter() - started)


def decode(model: LoadedModel, random: Any, batch: int) -> float:
    """Tokens per second of all streams together, from when the last one has its first token."""
    engine = model.engine
    # Streams that start early go on while the last prompts run; all outlive the measurement.
    slack = batch * PROMPT_TOKENS // engine.runner.info.max_tokens_per_step + 2
    requests = make_requests(model, random, batch, PROMPT_TOKENS, OUTPUT_TOKENS + slack)
    waiting = {request.id for request in requests}
    for request in requests:
        engine.add_request(request)
    while waiting:
        waiting -= {output.request_id for output in engine.step()}
    started = time.perf_counter()
    delivered = sum(len(engine.step()) for _ in range(OUTPUT_TOKENS - 1))
    elapsed = time.perf_counter() - started
    for request in requests:
        engine.abort(request.id)
    assert delivered == batch * (OUTPUT_TOKENS - 1), "a stream ended while it was measured"
    return delivered / elapsed


def make_requests(model: LoadedModel, random: Any, count: int, prompt: int, output: int) -> Any:
    """Random prompts, greedy, that nothing but the limit ends."""
    from invar.engine.sampling_params import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
    return [
        model.door.resolve(
            f"bench-{number}", random.integers(0, model.info.vocab_size, prompt), params
        )[0]
        for number in range(count)
    ]


def run_until_done(model: LoadedModel, requests: Any) -> None:
    for request in requests:
        model.engine.add_request(request)
    while model.engine.has_unfinished:
        model.engine.step()


def multiplied_weights(model: LoadedModel) -> int:
    """Weights that every prompt token is multiplied with: the output layer sees one token only."""
    from invar.weights.gguf import GGUFFile

    with GGUFFile(model.path) as source:
        shapes = [
            info.shape
            for name, info in source.tensors.items()
            if name not in ("token_embd.weight", "output.weight") and len(info.shape) == 2
        ]
    return sum(rows * columns for rows, columns in shapes)


def bytes_per_step(model: LoadedModel, batch: int) -> int:
    """Packed weights and KV that a decode step reads, halfway through the measurement."""
    info = model.info
    token_bytes = sum(group.page_bytes for group in info.groups) / PAGE_TOKENS
    kv_len = PROMPT_TOKENS + OUTPUT_TOKENS // 2
    return dict(info.memory)["weights"] + int(batch * kv_len * token_bytes)


def progress(text: str) -> None:
    if sys.stderr.isatty():
        say(text)


def as_text(report: dict[str, Any]) -> str:
    def spread(figures: dict[str, float], digits: int = 0) -> str:
        return Spread(**figures).text(digits)

    rows = [
        ("figure", "median (range)", "of the limit"),
        (
            f"prefill, {report['prefill_tokens']} tokens, tokens/s",
            spread(report["prefill_tokens_per_s"]),
            f"{report['prefill_of_int8_peak']:.0%} of the int8 peak",
        ),
    ]
    for batch, figures in report["decode_tokens_per_s"].items():
        share = f"{report['decode_of_dram'][batch]:.0%} of the DRAM read rate"
        rows.append((f"decode, {batch} streams, tokens/s", spread(figures, 1), share))
    rows += [
        ("int8 peak, GOPS", spread(report["int8_peak_gops"]), ""),
        ("DRAM read, GB/s", spread(report["dram_read_gbs"], 1), ""),
        ("start, s", f"{report['startup_s']:.2f}", ""),
    ]
    title = f"{report['model']} on {report['isa']}, {report['threads']} threads"
    return f"{title}, {report['runs']} runs\n" + table(rows, right=(1,))
