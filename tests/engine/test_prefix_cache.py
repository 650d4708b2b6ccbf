"""Reuse of computed prefixes: what is shared, with whom, what it costs in rows, what is evicted."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from engine.helpers import Client, make_engine, request, run, words
from engine.scripted_runner import HashRunner, Rules, lone_answer, runner_info
from invar.backends.runner import PAGE_TOKENS, RunnerInfo
from invar.engine.engine import Engine
from invar.engine.kv import KVMemory
from invar.engine.request import EngineRequest
from invar.engine.sampling_params import SamplingParams

INFO = runner_info()


def check(client: Client, info: RunnerInfo, *requests: EngineRequest) -> None:
    for one in requests:
        assert client.answers[one.id] == lone_answer(info, Rules(), one), one.id


def rows_run(engine: Engine) -> int:
    assert isinstance(engine.runner, HashRunner)
    return sum(len(batch.token_ids) for batch in engine.runner.batches)


def turn(client: Client, one: EngineRequest) -> int:
    """Runs a request to its end; the tokens that it reused."""
    client.add(one)
    client.drain()
    return client.cached[one.id]


# ------------------------------------------------------------------------------ what is reused


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 64, 65, 100])
def test_the_same_prompt_again_runs_its_last_token_only(length: int) -> None:
    client = Client(make_engine(INFO))
    first, again = request("first", words(1, length), 1), request("again", words(1, length), 1)
    assert turn(client, first) == 0
    rows = rows_run(client.engine)
    assert turn(client, again) == length - 1
    assert rows_run(client.engine) == rows + 1
    check(client, INFO, first, again)


@pytest.mark.parametrize("common", [0, 1, 5, 31, 32, 33, 63, 64, 70, 96])
def test_reuse_is_exact_to_the_token(common: int) -> None:
    client = Client(make_engine(INFO))
    first = request("first", words(1, 100), 4)
    other = request("other", [*words(1, common), 96 - words(1, 100)[common], *words(2, 30)], 4)
    turn(client, first)
    assert turn(client, other) == common
    check(client, INFO, first, other)


def test_what_was_generated_is_reused_as_well() -> None:
    client = Client(make_engine(INFO))
    first = request("first", words(1, 40), 30)
    turn(client, first)
    said = client.answers["first"].token_ids
    second = request("second", [*words(1, 40), *said, *words(2, 10)], 30)
    assert turn(client, second) == 40 + 29  # the last token was drawn, never run
    third_prompt = [*second.prompt_token_ids.tolist(), *client.answers["second"].token_ids, 5]
    assert turn(client, request("third", third_prompt, 3)) == 80 + 29
    check(client, INFO, first, second)


def test_a_partly_filled_page_gives_way_to_a_fuller_one() -> None:
    client = Client(make_engine(INFO))
    for index, length in enumerate((40, 50, 45, 64, 70)):
        turn(client, request(f"r{index}", words(1, length), 1))
        assert len(list(client.engine.memory.tree.nodes())) <= 2
    assert client.cached == {"r0": 0, "r1": 40, "r2": 44, "r3": 50, "r4": 64}


def test_prompts_submitted_together_are_computed_once() -> None:
    info = runner_info(max_tokens_per_step=160)
    client = Client(make_engine(info))
    prompt = words(1, 200)
    requests = [request(f"r{i}", [*prompt, i, 7], 5) for i in range(4)]
    client.add(*requests)
    client.drain()
    check(client, info, *requests)
    assert [client.cached[f"r{i}"] for i in range(4)] == [0, 200, 200, 200]
    assert rows_run(client.engine) == 202 + 3 * 2 + 4 * 4


@pytest.mark.parametrize(("priority", "beside"), [(-1, True), (0, False)])
def test_the_first_in_order_waits_for_nobody(priority: int, beside: bool) -> None:
    client = Client(make_engine(INFO, policy="priority"))  # 64 tokens a step
    client.add(request("running", words(1, 104), 3))
    client.step()
    client.add(request("late", words(1, 104), 3, priority=priority))
    client.step()
    assert (len(client.engine.scheduler.running) == 2) is beside
    client.drain()
    assert client.cached["late"] == (64 if beside else 103)


def test_b25_choices_share_the_pages_of_their_prompt() -> None:
    client = Client(make_engine(runner_info(max_tokens_per_step=128)))
    choices = [
        request(f"c{i}", words(1, 70), 20, seed=5, choice=i, temperature=1.2) for i in range(4)
    ]
    client.add(*choices)
    for _ in range(3):
        client.step()
    memory = client.engine.memory
    assert len(memory.held) == 4
    shared = {tuple(memory.tables[0][slot, :2].tolist()) for slot in memory.held}
    own = {int(memory.tables[0][slot, 2]) for slot in memory.held}
    assert (len(shared), len(own)) == (1, 4)
    client.drain()
    check(client, INFO, *choices)
    assert [client.cached[f"c{i}"] for i in range(4)] == [0, 69, 69, 69]


def test_without_caching_nothing_is_kept() -> None:
    client = Client(make_engine(INFO, prefix_caching=False))
    for name in ("a", "b"):
        assert turn(client, request(name, words(1, 100), 5)) == 0
    stats = client.engine.stats()
    assert (stats.cache_tokens, stats.cache_queries, stats.cache_hits) == (0, 0, 0)
    assert client.engine.memory.arbiter.num_free == 64


def test_a_request_may_refuse_to_read() -> None:
    client = Client(make_engine(INFO))
    turn(client, request("a", words(1, 100), 5))
    rows = rows_run(client.engine)
    assert turn(client, request("b", words(1, 100), 5, reads_cache=False)) == 0
    assert rows_run(client.engine) == rows + 104
    assert SamplingParams(skip_reading_prefix_cache=True)


def test_counts() -> None:
    client = Client(make_engine(INFO))
    turn(client, request("a", words(1, 100), 5))
    turn(client, request("b", words(1, 100), 5))
    stats = client.engine.stats()
    assert (stats.cache_queries, stats.cache_hits, stats.cache_evictions) == (200, 99, 0)
    assert stats.cache_tokens == 104
    assert stats.kv_usage == 0


def test_reset_forgets_and_harms_nobody() -> None:
    client = Client(make_engine(INFO))
    turn(client, request("old", words(1, 100), 5))
    running = request("running", words(1, 100), 60)
    client.add(running)
    for _ in range(40):
        client.step()
    assert client.engine.reset_prefix_cache()
    client.engine.check_integrity()
    assert turn(client, request("new", words(1, 100), 2)) == 0
    client.drain()
    check(client, INFO, running)
    client.engine.reset_prefix_cache()
    assert client.engine.memory.arbiter.num_free == 64
    assert not client.engine.memory.tree.roots


# --------------------------------------------------------------------------------------- cases


def test_b46_no_request_sees_what_another_one_said() -> None:
    """200 prompts with a marker each, 8 at a time, in memory for a few of them."""
    info = runner_info(slabs=24, max_sequences=8)
    client = Client(make_engine(info))
    dice = random.Random(3)
    requests = []
    for index in range(200):
        begun = words(index % 5, dice.randrange(0, 60)) if dice.random() < 0.3 else []
        marker = [index % 97, index // 97, 11]
        requests.append(request(f"r{index}", [*begun, *marker, *words(index, 20)], 6))
    for one in requests:
        client.add(one)
        while len(client.engine.states) >= 8:
            client.step()
    client.drain()
    check(client, info, *requests)
    stats = client.engine.stats()
    assert stats.cache_hits > 0
    assert stats.cache_evictions > 0
    # Every row of a prompt was run or reused; only preemption runs some twice.
    prompts = sum(len(one.prompt_token_ids) for one in requests)
    assert stats.prompt_tokens >= prompts - sum(client.cached.values())
    if not stats.preemptions:
        assert stats.prompt_tokens == prompts - sum(client.cached.values())


def test_b48_nothing_is_shared_between_salts() -> None:
    """The same prompt under salt A, A, B and none, one after another and all at once."""
    info = runner_info(max_model_len=512)
    prompt = words(1, 300)
    for together in (False, True):
        client = Client(make_engine(info))
        salts = {"a1": "A", "a2": "A", "b": "B", "none": None, "ab": "AB", "empty": ""}
        requests = [request(name, prompt, 3, cache_salt=salt) for name, salt in salts.items()]
        if together:
            client.add(*requests)
            client.drain()
        else:
            for one in requests:
                turn(client, one)
        check(client, info, *requests)
        assert client.cached == {"a1": 0, "a2": 299, "b": 0, "none": 0, "ab": 0, "empty": 0}


@pytest.mark.parametrize("length", [1, PAGE_TOKENS, PAGE_TOKENS + 1, 3 * PAGE_TOKENS])
@pytest.mark.parametrize("chunk", [7, 64])
def test_b49_scores_of_a_prompt_do_not_depend_on_what_is_cached(length: int, chunk: int) -> None:
    info = runner_info(max_tokens_per_step=chunk)
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
        made = (
            request("plain", words(1, length), 3),
            request("scored", words(1, length), 3, prompt_logprobs=2),
            request("longer", [*words(1, length), *words(2, 9)], 3, prompt_logprobs=2),
        )
        requests = [made[index] for index in order]
        again = [replace(one, id=f"{one.id} again") for one in requests]
        client = Client(make_engine(info))
        for one in [*requests, *again]:
            turn(client, one)
        check(client, info, *requests, *again)
        scores = client.answers["scored"].prompt_logprobs
        assert scores is not None
        assert (len(scores), scores[0]) == (length, None)


def test_b51_two_conversations_with_cached_prefixes_of_half_the_pool_both_go_on() -> None:
    info = runner_info(slabs=8, max_tokens_per_step=48)  # 256 tokens
    client = Client(make_engine(info))
    begun = [request(name, words(seed, 100), 10) for seed, name in enumerate("ab")]
    for one in begun:
        turn(client, one)
    resumed = [client.resumed(one, words(9, 20), 60) for one in begun]
    client.add(*resumed)
    client.drain(limit=200)
    check(client, info, *resumed)
    assert client.cached["a2"] == 109


def test_a_prompt_too_large_for_now_does_not_empty_the_cache() -> None:
    info = runner_info(slabs=10, max_tokens_per_step=64)
    client = Client(make_engine(info))
    turn(client, request("kept", words(1, 64), 1))
    client.add(request("running", words(2, 150), 30))
    client.step()
    client.add(request("large", words(3, 200), 5))
    for _ in range(5):
        client.step()
    assert len(client.engine.scheduler.waiting) == 1
    assert client.engine.stats().cache_evictions == 0
    client.drain()


def test_a_preempted_request_finds_what_it_had() -> None:
    client = Client(make_engine(INFO))
    client.add(request("r", words(1, 100), 20))
    for _ in range(10):
        client.step()
    rows = rows_run(client.engine)
    client.engine.scheduler.preempt(client.engine.scheduler.running[0])
    client.step()
    assert rows_run(client.engine) == rows + 1
    client.drain()
    assert client.cached["r"] == 0


def test_nobody_is_the_victim_twice_while_another_can_yield() -> None:
    info = runner_info(slabs=10, max_tokens_per_step=64, max_sequences=5)
    client = Client(make_engine(info))
    client.add(*[request(f"r{i}", words(i, 20), 200) for i in range(5)])
    scheduler = client.engine.scheduler
    victims: list[str] = []
    preempt = scheduler.preempt

    def watched(state) -> None:  # type: ignore[no-untyped-def]
        if victims and victims[-1] == state.request.id:
            assert len(scheduler.running) <= 2
        victims.append(state.request.id)
        preempt(state)

    scheduler.preempt = watched  # type: ignore[method-assign]
    client.drain()
    assert len(victims) > 3


# ------------------------------------------------------------------------------------- eviction


def memory_of(info: RunnerInfo) -> KVMemory:
    return KVMemory(
        info, max_model_len=256, max_chunk=64, copy_pages=lambda group, sources, targets: None
    )


def through(kv: KVMemory, ids: list[int], reads: bool = True) -> int:
    """Computes a prompt in one piece and gives it back; the tokens that were there."""
    array = np.array(ids, np.int32)
    found = kv.open(array, len(ids), len(ids) - 1 if reads else 0)
    assert found is not None
    slot, cached = found
    assert kv.extend(slot, len(ids))
    kv.advance(slot, len(ids))
    kv.check_integrity()
    kv.give_back(slot)
    kv.check_integrity()
    return cached


def test_the_least_recently_used_goes_first_and_its_end_before_its_beginning() -> None:
    kv = memory_of(runner_info(slabs=8))
    through(kv, words(1, 128))
    through(kv, words(2, 96))
    assert through(kv, words(1, 128)) == 127  # used again, on a page of its own for the last token
    through(kv, words(3, 64))  # one page is missing: the last of words(2)
    assert kv.tree.num_evicted_tokens == 32
    assert through(kv, [*words(2, 64), 5]) == 64
    assert through(kv, words(3, 64)) == 63


def test_a_common_prefix_outlives_its_branches() -> None:
    kv = memory_of(runner_info(slabs=8))
    for branch in range(20):
        assert through(kv, [*words(1, 96), branch, *words(50 + branch, 39)]) == (
            96 if branch else 0
        )


def test_what_is_computed_twice_is_kept_once() -> None:
    kv = memory_of(runner_info(slabs=16, window=40))
    for _ in range(3):
        through(kv, words(1, 100), reads=False)
    assert kv.tree.num_tokens == 100
    assert kv.arbiter.num_free == 16 - 2 * 4


# -------------------------------------------------------------------------------------- windows


def test_a_prefix_whose_last_window_is_gone_is_not_reused() -> None:
    kv = memory_of(runner_info(slabs=40, window=64))
    through(kv, words(1, 200))
    tree = kv.tree
    assert tree.usable(tree.match(None, np.array(words(1, 130), np.int32).tobytes())).tokens == 130
    while tree._evict_wide():
        kv.check_integrity()
    # The end of the run is left with its window, its middle without one.
    assert tree.usable(tree.match(None, np.array(words(1, 130), np.int32).tobytes())).tokens == 0
    assert through(kv, [*words(1, 200), 5]) == 200
    # Who computes it again gives the tree what it lacks.
    assert through(kv, [*words(1, 130), *words(2, 20)]) == 0
    assert through(kv, [*words(1, 130), *words(3, 20)]) == 130


def test_pages_behind_windows_go_before_any_prefix_does() -> None:
    info = runner_info(slabs=2 * 7 + 4, window=32)
    kv = memory_of(info)
    through(kv, words(1, 200))
    through(kv, words(2, 120))
    assert kv.tree.num_evicted_tokens == 0
    assert through(kv, [*words(1, 200), 5]) == 200


def test_a_model_with_windows_only() -> None:
    info = replace(runner_info(slabs=12), groups=runner_info(window=40).groups[1:])
    client = Client(make_engine(info))
    first = request("first", words(1, 150), 20)
    turn(client, first)
    second = request("second", [*words(1, 150), *client.answers["first"].token_ids, 5], 20)
    assert turn(client, second) == 169
    strangers = [request(f"s{i}", words(5 + i, 90), 20) for i in range(6)]
    client.add(*strangers)
    client.drain()
    check(client, info, first, second, *strangers)


def test_answers_with_and_without_caching_are_equal() -> None:
    info = runner_info(slabs=20, window=33, max_tokens_per_step=24)
    requests = [request(f"r{i}", [*words(i % 3, 50), *words(i, 20)], 12) for i in range(12)]
    cached = run(make_engine(info), *requests)
    assert cached == run(make_engine(info, prefix_caching=False), *requests)
