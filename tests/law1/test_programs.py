"""Law 1 over shared prefixes: whatever is reused, evicted or preempted, answers are lone ones."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from engine.helpers import make_engine
from engine.scripted_runner import VOCAB, Rules, lone_answer, runner_info
from golden.tiny_models import TINY_MODELS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from invar.engine.engine import Engine
from invar.engine.page_file import PageLayout
from invar.engine.page_store import PageStore
from invar.engine.policies import POLICIES
from law1.programs import ColdRuns, Program, tiny_engines

# All in all more than 10,000 operations (asserted below), in less than two minutes of two cores.
RUNS = settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
operations: list[int] = []


KV_FORMATS = ("mistral_window int8",)  # beside bf16, which is the usual one


@pytest.fixture(scope="module", params=[*TINY_MODELS, *KV_FORMATS])
def cold(request: pytest.FixtureRequest) -> tuple[str, ColdRuns]:
    return str(request.param), ColdRuns(str(request.param))


@RUNS
@given(dice=st.randoms(use_true_random=False))
def test_b46_programs_over_tiny_models(cold: tuple[str, ColdRuns], dice: random.Random) -> None:
    model, lone = cold
    program = Program(tiny_engines(model, dice), lone, dice, vocab=256)
    program.run(60)
    operations.append(program.operations)


INFOS = st.builds(
    runner_info,
    slabs=st.integers(5, 24),
    pages_per_slab=st.sampled_from([1, 2, 3]),
    max_tokens_per_step=st.sampled_from([1, 7, 33, 64]),
    max_sequences=st.integers(1, 6),
    window=st.sampled_from([None, None, 1, 32, 33, 50]),
    window_pages_per_slab=st.sampled_from([1, 2, 3]),
)


@settings(RUNS, max_examples=60)
@given(
    info=INFOS,
    policy=st.sampled_from(sorted(POLICIES)),
    dice=st.randoms(use_true_random=False),
)
def test_programs_over_any_memory(info, policy: str, dice: random.Random) -> None:  # type: ignore[no-untyped-def]
    if make_engine(info).kv_capacity_tokens < 2:
        return
    layout = PageLayout("hash", [group.page_bytes for group in info.groups])

    def make(folder: Path) -> Engine:
        store = PageStore(folder, layout, 1 << 20)
        return make_engine(info, policy=policy, store=store, store_salted=True)

    program = Program(make, lambda one: lone_answer(info, Rules(), one), dice, VOCAB)
    program.run(60)
    operations.append(program.operations)


def test_there_were_ten_thousand_operations() -> None:
    assert sum(operations) >= 10_000
