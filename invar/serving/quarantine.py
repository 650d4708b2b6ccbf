"""Which request kills the engine? The step that died is tried again in halves.

After a death the requests of its step are suspects. The next engine process is told to take them in
groups: the first half alone; once each of its requests has come past the point of the death, the
second half beside it; then everybody else. If it dies again, only the group that was being tried
stays under suspicion and is halved. A lone suspect with which the engine dies twice, while it is
alone in the step, is the culprit. Nobody else is refused, and what is tried loses nothing.

A culprit among n requests is found in log2(n) + 2 deaths, one more where a half was tried beside
the innocent one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from invar.engine.request import EngineOutput

# Tokens after which a request counts as past the point where the engine died. What the engine had
# drawn and nobody received is drawn again: a step or two of it.
CLEARING_TOKENS = 4
DEATHS_ALONE = 2

Groups = tuple[tuple[str, ...], ...]


class Quarantine:
    """The supervisor's side: lives through all engine processes."""

    def __init__(self) -> None:
        self.trials: Groups = ()  # what the next engine process is to try, in order
        self._alone: Counter[str] = Counter()

    def engine_died(self, step: Sequence[str], passed: int) -> tuple[str | None, bool]:
        """Takes the requests of the step that died (none: it died between steps) and how many
        trials it had passed. Returns the culprit, if it is found now, and whether this death was
        part of the search: it made the circle of suspects smaller."""
        tried = self.trials[passed] if passed < len(self.trials) else ()
        for cleared in self.trials[:passed]:
            for request_id in cleared:
                del self._alone[request_id]
        if not step:
            self.trials = self.trials[passed:]
            return None, False
        suspects = tuple(one for one in tried if one in step)
        searching = bool(suspects)
        suspects = suspects or tuple(step)
        if len(step) == 1:
            self._alone[step[0]] += 1
            if self._alone[step[0]] >= DEATHS_ALONE:
                self.trials = ()
                del self._alone[step[0]]
                return step[0], searching
        half = (len(suspects) + 1) // 2
        self.trials = tuple(filter(None, (suspects[:half], suspects[half:])))
        return None, searching


class TrialGate:
    """The engine's side: who may run yet."""

    def __init__(self, trials: Groups) -> None:
        self._trials = trials
        self.passed = 0
        self._to_clear: dict[str, int] = {}  # of the group that is tried: tokens still to come
        self._started = False

    @property
    def is_open(self) -> bool:
        return self.passed >= len(self._trials)

    def next_group(self, waiting: Sequence[str]) -> list[str] | None:
        """Those of `waiting` who may run now, once the group before has been cleared; None while
        it has not. With the last group cleared, all may.
        """
        while not self.is_open:
            if self._to_clear:
                return None
            if self._started:
                self.passed += 1
                self._started = False
                continue
            self._started = True
            group = [one for one in self._trials[self.passed] if one in waiting]
            self._to_clear = dict.fromkeys(group, CLEARING_TOKENS)
            if group:
                return group
        return list(waiting)

    def saw(self, output: EngineOutput) -> None:
        left = self._to_clear.get(output.request_id)
        if left is None:
            return
        self._to_clear[output.request_id] = left = left - len(output.token_ids)
        if left <= 0 or output.finish_reason is not None:
            self.gone(output.request_id)

    def gone(self, request_id: str) -> None:
        """Has ended, or nobody waits for it any more."""
        self._to_clear.pop(request_id, None)
