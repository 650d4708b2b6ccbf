"""How many rows of prompts a step takes beside requests that decode.

Every row of a prompt lengthens the step in which the others wait for their next token. So many are
taken that a step takes no more than `EXTRA` of a step without prompts longer: the gaps between the
tokens of the others stay under twice what they are without the prompt, and no work is lost, since
the rows share the pass over the weights. Answers do not depend on it (law 1).
"""

from __future__ import annotations

# Of a decode step. The rest up to twice its time is for what steps differ by on their own: the 99th
# percentile of the gaps went to 2.3 times with 0.7 and to 2.1 with 0.5 (16,000 tokens beside 16
# streams of Gemma 3 270M).
EXTRA = 0.4
# Rows of the first chunk whose time says what a row takes. Later ones at most double: what has been
# measured over few rows is uncertain.
FIRST_ROWS = 16
# A prompt always gets on.
LEAST_ROWS = 4
# Steps with prompts before one without them is timed again, which delays prompts by as little.
STALE_STEPS = 32
# Weight of the last step in what is remembered.
SMOOTHING = 0.25


class Pace:
    """Estimates from the steps that ran: seconds without prompts, and for each row of a prompt."""

    def __init__(self) -> None:
        self.decode_s: float | None = None  # of a step in which
        self.decoding = 0  # so many requests decoded, and nothing else
        self.steps = 0  # since then
        # Of steps with prompts: seconds for their rows, and these rows.
        self.extra_s = self.rows = 0.0
        self.last_rows = FIRST_ROWS // 2

    def prompt_rows(self, decoding: int, most: int) -> int:
        """Of a step in which `decoding` requests decode. 0: none, so that it can be timed."""
        if not decoding:
            return most
        if self.decode_s is None or self.steps >= STALE_STEPS or not self._is_like(decoding):
            return 0
        rows = 2 * self.last_rows
        if self.extra_s > 0:
            rows = min(rows, int(EXTRA * self.decode_s * self.rows / self.extra_s))
        return min(most, max(LEAST_ROWS, rows))

    def observe(self, decoding: int, prompt_rows: int, seconds: float) -> None:
        """What a step took."""
        if not prompt_rows and decoding:
            known = self.decode_s if self._is_like(decoding) else None
            self.decode_s = seconds if known is None else faded(known, seconds)
            self.decoding, self.steps = decoding, 0
        elif prompt_rows and decoding and self.decode_s is not None:
            self.extra_s = faded(self.extra_s, seconds - self.decode_s)
            self.rows = faded(self.rows, prompt_rows)
            self.last_rows = max(prompt_rows, LEAST_ROWS)
            self.steps += 1

    def _is_like(self, decoding: int) -> bool:
        """Whether a step with so many takes about as long as the one that was timed."""
        return 4 * abs(decoding - self.decoding) <= self.decoding


def faded(before: float, value: float) -> float:
    return before + SMOOTHING * (value - before)
