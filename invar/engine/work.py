"""What steps had to compute and to move, and what the machine could do in that time.

Counted from the shapes of a batch, not measured: products and attention of its rows, weights read
once a step, K and V of a request read once a step and of a row written once.
"""

from __future__ import annotations

import numpy as np

from invar.backends.runner import PAGE_TOKENS, Batch, Runner

PHASES = ("prefill", "decode", "mixed")
COUNTS = ("steps", "seconds", "rows", "sequences", "read_bytes", "written_bytes")
ATTENTION_PEAK = "bf16"  # K and V meet q in bf16, whatever they are stored in

LIMIT_S = 0.02  # a request that comes while a limit is measured waits for no longer
LIMIT_ROUNDS = 3  # the highest counts: a disturbed machine measures low


class Work:
    """Totals since the start, by the names under which the engine reports them."""

    def __init__(self, runner: Runner) -> None:
        info = runner.info
        self._runner = runner
        self._work = info.work
        self.totals: dict[str, float] = {}
        self._limits: list[str] = []  # still to be measured
        if info.work is None:
            return
        self._peaks = sorted({*info.work.row_ops, *info.work.logit_ops, ATTENTION_PEAK})
        names = (*COUNTS, *(f"{peak}_ops" for peak in self._peaks))
        self.totals = {f"{phase}_{name}": 0.0 for phase in PHASES for name in names}
        self.totals |= dict.fromkeys(("ops", "read_bytes", "written_bytes"), 0.0)
        self._windows = [group.window for group in info.groups]
        self._token_bytes = [group.page_bytes / PAGE_TOKENS for group in info.groups]
        self._limits = LIMIT_ROUNDS * ["read", *self._peaks]

    def ran(self, batch: Batch, seconds: float) -> None:
        """Counts a step."""
        work = self._work
        if work is None:
            return
        rows = np.diff(batch.query_start).astype(np.int64)
        end = batch.kv_len.astype(np.int64)
        total_rows = len(batch.token_ids)
        ops = {peak: float(total_rows * each) for peak, each in work.row_ops.items()}
        for peak, each in work.logit_ops.items():
            ops[peak] = ops.get(peak, 0.0) + len(batch.logit_rows) * each
        read, attended = float(work.weight_bytes), 0.0
        for window, each, token_bytes in zip(
            self._windows, work.attention_ops, self._token_bytes, strict=True
        ):
            read += token_bytes * float(tokens_read(rows, end, window))
            attended += each * float(tokens_seen(end, window) - tokens_seen(end - rows, window))
        ops[ATTENTION_PEAK] = ops.get(ATTENTION_PEAK, 0.0) + attended
        written = total_rows * sum(self._token_bytes)
        phase = phase_of(rows)
        self._add(phase, "steps", 1)
        self._add(phase, "seconds", seconds)
        self._add(phase, "rows", total_rows)
        self._add(phase, "sequences", len(rows))
        self._add(phase, "read_bytes", read)
        self._add(phase, "written_bytes", written)
        for peak, count in ops.items():
            self._add(phase, f"{peak}_ops", count)
        self.totals["ops"] += sum(ops.values())
        self.totals["read_bytes"] += read
        self.totals["written_bytes"] += written

    def _add(self, phase: str, name: str, value: float) -> None:
        self.totals[f"{phase}_{name}"] += value

    def measure_limit(self) -> bool:
        """Measures one of the machine's limits, between two steps; False when there is no more."""
        if self._limits:
            name = self._limits.pop(0)
            key = "peak_read_bytes" if name == "read" else f"peak_{name}_ops"
            rate = self._runner.machine_limit(name, LIMIT_S)
            self.totals[key] = max(rate, self.totals.get(key, 0.0))
        return bool(self._limits)


def phase_of(rows: np.ndarray) -> str:
    """A request that decodes has one row. rows: int64 ``[sequences]``."""
    if int(rows.max()) == 1:
        return "decode"
    return "prefill" if int(rows.min()) > 1 else "mixed"


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
