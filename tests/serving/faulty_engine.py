"""An engine process over a real model that some prompts kill, hang or slow down.

Run as a script in place of `python -m invar.serving.engine_process`. What is still held whenever
nothing runs ends the process, so that a leak shows.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import numpy as np

from invar.backends.runner import Batch
from invar.config import EngineConfig
from invar.serving import engine_process
from invar.serving.messages import EngineFacts, StepEngine
from invar.serving.shared_page import SharedPage

# First tokens of prompts.
KILLS, HANGS, RAISES, SLOW, UNSCHEDULABLE = 260, 261, 262, 263, 264
SLOW_STEP_S = 3.0  # half as long again as what no advance may take
LEAKED = 86  # exit code


def load(config: EngineConfig, page: SharedPage) -> tuple[StepEngine, EngineFacts]:
    engine: Any
    engine, facts = engine_process.load_model(config, page)
    submit, add_request, stats = engine.runner.submit, engine.add_request, engine.stats
    schedule = engine.scheduler.schedule
    faults: dict[str, int] = {}

    def faulty_add(request: Any) -> None:
        faults[request.id] = int(request.prompt_token_ids[0])
        if faults[request.id] == RAISES:
            engine.step = raising
        add_request(request)

    def faulty_submit(batch: Batch) -> Any:
        running = {faults[request_id] for request_id in page.running}
        if KILLS in running:
            os.kill(os.getpid(), signal.SIGSEGV)
        if HANGS in running:
            time.sleep(1000)
        if SLOW in running:
            end = time.monotonic() + SLOW_STEP_S
            while time.monotonic() < end:
                time.sleep(0.05)
                page.work_items[0] += np.uint64(1)
        return submit(batch)

    def faulty_schedule() -> Any:
        """Looks at those that wait, and dies of what it finds."""
        if any(faults[state.request.id] == UNSCHEDULABLE for state in engine.scheduler.waiting):
            os.kill(os.getpid(), signal.SIGSEGV)
        return schedule()

    def raising() -> Any:
        raise RuntimeError("the scheduler has lost its way")

    def checked_stats() -> Any:
        if not engine.has_unfinished:
            try:
                engine.check_integrity()
                assert stats().kv_usage == 0
            except AssertionError:
                os._exit(LEAKED)
        return stats()

    engine.runner.submit, engine.add_request = faulty_submit, faulty_add
    engine.scheduler.schedule, engine.stats = faulty_schedule, checked_stats
    return engine, facts


if __name__ == "__main__":
    sys.exit(engine_process.main(load))
