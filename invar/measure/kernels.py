"""One core's linear kernels, format by format, beside what that core multiplies and reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from invar import _native
from invar.backends.cpu.formats import WEIGHT_FORMATS
from invar.backends.cpu.work import peak_name
from invar.measure.limits import PEAK_KEYS, Limits, spread
from invar.observe.build import version_text

FORMATS = tuple(dict.fromkeys(WEIGHT_FORMATS.values()))
ROWS = (1, 2, 4, 6, 16, 64, 512)
MAX_ROWS = _native.LinearRates.MAX_ROWS

# Long enough for thousands of calls each; a run of one format is then about a second.
GEMM_SLICE_S = 0.05
PEAK_SLICE_S = 0.03
STREAM_SLICE_S = 0.2
READ_SLICE_S = 0.15
PACK_SLICE_S = 0.1
QUANTIZE_SLICE_S = 0.02


@dataclass
class RowFigures:
    """Of products with one number of rows, weights in L2: a figure per run."""

    gops: list[float] = field(default_factory=list)
    of_peak: list[float | None] = field(default_factory=list)


@dataclass
class FormatFigures:
    rows: dict[int, RowFigures]
    stream_gbs: list[float] = field(default_factory=list)
    stream_of_dram: list[float] = field(default_factory=list)
    quantize_gbs: list[float] = field(default_factory=list)
    pack_gbs: list[float] = field(default_factory=list)


def measure(
    formats: Sequence[str], rows: Sequence[int], runs: int, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Medians and ranges over `runs` runs; a format's weights are in memory in its turn alone."""
    limits = Limits(threads=1, peak_slice_s=PEAK_SLICE_S, read_slice_s=READ_SLICE_S)
    report = {}
    for name in formats:
        progress(f"{name} …")
        report[name] = as_json(name, measure_format(name, rows, runs, limits))
    return {
        "engine": "invar",
        "version": version_text(),
        "isa": _native.cpu_info()["isa"],
        "threads": limits.threads,
        "columns": _native.LinearRates.COLUMNS,
        "runs": runs,
        "limits": limits.as_json(),
        "formats": report,
    }


def measure_format(name: str, rows: Sequence[int], runs: int, limits: Limits) -> FormatFigures:
    kernels, peak = _native.LinearRates(name), peak_name(name)
    figures = FormatFigures({count: RowFigures() for count in rows})
    for _ in range(runs):
        limits.measure_peak(peak)
        for count, of_rows in figures.rows.items():
            of_rows.gops.append(kernels.gemm_gops(count, GEMM_SLICE_S))
            limits.measure_peak(peak)
            limit = limits.peak_between(peak)
            of_rows.of_peak.append(of_rows.gops[-1] / limit if limit else None)
        limits.measure_read()
        figures.stream_gbs.append(kernels.stream_gbs(STREAM_SLICE_S))
        limits.measure_read()
        figures.stream_of_dram.append(figures.stream_gbs[-1] / limits.read_between())
        figures.quantize_gbs.append(kernels.quantize_gbs(QUANTIZE_SLICE_S))
        figures.pack_gbs.append(kernels.pack_gbs(PACK_SLICE_S))
    return figures


def as_json(name: str, figures: FormatFigures) -> dict[str, Any]:
    return {
        "limit": PEAK_KEYS[peak_name(name)],
        "rows": {
            str(count): {"gops": spread(of_rows.gops), "of_peak": spread(of_rows.of_peak)}
            for count, of_rows in figures.rows.items()
        },
        "stream_gbs": spread(figures.stream_gbs),
        "stream_of_dram": spread(figures.stream_of_dram),
        "quantize_gbs": spread(figures.quantize_gbs),
        "pack_gbs": spread(figures.pack_gbs),
    }
