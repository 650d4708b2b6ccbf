"""Repeated figures as medians, and the machine's limits that they are held against."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from invar import _native
from invar.backends.cpu.work import machine_peak


@dataclass(frozen=True)
class Spread:
    """Median and range of repeated figures."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, figures: Sequence[float]) -> Spread:
        return cls(statistics.median(figures), min(figures), max(figures))


def spread(figures: Iterable[float | None]) -> dict[str, float] | None:
    """As JSON; None where the machine has no such limit to be a fraction of."""
    known = [figure for figure in figures if figure is not None]
    return asdict(Spread.of(known)) if known else None


# Name of a peak → its key in reports.
PEAK_KEYS = {"int8": "int8_peak_gops", "bf16": "bf16_peak_gflops", "fp32": "fp32_peak_gflops"}

READ_BYTES = 256 << 20  # several times the L3 of any socket that a virtual machine shows part of


class Limits:
    """Slices of the machine's limits, taken in turn with what is held against them.

    Both drift together on a shared machine, so a fraction is taken of the slices just before and
    just after the figure itself, and medians are medians of these fractions.
    """

    def __init__(self, threads: int, peak_slice_s: float, read_slice_s: float) -> None:
        self.threads = threads
        self.peak_slice_s = peak_slice_s
        self.read_slice_s = read_slice_s
        # Kept, since filling it takes longer than a slice of reading.
        self.memory = _native.Memory(READ_BYTES)
        self.memory.array().fill(1)
        self.peaks: dict[str, list[float]] = {}  # 10^9 operations a second; a multiply-add is two
        self.reads: list[float] = []  # 10^9 bytes a second out of huge-page memory

    def measure_peak(self, peak: str) -> None:
        rate = machine_peak(peak, self.threads, self.peak_slice_s) / 1e9
        self.peaks.setdefault(peak, []).append(rate)

    def measure_read(self) -> None:
        self.reads.append(_native.read_rate_gbs(self.memory, self.threads, self.read_slice_s))

    def peak_between(self, peak: str) -> float:
        """Around what ran between the last two slices; 0 where there is no such peak."""
        return statistics.fmean(self.peaks[peak][-2:])

    def read_between(self) -> float:
        return statistics.fmean(self.reads[-2:])

    def as_json(self) -> dict[str, dict[str, float] | None]:
        peaks = {
            PEAK_KEYS[peak]: spread(rate or None for rate in rates)
            for peak, rates in self.peaks.items()
        }
        return {**peaks, "dram_read_gbs": spread(self.reads)}
