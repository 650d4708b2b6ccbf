"""Memory pressure, chunks, order: whatever the scheduler does, answers are the lone ones."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from engine.helpers import Client, make_engine, request, run
from engine.scripted_runner import HashRunner, Rules, lone_answer, runner_info
from invar.backends.runner import RunnerInfo
from invar.engine.engine import Engine
from invar.engine.policies import POLICIES
from invar.engine.request import EngineRequest


@pytest.mark.parametrize("chunk", [1, 7, 16, 17, 64, 250])
@pytest.mark.parametrize("window", [None, 1, 18, 24, 50])
def test_b53_any_chunk_size_gives_the_same_tokens(chunk: int, window: int | None) -> None:
    info = runner_info(max_tokens_per_step=chunk, window=window)
    requests = [request(f"p{length}", length, 5) for length in (1, 16, 17, 64, 65, 200)]
    answers = run(make_engine(info), *requests)
    assert answers == {one.id: lone_answer(info, Rules(), one) for one in requests}


def test_b50_a_prompt_beyond_the_pool_is_refused_and_blocks_nobody() -> None:
    info = runner_info(slabs=32, max_model_len=8192, max_tokens_per_step=512)  # 1,024 tokens
    client = Client(make_engine(info))
    with pytest.raises(ValueError, match=r"1024 tokens"):
        client.engine.add_request(request("long", 1500, 5))
    short = [request(f"s{i}", 10, 5) for i in range(10)]
    client.add(*short)
    assert client.drain() == {one.id: lone_answer(info, Rules(), one) for one in short}


def test_b50_a_request_that_fills_the_pool_alone_ends() -> None:
    info = runner_info(slabs=32, max_model_len=8192, max_tokens_per_step=512)
    # 900 + max_tokens 500, as the door cuts it: the last token is never written.
    full = request("full", 900, 125)
    beside = [request(f"s{i}", 100, 30) for i in range(5)]
    client = Client(make_engine(info))
    client.add(full, *beside)
    answers = client.drain()
    assert len(answers["full"].token_ids) == 125
    assert answers["full"].finish_reason == "length"
    assert answers == {one.id: lone_answer(info, Rules(), one) for one in [full, *beside]}


def test_b51_two_resumed_conversations_of_more_than_half_the_pool_both_end() -> None:
    info = runner_info(slabs=8, max_tokens_per_step=48)  # 256 tokens
    whole = [request(name, 100, 60) for name in ("a", "b")]
    expected = {one.id: lone_answer(info, Rules(), one) for one in whole}
    resumed = [
        replace(one, output_token_ids=np.array(expected[one.id].token_ids[:50], np.int32))
        for one in whole
    ]
    client = Client(make_engine(info))
    client.add(*resumed)
    silent = 0
    while client.engine.has_unfinished:
        silent = 0 if client.step() else silent + 1
        assert silent <= 4  # chunks of 150 tokens
    for one in whole:
        assert client.answers[one.id].token_ids == expected[one.id].token_ids[50:]


def test_the_youngest_gives_way() -> None:
    client = Client(make_engine(runner_info(slabs=6)))
    client.add(request("old", 30, 60), request("middle", 30, 60), request("young", 30, 60))
    order = []
    while client.engine.has_unfinished:
        order += [output.request_id for output in client.step() if output.finish_reason]
    assert order == ["old", "middle", "young"]
    assert client.engine.stats().preemptions > 0


def test_priority_decides_who_runs_and_who_gives_way() -> None:
    client = Client(make_engine(runner_info(max_sequences=1), policy="priority"))
    client.add(request("running", 5, 3, priority=5))
    client.step()
    client.add(request("late", 5, 3, priority=9), request("urgent", 5, 3, priority=-1))
    order = []
    while client.engine.has_unfinished:
        order += [output.request_id for output in client.step() if output.finish_reason]
    assert order == ["running", "urgent", "late"]


def test_pages_behind_the_window_come_back_before_the_end() -> None:
    info = runner_info(slabs=64, window=32, max_tokens_per_step=32)
    client = Client(make_engine(info))
    client.add(request("w", 200, 20))
    most = 0
    while client.engine.has_unfinished:
        client.step()
        for holding in client.engine.memory.held.values():
            window = holding.groups[1]
            most = max(most, window.end - window.first)
    assert most == 3  # 31 + 32 tokens across page boundaries; without the window it would be 7


def test_half_used_slabs_of_strangers_cannot_stop_the_oldest() -> None:
    """A stranger's page makes the oldest take its fourth window page from a second slab.

    That page lives until token 223, but the seventh page of the full group, at token 193, needs
    the slab. Nobody is left to give way: the request starts over with the memory to itself.
    """
    info = runner_info(slabs=8, window=96, window_pages_per_slab=4, max_tokens_per_step=2)
    client = Client(make_engine(info))
    assert client.engine.kv_capacity_tokens == 224
    oldest, strangers = request("old", 90, 135), [request(f"s{i}", 5, 12) for i in range(40)]
    client.add(oldest, *strangers)
    was_short = False
    while client.engine.has_unfinished:
        client.step()
        running = client.engine.scheduler.running
        if any(state.needs_all_memory for state in running):
            was_short = True
            assert len(running) == 1
    assert was_short
    assert client.answers == {
        one.id: lone_answer(info, Rules(), one) for one in [oldest, *strangers]
    }


def test_a_victim_whose_row_was_planned_does_not_run() -> None:
    """The young one decodes and is planned first; then the old one's prompt needs its page."""
    info = runner_info(slabs=40, window=20, max_tokens_per_step=24)
    engine = make_engine(info, policy="priority", prefix_caching=False)
    client = Client(engine)
    pool = engine.memory.pools[0]
    old, young = request("old", 220, 4, priority=-1), request("young", 5, 60)
    client.add(young)
    client.step()
    client.add(old)
    planned = 0
    while engine.has_unfinished:
        preemptions = engine.stats().preemptions
        stolen = np.empty(0, np.int32)
        if engine.steps > 2 and engine.scheduler.running[0].num_remaining > 1:
            stolen = np.empty(engine.memory.arbiter.num_free, np.int32)
            pool.take(stolen)  # by strangers
        outputs = engine.step()
        pool.drop(stolen)
        pool.give_back(stolen)
        if engine.stats().preemptions > preemptions:
            planned += 1
            assert "young" not in {output.request_id for output in outputs}
        for output in outputs:
            client.take(output)
        engine.check_integrity()
    assert planned
    assert client.answers == {one.id: lone_answer(info, Rules(), one) for one in (old, young)}


