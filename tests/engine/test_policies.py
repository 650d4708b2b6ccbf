"""Whose turn it is: longest prefixes without starvation, shares of tenants."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.helpers import Client, make_engine, request, words
from engine.scripted_runner import Rules, lone_answer, runner_info
from invar.engine.policies import MAX_PASSED_OVER, OUTPUT_COST, FairShares
from invar.engine.request import EngineRequest


def order_of_ends(client: Client) -> list[str]:
    order = []
    while client.engine.has_unfinished:
        order += [output.request_id for output in client.step() if output.finish_reason]
    return order


# ------------------------------------------------------------------------------------------ lpm


def test_the_longest_cached_prefix_is_next() -> None:
    client = Client(make_engine(runner_info(max_sequences=1), policy="lpm"))
    client.add(request("cached", words(1, 100), 1))
    client.drain()
    client.add(request("running", words(2, 40), 5))
    client.step()
    client.add(
        request("stranger", words(3, 100), 1),
        request("half", [*words(1, 50), *words(4, 50)], 1),
        request("whole", [*words(1, 100), 7], 1),
    )
    assert order_of_ends(client) == ["running", "whole", "half", "stranger"]
    assert client.cached["whole"] == 100


def test_without_caching_lpm_is_first_come_first_served() -> None:
    info = runner_info(max_sequences=1)
    client = Client(make_engine(info, policy="lpm", prefix_caching=False))
    client.add(*[request(f"r{i}", words(1, 40), 2) for i in range(5)])
    assert order_of_ends(client) == [f"r{i}" for i in range(5)]


@settings(max_examples=20, deadline=None)
@given(strangers=st.integers(1, 4), slots=st.integers(1, 3))
def test_lpm_starves_nobody(strangers: int, slots: int) -> None:
    """However many come with a cached prefix, nobody is passed over without end."""
    client = Client(make_engine(runner_info(max_sequences=slots), policy="lpm"))
    client.add(request("cached", words(1, 64), 1))
    client.drain()
    client.add(*[request(f"s{i}", words(10 + i, 40), 3) for i in range(strangers)])
    left = {f"s{i}" for i in range(strangers)}
    ended = 0  # of those that came later
    for number in range(200):
        client.add(request(f"c{number}", [*words(1, 64), number % 97], 2))
        for output in client.step():
            if output.finish_reason:
                left.discard(output.request_id)
                ended += output.request_id.startswith("c")
        if not left:
            break
    assert not left
    assert ended <= strangers * (MAX_PASSED_OVER + slots)


# ----------------------------------------------------------------------------------------- fair


def fair_client(**sizes: int) -> tuple[Client, FairShares]:
    client = Client(make_engine(runner_info(**sizes), policy="fair"))
    policy = client.engine.scheduler.policy
    assert isinstance(policy, FairShares)
    return client, policy


def check_answers(client: Client, requests: list[EngineRequest]) -> None:
    info = client.engine.runner.info
    for one in requests:
        assert client.answers[one.id] == lone_answer(info, Rules(), one), one.id


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    chunk=st.sampled_from([8, 33, 64]),
    slots=st.integers(1, 5),
    heavy=st.lists(st.tuples(st.integers(1, 200), st.integers(1, 40)), min_size=1, max_size=12),
    before=st.integers(0, 30),
    light=st.integers(1, 60),
)
def test_a_heavy_tenant_delays_a_light_one_by_a_chunk_at_most(
    chunk: int, slots: int, heavy: list[tuple[int, int]], before: int, light: int
) -> None:
    client, policy = fair_client(slabs=200, max_tokens_per_step=chunk, max_sequences=slots)
    requests = [
        request(f"h{i}", prompt, tokens, tenant="heavy") for i, (prompt, tokens) in enumerate(heavy)
    ]
    client.add(*requests)
    for _ in range(before):
        client.step()
    mine = request("light", light, 3, tenant="light")
    client.add(mine)
    state = client.engine.states["light"]
    served = policy.served.get("heavy", 0)
    while state.slot is None and "heavy" in policy.live:
        # A step's tokens, and those of the step that was under way.
        step = max(chunk, OUTPUT_COST * slots)
        assert policy.served["heavy"] - served < chunk + step
        client.step()
    client.drain()
    check_answers(client, [*requests, mine])


def test_one_that_decodes_gives_its_slot_to_a_light_tenant_and_loses_nothing() -> None:
    client, _ = fair_client(max_sequences=2, max_tokens_per_step=16)
    heavy = [request(f"h{i}", 5, 100, tenant="heavy") for i in range(3)]
    light = request("light", 5, 5, tenant="light")
    client.add(*heavy)
    for _ in range(5):
        client.step()
    client.add(light)
    order = order_of_ends(client)
    assert order[0] == "light"
    assert client.engine.stats().preemptions > 0
    check_answers(client, [*heavy, light])


def test_a_prompt_in_progress_lets_a_light_tenant_pass() -> None:
    client, _ = fair_client(max_tokens_per_step=16)
    client.add(request("long", 200, 1, tenant="heavy"))
    client.step()
    client.add(request("short", 10, 1, tenant="light"))
    assert order_of_ends(client) == ["short", "long"]
    assert len(client.engine.states) == 0


def test_tenants_who_always_wait_get_the_same() -> None:
    client, policy = fair_client(slabs=60, max_sequences=3, max_tokens_per_step=32)
    # One asks for long prompts, one for long answers.
    client.add(*[request(f"a{i}", 120, 4, tenant="a") for i in range(12)])
    client.add(*[request(f"b{i}", 8, 60, tenant="b") for i in range(12)])
    both = 0
    while policy.live["a"] > 3 and policy.live["b"] > 3:
        client.step()
        both += 1
        # Theorem 4.4 of the paper, with chunks in the place of whole prompts.
        assert abs(policy.served["a"] - policy.served["b"]) <= 2 * max(120, OUTPUT_COST * 3 * 32)
    assert both > 30
    client.drain()


def test_who_was_away_does_not_make_up_for_it_and_who_was_served_is_not_forgiven() -> None:
    client, policy = fair_client()
    client.add(request("a0", 100, 100, tenant="a"))
    while policy.served["a"] < 200:
        client.step()
    client.add(request("b0", 10, 1, tenant="b"))
    assert policy.served["b"] == policy.served["a"]
    while "b" in policy.live:
        client.step()
    ahead = policy.served["b"]
    client.add(request("b1", 10, 1, tenant="b"))
    assert policy.served["b"] == max(ahead, policy.served["a"])
    client.drain()
    assert not policy.live
    assert len(policy.served) <= 1
    client.add(request("c0", 10, 1, tenant="c"))
    assert policy.served["c"] == policy.level > 200


def test_what_is_cached_or_recomputed_costs_nothing() -> None:
    client, policy = fair_client()
    client.add(request("watch", 3, 250, tenant="other"))
    client.add(request("a0", words(1, 100), 10, tenant="a"))
    start = policy.served["a"]
    for _ in range(6):
        client.step()
    client.engine.reset_prefix_cache()
    client.engine.scheduler.preempt(client.engine.states["a0"])
    while "a0" in client.engine.states:
        client.step()
    # The last token is drawn and never run.
    assert policy.served["a"] - start == 100 + 9 * OUTPUT_COST
    client.add(request("a1", [*words(1, 100), 5], 1, tenant="a"))
    before = policy.served["a"]
    while "a1" in client.engine.states:
        client.step()
    assert client.cached["a1"] == 100
    assert policy.served.get("a", before + 1) - before == 1
