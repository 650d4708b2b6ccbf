"""`invar bench`: what kernels and engine do per second, beside what the machine could do."""

from __future__ import annotations

import argparse
import difflib
import json
import shlex
import sys
import time
from collections.abc import Sequence
from typing import Any

from invar.cli.engine_options import engine_config, load, say
from invar.cli.parser import CommandParser, add_engine_options, count, positive, whole
from invar.cli.rewrite import CommandLineError
from invar.cli.tables import table

SUBJECTS = ("engine", "kernels")
FOR_BOTH = {"what", "json", "runs", "typed"}
FOR_KERNELS = {"formats", "rows"}  # all else is for the engine


def parser() -> CommandParser:
    parser = CommandParser(
        "bench",
        "Measures the engine, or the linear kernels of one core, beside the machine's limits.",
        words="engine [MODEL] | kernels",
    )
    parser.add_argument("what", type=subject, metavar="engine | kernels", help="what to measure")
    parser.model()
    parser.flag("--json", help="one line for programs")
    parser.value("--runs", type=positive, default=5, help="of each figure; the median is reported")
    parser.value("--batches", type=numbers, metavar="N,…", help="streams that decode (1,8,32,64)")
    parser.value("--context", type=count, help="a long prompt as well, of so many tokens")
    parser.value("--seed", type=whole, help="of the random prompts (0)")
    parser.value("--formats", type=names, metavar="NAME,…", help="kernels: of weights (all)")
    parser.value("--rows", type=numbers, metavar="N,…", help="kernels: tokens (1,2,4,6,16,64,512)")
    add_engine_options(parser)
    return parser


def subject(text: str) -> str:
    if text in SUBJECTS:
        return text
    near = difflib.get_close_matches(text, SUBJECTS, n=1)
    hint = f"nearest: {near[0]}" if near else f"try: invar bench engine {shlex.quote(text[:40])}"
    raise argparse.ArgumentTypeError(f"{text[:40]!r} cannot be measured; {hint}")


def numbers(text: str) -> list[int]:
    return [positive(item) for item in text.split(",")]


def names(text: str) -> list[str]:
    return [item.strip().lower() for item in text.split(",")]


def execute(args: argparse.Namespace) -> int:
    refuse_others(args)
    report = kernels(args) if args.what == "kernels" else engine(args)
    if args.json:
        print(json.dumps(report))
    else:
        print(kernels_text(report) if args.what == "kernels" else engine_text(report))
    return 0


def refuse_others(args: argparse.Namespace) -> None:
    """Raises CommandLineError for an option that the other subject has."""
    other = "engine" if args.what == "kernels" else "kernels"
    for name, value in vars(args).items():
        if value is None or name in FOR_BOTH or (name in FOR_KERNELS) == (args.what == "kernels"):
            continue
        what = value if "model" in name else "--" + name.replace("_", "-")
        raise CommandLineError(f"{what}: is for `invar bench {other}` (see invar bench --help)")


def kernels(args: argparse.Namespace) -> dict[str, Any]:
    from invar.measure import kernels as bench

    formats, rows = args.formats or bench.FORMATS, args.rows or bench.ROWS
    for name in formats:
        if name not in bench.FORMATS:
            near = difflib.get_close_matches(name, bench.FORMATS, n=1)
            hint = f"nearest: {near[0]}" if near else f"known: {', '.join(bench.FORMATS)}"
            raise CommandLineError(f"--formats: {name[:40]!r} is not a format of weights; {hint}")
    if max(rows) > bench.MAX_ROWS:
        raise CommandLineError(f"--rows: {max(rows)} is more than {bench.MAX_ROWS}")
    return bench.measure(formats, rows, args.runs, progress)


def engine(args: argparse.Namespace) -> dict[str, Any]:
    from invar.measure import engine as bench

    lines = bench.lines_of(args.batches or bench.BATCHES, args.context)
    streams = max(line.streams for line in lines)
    started = time.perf_counter()
    model = load(engine_config(args, max_num_seqs=max(args.max_num_seqs or 0, streams)))
    startup_s = time.perf_counter() - started
    try:
        report = bench.measure(model, lines, args.runs, args.seed or 0, progress)
    finally:
        model.close()
    return report | {"startup_s": round(startup_s, 3)}


def progress(text: str) -> None:
    if sys.stderr.isatty():
        say(text)


def figure(spread: dict[str, float], digits: int = 0) -> str:
    low, high = spread["low"], spread["high"]
    return f"{spread['median']:,.{digits}f} ({low:,.{digits}f} … {high:,.{digits}f})"


def share(spread: dict[str, float] | None, what: str = "") -> str:
    return "" if spread is None else f"{spread['median']:.0%}{what}"


def limit_rows(report: dict[str, Any]) -> list[Sequence[str]]:
    units = {"int8_peak_gops": "int8 peak, GOPS", "dram_read_gbs": "DRAM read, GB/s"}
    units |= {f"{kind}_peak_gflops": f"{kind} peak, GFLOPS" for kind in ("bf16", "fp32")}
    return [
        (units[name], figure(spread, 1), "")
        for name, spread in report["limits"].items()
        if spread is not None
    ]


def engine_text(report: dict[str, Any]) -> str:
    rows: list[Sequence[str]] = [("figure", "median (range)", "of the limit")]
    for line in report["prefill"]:
        name = f"prefill, {line['prompt_tokens']:,} tokens, tokens/s"
        rows.append((name, figure(line["tokens_per_s"]), share(line["of_peak"], " of the peak")))
    for line in report["decode"]:
        name = f"decode, {line['streams']} × {line['prompt_tokens']:,} tokens, tokens/s"
        limits = share(line["of_dram"], " of the DRAM rate"), share(line["step_overhead"])
        rows.append((name, figure(line["tokens_per_s"], 1), f"{limits[0]}, overhead {limits[1]}"))
    rows += [*limit_rows(report), ("start, s", f"{report['startup_s']:.2f}", "")]
    title = f"{report['model']} on {report['isa']}, {report['threads']} threads"
    return f"{title}, {report['runs']} runs\n" + table(rows, right=(1,))


def kernels_text(report: dict[str, Any]) -> str:
    counts = list(next(iter(report["formats"].values()))["rows"])
    head = ["GOPS, of the peak", *(f"{count} rows" for count in counts)]
    rows = [[*head, "stream GB/s, of DRAM", "quantise GB/s", "pack GB/s"]]
    for name, found in report["formats"].items():
        products = [
            f"{of['gops']['median']:.0f} {share(of['of_peak']):>4}" for of in found["rows"].values()
        ]
        stream = f"{found['stream_gbs']['median']:.1f} {share(found['stream_of_dram']):>4}"
        rates = [f"{found[rate]['median']:.1f}" for rate in ("quantize_gbs", "pack_gbs")]
        rows.append([name, *products, stream, *rates])
    title = f"one core, {report['isa']}, {report['columns']} columns, {report['runs']} runs"
    return f"{title}\n{table(rows, right=range(1, len(rows[0])))}\n{table(limit_rows(report))}"