def test_who_found_no_room_is_not_looked_up_before_somebody_gives_up_pages() -> None:
    info = runner_info(slabs=10, max_tokens_per_step=64)
    engine = make_engine(info)
    client = Client(engine)
    client.add(request("running", 150, 40), request("large", 200, 5))
    opened = 0
    open_slot = engine.memory.open

    def watched(*args: Any, **options: Any) -> tuple[int, int] | None:
        nonlocal opened
        opened += 1
        return open_slot(*args, **options)

    engine.memory.open = watched  # type: ignore[method-assign]
    while not client.answers.get("running") or len(client.answers["running"].token_ids) < 39:
        client.step()
    assert opened == 2
    client.drain()
    assert client.answers["large"].finish_reason == "length"


def calls_of(function: Callable[[], object]) -> int:
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def test_a_thousand_live_sequences() -> None:
    info = runner_info(slabs=4000, max_sequences=1000, max_tokens_per_step=4000, max_model_len=128)
    engine = Engine(HashRunner(info))
    requests = [request(f"r{i}", 33 + i % 7, 20) for i in range(1000)]
    for one in requests:
        engine.add_request(one)
    answers: dict[str, list[int]] = {one.id: [] for one in requests}
    full = 0
    while engine.has_unfinished:
        for output in engine.step():
            answers[output.request_id] += output.token_ids
        if len(engine.scheduler.running) == 1000:
            full += 1
            # Of functions, 20 a sequence: nobody looks at all the others.
            assert calls_of(engine.scheduler.schedule) < 30 * 1000
    engine.check_integrity()
    assert full > 3
    for one in requests[::50]:
        assert answers[one.id] == lone_answer(info, Rules(), one).token_ids


def test_a_prompt_preempted_half_way_is_scored_once() -> None:
    info = runner_info(max_tokens_per_step=16)
    client = Client(make_engine(info))
    scored = request("s", 100, 3, prompt_logprobs=1)
    client.add(scored)
    for steps in (1, 3, 2):
        for _ in range(steps):
            client.step()
        client.engine.scheduler.preempt(client.engine.scheduler.running[0])
    assert client.drain()["s"] == lone_answer(info, Rules(), scored)


# ------------------------------------------------------------------------------ random programs

