"""What steps had to compute and to move, and what the machine could do in that time.

Counted from the shapes of batches, not measured: products and attention of their rows, weights read
once a step, K and V of a request read once a step and of a row written once. A step adds to a few
sums, which are turned into operations and bytes when somebody asks.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from invar.backends.runner import PAGE_TOKENS, Batch, Runner
from invar.observe.catalogue import PHASES, STEP_ROW_BOUNDS, step_rows_name

ATTENTION_PEAK = "bf16"  # K and V meet q in bf16, whatever they are stored in

LIMIT_S = 0.02  # a request that comes while a limit is measured waits for no longer
LIMIT_ROUNDS = 3  # the highest counts: a disturbed machine measures low


@dataclass
class Sums:
    """Over the steps of a phase."""

    read: list[int]  # per window: tokens whose K and V were read
    seen: list[int]  # per window: pairs of a row and a token that it saw
    steps: int = 0
    seconds: float = 0.0
    rows: int = 0
    logit_rows: int = 0
    sequences: int = 0


class Work:
    """Totals since the start, by the names under which the engine reports them."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._work = runner.info.work
        self._groups = runner.info.groups
        self._windows = list(dict.fromkeys(group.window for group in self._groups))
        none = [0] * len(self._windows)
        self._sums = {phase: Sums(none.copy(), none.copy()) for phase in PHASES}
        self._step_rows = [0] * (len(STEP_ROW_BOUNDS) + 1)
        self._limits: dict[str, float] = {}
        self._unmeasured: list[str] = []
        if self._work is not None:
            peaks = sorted({*self._work.row_ops, *self._work.logit_ops, ATTENTION_PEAK})
            self._unmeasured = LIMIT_ROUNDS * ["read", *peaks]

    def ran(self, batch: Batch, seconds: float) -> None:
        """Counts a step. Most decode, and must cost microseconds."""
        end, rows, sequences = batch.kv_len, len(batch.token_ids), len(batch.kv_len)
        if rows == sequences:
            sums = self._sums["decode"]
            for index, window in enumerate(self._windows):
                known = int(np.add.reduce(end if window is None else np.minimum(end, window)))
                sums.read[index] += known
                sums.seen[index] += known
        else:
            counts = np.diff(batch.query_start)
            sums = self._sums["prefill" if int(counts.min()) > 1 else "mixed"]
            wide = end.astype(np.int64)
            for index, window in enumerate(self._windows):
                sums.read[index] += tokens_read(counts, wide, window)
                sums.seen[index] += tokens_seen(wide, window) - tokens_seen(wide - counts, window)
        sums.steps += 1
        sums.seconds += seconds
        sums.rows += rows
        sums.logit_rows += len(batch.logit_rows)
        sums.sequences += sequences
        self._step_rows[bisect_left(STEP_ROW_BOUNDS, rows)] += 1

    def totals(self) -> dict[str, float]:
        totals: dict[str, float] = dict(self._limits)
        for bound, steps in zip((*STEP_ROW_BOUNDS, None), self._step_rows, strict=True):
            totals[step_rows_name(bound)] = steps
        totals["rows"] = sum(sums.rows for sums in self._sums.values())
        for phase, sums in self._sums.items():
            for name in ("steps", "seconds", "rows", "sequences"):
                totals[f"{phase}_{name}"] = getattr(sums, name)
            ops = self._operations(sums)
            read, written = self._bytes(sums)
            counts = {"read_bytes": read, "written_bytes": written}
            counts |= {f"{peak}_ops": count for peak, count in ops.items()}
            totals |= {f"{phase}_{name}": count for name, count in counts.items()}
            for name, count in {**counts, "ops": sum(ops.values())}.items():
                if name in ("ops", "read_bytes", "written_bytes"):
                    totals[name] = totals.get(name, 0.0) + count
        return totals

    def _operations(self, sums: Sums) -> dict[str, float]:
        """By the peak that bounds them."""
        work = self._work
        if work is None:
            return {}
        ops = {peak: float(sums.rows * each) for peak, each in work.row_ops.items()}
        for peak, each in work.logit_ops.items():
            ops[peak] = ops.get(peak, 0.0) + sums.logit_rows * each
        attention = sum(
            each * sums.seen[self._windows.index(group.window)]
            for group, each in zip(self._groups, work.attention_ops, strict=True)
        )
        ops[ATTENTION_PEAK] = ops.get(ATTENTION_PEAK, 0.0) + attention
        return ops

    def _bytes(self, sums: Sums) -> tuple[float, float]:
        """Read, and written."""
        if self._work is None:
            return 0.0, 0.0
        rows = sums.rows / max(1, sums.steps)
        read, written = sums.steps * self._work.weights_read(rows), 0.0
        for group in self._groups:
            token_bytes = group.page_bytes / PAGE_TOKENS
            read += token_bytes * sums.read[self._windows.index(group.window)]
            written += token_bytes * sums.rows
        return read, written

    def measure_limit(self) -> bool:
        """Measures one of the machine's limits, between two steps; False when there is no more."""
        if self._unmeasured:
            name = self._unmeasured.pop(0)
            key = "peak_read_bytes" if name == "read" else f"peak_{name}_ops"
            rate = self._runner.machine_limit(name, LIMIT_S)
            self._limits[key] = max(rate, self._limits.get(key, 0.0))
        return bool(self._unmeasured)


def tokens_read(rows: np.ndarray, end: np.ndarray, window: int | None) -> int:
    """Tokens whose K and V a step reads: of each request those that its rows see."""
    if window is None:
        return int(end.sum())
    return int(np.minimum(end, rows + window - 1).sum())


def tokens_seen(length: np.ndarray, window: int | None) -> int:
    """Pairs of a token and one that it sees, itself among them, over the first `length` tokens."""
    if window is None:
        return int((length * (length + 1) // 2).sum())
    full = np.minimum(length, window)
    return int((full * (full + 1) // 2 + (length - full) * window).sum())
