"""Reading a step's result row by row."""

from __future__ import annotations

from invar.backends.runner import StepResult
from invar.engine.request import TokenLogprobs


class StepReader:
    """Hands out the rows of a `StepResult` in order, as Python numbers."""

    def __init__(self, result: StepResult) -> None:
        self.result = result
        self.token_ids: list[int] = result.token_ids.tolist()
        self.all_finite = bool(result.finite.all())
        self.any_skipped = bool(result.skipped.any())
        self.next_row = 0

    def take_rows(self, count: int) -> range:
        """The next `count` rows; each row is handed out once."""
        rows = range(self.next_row, self.next_row + count)
        self.next_row = rows.stop
        return rows

    def finite(self, rows: range) -> bool:
        return self.all_finite or bool(self.result.finite[rows.start : rows.stop].all())

    def skipped(self, row: int) -> bool:
        """Nothing was drawn: the row's mask was not ready."""
        return self.any_skipped and bool(self.result.skipped[row])

    def logprobs(self, row: int, count: int) -> TokenLogprobs:
        """Of the row's token and of the `count` highest ones."""
        result = self.result
        return TokenLogprobs(
            token_id=self.token_ids[row],
            logprob=float(result.logprobs[row]),
            rank=int(result.ranks[row]),
            top_ids=tuple(result.top_ids[row, :count].tolist()),
            top_logprobs=tuple(result.top_logprobs[row, :count].tolist()),
        )