INFOS = st.builds(
    runner_info,
    slabs=st.integers(4, 14),
    pages_per_slab=st.sampled_from([1, 2]),
    max_tokens_per_step=st.sampled_from([1, 3, 16, 33, 64]),
    max_sequences=st.integers(1, 5),
    window=st.sampled_from([None, 1, 31, 32, 33, 50]),
    window_pages_per_slab=st.sampled_from([1, 2, 3]),
)
OPTIONS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.8]),
        "seed": st.integers(0, 3),
        "choice": st.integers(0, 2),
        "repetition_penalty": st.sampled_from([1.0, 1.2]),
        "logprobs": st.sampled_from([None, 0, 2]),
        "prompt_logprobs": st.sampled_from([None, None, 1]),
        "stop_token_ids": st.frozensets(st.integers(0, 96), max_size=6),
        "min_tokens": st.integers(0, 3),
        "priority": st.integers(-1, 1),
        "tenant": st.sampled_from([None, "a", "b"]),
        "bad_sequences": st.sampled_from([(), ((5,), (6, 7))]),
    }
)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 120), st.integers(1, 40), OPTIONS),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("abort"), st.integers(0, 30)),
        st.tuples(st.just("preempt"), st.integers(0, 30)),
    ),
    max_size=25,
)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(info=INFOS, policy=st.sampled_from(sorted(POLICIES)), operations=OPERATIONS)
def test_random_programs_answer_as_alone(
    info: RunnerInfo, policy: str, operations: list[tuple[Any, ...]]
) -> None:
    client = Client(make_engine(info, policy=policy))
    requests: dict[str, EngineRequest] = {}
    aborted = set()
    for operation, *values in operations:
        if operation == "add":
            length, max_tokens, options = values
            longest = min(info.max_model_len, client.engine.kv_capacity_tokens + 1)
            length = min(length, longest - 1)
            max_tokens = min(max_tokens, longest - length)
            if length < 1:
                continue
            options = {**options, "min_tokens": min(options["min_tokens"], max_tokens)}
            one = request(f"r{len(requests)}", length, max_tokens, **options)
            requests[one.id] = one
            client.add(one)
        elif operation == "step":
            for _ in range(values[0]):
                client.step()
        elif operation == "abort" and f"r{values[0]}" in requests:
            if client.abort(f"r{values[0]}"):
                aborted.add(f"r{values[0]}")
        elif operation == "preempt":
            running = client.engine.scheduler.running
            if running:
                client.engine.scheduler.preempt(running[values[0] % len(running)])
                client.engine.check_integrity()
    client.drain(limit=20_000)
    for name, one in requests.items():
        if name not in aborted:
            assert client.answers[name] == lone_answer(info, Rules(), one), name
    assert client.engine.stats().kv_usage == 0


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    info=INFOS,
    policy=st.sampled_from(sorted(POLICIES)),
    requests=st.lists(
        st.tuples(st.integers(1, 150), st.integers(-1, 1), st.sampled_from("ab")),
        min_size=1,
        max_size=8,
    ),
)
@example(  # two that take turns in memory for one must not read their prompts for ever
    info=runner_info(slabs=4, max_tokens_per_step=1, max_sequences=1),
    policy="fair",
    requests=[(45, 0, "a"), (65, 0, "b")],
)
@example(
    info=runner_info(
        slabs=4,
        pages_per_slab=2,
        max_tokens_per_step=1,
        max_sequences=1,
        window=32,
        window_pages_per_slab=3,
    ),
    policy="fair",
    requests=[
        (n, 0, t) for n, t in zip((34, 34, 34, 85, 85, 108, 120, 148), "abbaabab", strict=True)
    ],
)
def test_b51_while_anything_waits_every_step_runs_something_and_soon_one_gets_a_token(
    info: RunnerInfo, policy: str, requests: list[tuple[int, int, str]]
) -> None:
    client = Client(make_engine(info, policy=policy))
    longest = min(info.max_model_len, client.engine.kv_capacity_tokens + 1)
    for i, (length, priority, tenant) in enumerate(requests):
        if longest > 1:
            prompt = min(length, longest - 1)
            tokens = min(30, longest - prompt)
            client.add(request(f"r{i}", prompt, tokens, priority=priority, tenant=tenant))
    silent = 0
    while client.engine.has_unfinished:
        steps = client.engine.steps
        silent = 0 if client.step() else silent + 1
        assert client.engine.steps == steps + 1
        # A whole context, token by token, and once more after a preemption without anyone beside.
        assert silent <= 2 * info.max_model_len
