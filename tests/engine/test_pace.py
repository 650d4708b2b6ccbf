"""A long prompt beside requests that decode: how much longer their steps become, on a clock that
says what a machine would take."""

from __future__ import annotations

import numpy as np
import pytest

from engine.helpers import request
from engine.scripted_runner import HashRunner, Rules, lone_answer, runner_info
from invar.backends.runner import Batch, RunnerInfo
from invar.engine.engine import Engine
from invar.engine.pace import EXTRA, FIRST_ROWS, LEAST_ROWS, STALE_STEPS, Pace

STREAMS = 8


class TimedRunner(HashRunner):
    """Takes time by the rows of a step and by what they look back on."""

    def __init__(self, info: RunnerInfo, row_s: float, token_s: float = 0.0) -> None:
        super().__init__(info)
        self.now, self.row_s, self.token_s = 0.0, row_s, token_s
        self.dice = np.random.default_rng(0)

    def submit(self, batch: Batch) -> HashRunner:
        rows = np.diff(batch.query_start)
        seen = float(rows @ batch.kv_len)
        seconds = 0.010 + self.row_s * int(rows.sum()) + self.token_s * seen
        self.now += seconds * self.dice.uniform(0.95, 1.05)
        return super().submit(batch)


@pytest.mark.parametrize("row_s", [1e-4, 3e-4, 1e-3])
@pytest.mark.parametrize("token_s", [0.0, 1e-7])
def test_gaps_beside_a_long_prompt_stay_under_twice_what_they_were(
    row_s: float, token_s: float
) -> None:
    info = runner_info(
        slabs=400, max_model_len=2000, max_tokens_per_step=512, max_sequences=STREAMS + 1
    )
    runner = TimedRunner(info, row_s, token_s)
    engine = Engine(runner, paces_prompts=True, clock=lambda: runner.now)
    streams = [request(f"s{i}", 20, 1500) for i in range(STREAMS)]
    for one in streams:
        engine.add_request(one)
    while any(state.num_remaining > 1 for state in engine.scheduler.states()):
        engine.step()

    def gaps(until: str | None, most: int) -> list[float]:
        found: list[float] = []
        said = False
        while not said and len(found) < most:
            began = runner.now
            outputs = engine.step()
            assert len(outputs) >= STREAMS, "everyone who decodes gets a token in every step"
            found.append(runner.now - began)
            said = any(output.request_id == until for output in outputs)
        return found

    before = gaps(None, 50)
    engine.add_request(request("long", 1500, 1))
    beside = gaps("long", 1000)
    assert len(beside) < 1000, "the prompt ends"
    assert np.percentile(beside, 99) < 2 * np.percentile(before, 99)
    # What the others can spare is used: on average at least a third of their time.
    assert np.mean(beside) > 1.33 * np.mean(before)


def test_answers_do_not_depend_on_the_pace() -> None:
    info = runner_info(max_sequences=4)
    runner = TimedRunner(info, 1e-3)
    engine = Engine(runner, paces_prompts=True, clock=lambda: runner.now, poison_freed_pages=True)
    requests = [request(f"r{i}", 20 + 50 * (i % 3), 10) for i in range(10)]
    said: dict[str, list[int]] = {one.id: [] for one in requests}
    for one in requests:
        engine.add_request(one)
    while engine.has_unfinished:
        steps = engine.steps
        for output in engine.step():
            said[output.request_id] += output.token_ids
        assert engine.steps == steps + 1, "every step runs something"
        engine.check_integrity()
    for one in requests:
        assert said[one.id] == lone_answer(info, Rules(), one).token_ids


def test_with_nobody_beside_it_a_prompt_takes_the_whole_step() -> None:
    assert Pace().prompt_rows(0, 512) == 512


def test_a_pace_is_found_by_timing_and_kept_up_to_date() -> None:
    pace = Pace()
    assert pace.prompt_rows(8, 512) == 0, "a step without prompts is timed first"
    pace.observe(8, 0, 0.020)
    assert pace.prompt_rows(8, 512) == FIRST_ROWS
    for rows in (FIRST_ROWS, 32, 64, 128):
        assert pace.prompt_rows(8, 512) == rows, "doubled until it is enough"
        pace.observe(8, rows, 0.020 + rows * 0.00005)
    assert pace.prompt_rows(8, 512) == pytest.approx(EXTRA * 0.020 / 0.00005, abs=1)
    assert pace.prompt_rows(8, 100) == 100
    assert pace.prompt_rows(9, 512) > 0
    assert pace.prompt_rows(20, 512) == 0, "other requests decode by now"
    for _ in range(STALE_STEPS):
        pace.observe(8, 100, 0.030)
    assert pace.prompt_rows(8, 512) == 0
    pace.observe(8, 0, 0.020)
    assert pace.prompt_rows(8, 512) > LEAST_ROWS
    pace.observe(8, 10, 10.0)
    assert pace.prompt_rows(8, 512) == LEAST_ROWS, "a prompt always gets on"
