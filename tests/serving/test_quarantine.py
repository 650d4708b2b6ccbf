"""Halving: the culprit is found, nobody else is accused, and in few deaths."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from invar.engine.request import EngineOutput, FinishReason
from invar.serving.quarantine import CLEARING_TOKENS, Quarantine, TrialGate

TOKENS = 12  # of an answer


class World:
    """Engines that die in a step with the culprit once it has so many tokens."""

    def __init__(self, count: int, culprit: int | None, fatal_at: int, lost: int = 0) -> None:
        self.received = {f"r{index}": 0 for index in range(count)}
        self.culprit, self.fatal_at, self.lost = f"r{culprit}", fatal_at, lost
        self.quarantine = Quarantine()
        self.deaths = self.uncounted = 0
        self.condemned: list[str] = []

    def run(self, *, kill_at_step: int | None = None, together: int = 64) -> None:
        """One engine process, killed from outside after some steps, or by the culprit."""
        gate = TrialGate(self.quarantine.trials)
        waiting, running, drawn = list(self.received), [], dict(self.received)
        for step in range(1000):
            for one in gate.next_group(waiting) or ():
                waiting.remove(one)
                running.append(one)
            batch = running[:together]
            if not batch:
                assert gate.is_open or not waiting
                return
            if step == kill_at_step or (
                self.culprit in batch and drawn[self.culprit] >= self.fatal_at
            ):
                self.die(batch, gate.passed)
                return
            for one in batch:
                drawn[one] += 1
                done = drawn[one] == TOKENS
                gate.saw(EngineOutput(one, [1], finish_reason=FinishReason.STOP if done else None))
                # What was drawn in the last steps before the death is not received.
                self.received[one] = (
                    drawn[one] if done else max(self.received[one], drawn[one] - self.lost)
                )
                if done:
                    running.remove(one)
                    del self.received[one]

    def die(self, step: list[str], passed: int) -> None:
        self.deaths += 1
        culprit, searching = self.quarantine.engine_died(step, passed)
        self.uncounted += searching
        if culprit is not None:
            self.condemned.append(culprit)
            del self.received[culprit]


@given(
    count=st.integers(1, 40),
    culprit=st.integers(0, 39),
    fatal_at=st.integers(0, TOKENS - 1),
    lost=st.integers(0, CLEARING_TOKENS - 2),
    together=st.sampled_from([4, 64]),
)
def test_the_culprit_alone_is_refused(
    count: int, culprit: int, fatal_at: int, lost: int, together: int
) -> None:
    culprit %= count
    world = World(count, culprit, fatal_at, lost)
    while world.received:
        world.run(together=together)
        assert world.deaths < 30
    assert world.condemned == [f"r{culprit}"]
    assert world.deaths <= math.ceil(math.log2(count)) + 3
    # The search itself does not bring the server nearer to giving up.
    assert world.deaths - world.uncounted <= 2


@given(
    count=st.integers(1, 40),
    kills=st.lists(st.integers(0, 2 * CLEARING_TOKENS), max_size=6),
)
def test_kills_from_outside_condemn_nobody_who_moves(count: int, kills: list[int]) -> None:
    """A lone request is suspected, and cleared as it passes the point of the death."""
    world = World(count, None, 0)
    for kill in kills:
        world.run(kill_at_step=CLEARING_TOKENS + 1 + kill)
    world.run()
    assert not world.received
    assert not world.condemned


def test_a_death_between_steps_accuses_nobody() -> None:
    quarantine = Quarantine()
    assert quarantine.engine_died([], 0) == (None, False)
    assert quarantine.trials == ()
    quarantine.engine_died(["a", "b", "c"], 0)
    assert quarantine.trials == (("a", "b"), ("c",))
    # It died again before the second half was tried: that is still to come.
    assert quarantine.engine_died([], 1) == (None, False)
    assert quarantine.trials == (("c",),)


def test_trials_pass_over_those_who_have_gone() -> None:
    gate = TrialGate((("a", "b"), ("c",), ("d",)))
    assert gate.next_group(["x", "b", "d"]) == ["b"]
    assert gate.next_group(["x", "d"]) is None
    gate.gone("b")
    assert gate.next_group(["x", "d"]) == ["d"]
    assert gate.passed == 2
    gate.saw(EngineOutput("d", [1] * CLEARING_TOKENS))
    assert gate.next_group(["x"]) == ["x"]
    assert gate.is_open
