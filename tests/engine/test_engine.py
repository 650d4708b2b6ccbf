"""The step loop over a scripted runner: what ends an answer, what fails, what is reported."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from engine.helpers import Client, make_engine, request, run
from engine.scripted_runner import VOCAB, Answer, HashRunner, Rules, lone_answer, runner_info
from invar.engine import constraints
from invar.engine.engine import Engine
from invar.engine.request import EngineRequest, FinishReason

INFO = runner_info()


def alone(one: EngineRequest, rules: Rules | None = None) -> Answer:
    return lone_answer(INFO, rules or Rules(), one)


def test_step_is_short_and_names_its_three_parts() -> None:
    lines = [line for line in inspect.getsource(Engine.step).splitlines() if line.strip()]
    assert len(lines) <= 10
    for verb in ("schedule", "_run", "_postprocess"):
        assert any(verb in line for line in lines)


def test_answers_of_strangers_in_one_batch_equal_the_lone_ones() -> None:
    requests = [request(f"r{i}", 3 + 7 * i, logprobs=2, prompt_logprobs=1) for i in range(8)]
    answers = run(make_engine(INFO), *requests)
    assert answers == {one.id: alone(one) for one in requests}


def test_decode_rows_share_a_batch_with_prompts() -> None:
    engine = make_engine(INFO)
    client = Client(engine)
    client.add(request("short", 5, 20))
    client.step()
    client.add(request("long", 200, 5))
    client.step()
    batch = engine.runner.batches[-1]  # type: ignore[attr-defined]
    assert np.diff(batch.query_start).tolist() == [1, 63]  # the decoding one first


def test_nobodys_next_token_waits_on_a_strangers_prompt() -> None:
    client = Client(make_engine(runner_info(max_tokens_per_step=8)))
    client.add(request("a", 4, 30), request("b", 3, 30))
    client.step()
    client.add(request("long", 200, 4))
    for _ in range(20):
        assert {output.request_id for output in client.step()} >= {"a", "b"}


def test_a_stop_token_ends_the_answer_and_is_named() -> None:
    free = alone(request("s", 6, 8))
    stop = free.token_ids[3]
    client = Client(make_engine(INFO))
    client.add(request("s", 6, 8, stop_token_ids=frozenset({stop})))
    answer = client.drain()["s"]
    assert answer.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert client.outputs[-1].finish_reason is FinishReason.STOP
    assert client.outputs[-1].stop_reason == stop


def test_stop_tokens_are_forbidden_until_min_tokens() -> None:
    stops = frozenset(range(0, VOCAB, 2))
    one = request("m", 6, 12, stop_token_ids=stops, min_tokens=5)
    answer = run(make_engine(INFO), one)["m"]
    assert answer == alone(one)
    assert len(answer.token_ids) > 5
    assert not stops & set(answer.token_ids[:5])


def test_bad_words_do_not_follow_each_other() -> None:
    free = alone(request("w", 6, 8)).token_ids
    bad = (free[2], free[3])
    one = request("w", 6, 8, bad_sequences=(bad, (free[0],)))
    answer = run(make_engine(INFO), one)["w"]
    assert answer == alone(one)
    assert free[0] not in answer.token_ids
    pairs = list(zip(answer.token_ids, answer.token_ids[1:], strict=False))
    assert bad not in pairs


def test_a_mask_allows_what_it_names() -> None:
    one = request("a", 6, 20, allowed_token_ids=(1, 31, 32, 33, 96))
    answer = run(make_engine(INFO), one)["a"]
    assert answer == alone(one)
    assert set(answer.token_ids) <= {1, 31, 32, 33, 96}


def test_b19_a_seed_holds_in_any_company() -> None:
    seeded = request("s", 9, 10, seed=11, temperature=0.9)
    expected = alone(seeded)
    unseeded = request("u", 9, 10, seed=999, temperature=0.9)
    others = [request(f"o{i}", 9 + i, 10, seed=i, temperature=0.9) for i in range(3)]
    assert run(make_engine(INFO), seeded)["s"] == expected
    assert run(make_engine(INFO), unseeded, seeded)["s"] == expected
    assert run(make_engine(INFO), *others, seeded)["s"] == expected

    late = Client(make_engine(INFO))
    late.add(*others)
    for _ in range(4):
        late.step()
    late.add(seeded)
    assert late.drain()["s"] == expected

    tight = make_engine(runner_info(slabs=2))
    assert run(tight, request("first", 30, 25), seeded)["s"] == expected


def test_b19_a_preempted_request_keeps_its_draws() -> None:
    client = Client(make_engine(runner_info(slabs=3)))
    seeded = request("s", 20, 40, seed=11, temperature=0.9)
    client.add(request("first", 20, 60), seeded)
    assert client.drain()["s"] == alone(seeded)
    assert client.engine.stats().preemptions > 0


def test_b26_choices_of_one_seed_differ_and_repeat() -> None:
    choices = [request(f"c{i}", [5] * 6, 20, seed=5, choice=i, temperature=1.2) for i in range(4)]
    first, second = (run(make_engine(INFO), *choices) for _ in range(2))
    assert first == second
    assert len({tuple(answer.token_ids) for answer in first.values()}) == 4


def test_b30_the_history_of_a_penalty_is_prompt_and_output() -> None:
    one = request("p", 7, 6, repetition_penalty=1.3)
    engine = make_engine(INFO)
    answer = run(engine, one, request("plain", 7, 6))["p"]
    assert answer == alone(one)
    sampling = engine.runner.batches[-1].sampling  # type: ignore[attr-defined]
    assert np.diff(sampling.history_start).tolist() == [12, 0]
    assert sampling.prompt_len.tolist() == [7, 0]
    assert sampling.history.tolist() == one.prompt_token_ids.tolist() + answer.token_ids[:5]
    # After preemption the output is still output: the boundary does not move.
    tight = make_engine(runner_info(slabs=3))
    long = request("p", 20, 40, presence_penalty=0.5)
    assert run(tight, request("first", 20, 60), long)["p"] == alone(long)
    assert tight.stats().preemptions > 0


def test_b44_a_live_id_is_refused_and_free_again_after_the_end() -> None:
    client = Client(make_engine(INFO))
    one = request("x", 5, 4)
    client.add(one)
    with pytest.raises(ValueError, match="request x"):
        client.engine.add_request(request("x", 9, 4))
    assert client.drain()["x"] == alone(one)
    client.answers.clear()
    client.add(one)
    assert client.abort("x")
    assert not client.abort("x")
    client.add(one)
    assert client.drain()["x"] == alone(one)


def test_b41_abort_in_every_state_leaves_nothing() -> None:
    client = Client(make_engine(runner_info(max_tokens_per_step=16, max_sequences=2)))
    for i in range(200):
        names = [f"{i}-decoding", f"{i}-prefill", f"{i}-queued"]
        client.add(request(names[0], 4, 50))
        client.step()
        client.add(request(names[1], 100, 5), request(names[2], 5, 5))
        client.step()
        for name in names:
            assert client.abort(name)
    assert not client.engine.has_unfinished
    assert client.engine.stats().kv_usage == 0
    assert client.step() == []


def test_b36_the_answer_ends_at_the_window() -> None:
    one = request("w", 230, 26)
    answer = run(make_engine(runner_info(max_model_len=256)), one)["w"]
    assert len(answer.token_ids) == 26
    assert answer.finish_reason == "length"


def test_what_can_never_fit_is_refused() -> None:
    engine = make_engine(runner_info(max_model_len=256, slabs=4))
    assert engine.kv_capacity_tokens == 128
    with pytest.raises(ValueError, match="maximum context length of 256"):
        engine.add_request(request("long", 250, 7))
    with pytest.raises(ValueError, match="128 tokens"):
        engine.add_request(request("big", 120, 10))
    with pytest.raises(ValueError, match="0 prompt tokens"):
        engine.add_request(request("empty", [], 10))
    assert not engine.has_unfinished


def test_a_row_that_is_not_finite_fails_its_request_alone() -> None:
    engine = make_engine(INFO)
    runner = engine.runner
    assert isinstance(runner, HashRunner)
    good = request("good", [3, 4, 5], 6)
    runner.not_finite = lambda token: token == 96
    client = Client(engine)
    client.add(good, request("bad", [7, 8, 96], 6), request("scored", [96, 7], prompt_logprobs=0))
    answers = client.drain()
    assert set(client.errors) == {"bad", "scored"}
    assert answers["bad"].finish_reason == "error"
    assert answers["good"] == alone(good)
    assert "NaN" in client.errors["bad"]
    assert not any(output.refused for output in client.outputs)


def test_a_batch_that_is_refused_fails_the_guilty_request_alone() -> None:
    """Nothing has run of such a batch, so its other requests lose nothing."""
    engine = make_engine(INFO)
    runner = engine.runner
    assert isinstance(runner, HashRunner)
    runner.refuses = lambda batch: 96 in batch.token_ids
    good = [request("a", [3, 4, 5], 6, logprobs=1), request("b", [6] * 40, 6, prompt_logprobs=1)]
    rules_say_96 = [one for one in good if 96 in alone(one).token_ids]
    assert not rules_say_96
    client = Client(engine)
    client.add(good[0], request("guilty", [7, 96, 8], 6), good[1])
    client.step()
    assert set(client.errors) == {"guilty"}
    assert "scripted refusal" in client.errors["guilty"]
    answers = client.drain()
    assert [answers[one.id] for one in good] == [alone(one) for one in good]


def test_a_step_that_fails_is_run_again_request_by_request() -> None:
    engine = make_engine(runner_info(max_sequences=2))
    runner = engine.runner
    assert isinstance(runner, HashRunner)
    client = Client(engine)
    requests = [request(name, 5, 6) for name in "abc"]
    client.add(*requests)
    runner.fail_next = True
    assert client.drain() == {one.id: alone(one) for one in requests}
    assert not client.errors


def test_a_request_whose_own_step_fails_ends_with_the_reason() -> None:
    engine = make_engine(runner_info())
    runner = engine.runner
    assert isinstance(runner, HashRunner)
    client = Client(engine)
    client.add(request("a", 5, 6))
    runner.fail_next = True
    client.step()
    assert "scripted failure" in client.errors["a"]
    engine.check_integrity()


def test_a_resumed_request_goes_on_where_it_was() -> None:
    whole = request("r", 10, 12, seed=3, temperature=1.0, frequency_penalty=0.5)
    expected = alone(whole).token_ids
    for done in (1, 5, 11):
        rest = request(
            "r",
            10,
            12,
            seed=3,
            temperature=1.0,
            frequency_penalty=0.5,
            output_token_ids=np.array(expected[:done], np.int32),
        )
        assert run(make_engine(INFO), rest)["r"].token_ids == expected[done:]


def test_a_request_resumed_after_its_last_token_ends_at_once() -> None:
    client = Client(make_engine(INFO))
    given = np.array([1, 2, 3], np.int32)
    client.add(request("full", 4, 3, output_token_ids=given))
    client.add(request("stopped", 4, 9, output_token_ids=given, stop_token_ids=frozenset({3})))
    answers = client.drain()
    assert answers["full"] == Answer([], finish_reason="length")
    assert answers["stopped"] == Answer([], finish_reason="stop")
    reasons = {output.request_id: output.stop_reason for output in client.outputs}
    assert reasons == {"full": None, "stopped": 3}


def test_a_request_that_ended_at_the_door_is_live_until_its_output_is_out() -> None:
    client = Client(make_engine(INFO))
    ended = request("x", 4, 3, output_token_ids=np.array([1, 2, 3], np.int32))
    client.add(ended)
    with pytest.raises(ValueError, match="request x"):
        client.engine.add_request(request("x", 9, 4))
    assert client.abort("x")
    assert not client.abort("x")
    assert not client.engine.has_unfinished
    assert client.step() == []
    client.add(ended)
    assert client.drain()["x"].finish_reason == "length"


def test_what_bends_a_draw_is_laid_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask of a large vocabulary takes milliseconds, which its batch mates would wait."""
    built = []
    mask_of = constraints.mask_of
    monkeypatch.setattr(
        constraints, "mask_of", lambda *given: built.append(given) or mask_of(*given)
    )
    masked = request("m", 20, 30, allowed_token_ids=(1, 31, 32, 33, 96), bias=((5, 2.0),))
    tight = make_engine(runner_info(slabs=3))
    answers = run(tight, request("first", 20, 60), masked)
    assert tight.stats().preemptions > 0
    assert answers["m"] == alone(masked)
    assert len(built) == 1


def test_prompt_scores_survive_preemption_and_come_once() -> None:
    engine = make_engine(runner_info(slabs=4, max_tokens_per_step=16))
    scored = request("s", 60, 20, prompt_logprobs=2, logprobs=1)
    client = Client(engine)
    client.add(request("first", 20, 76), scored)
    assert client.drain()["s"] == alone(scored)
    assert engine.stats().preemptions > 0


def test_first_output_carries_the_times() -> None:
    client = Client(make_engine(INFO))
    client.add(request("t", 5, 3))
    client.drain()
    timings = [output.timing for output in client.outputs]
    assert timings[0]["arrival"] <= timings[0]["first_scheduled"]
    assert timings[1:] == [{}, {}]


def test_stats_count() -> None:
    client = Client(make_engine(runner_info(max_sequences=1)))
    client.add(request("a", 5, 3), request("b", 6, 2))
    client.step()
    stats = client.engine.stats()
    assert (stats.running, stats.waiting) == (1, 1)
    assert stats.kv_usage == 1 / 64
    client.drain()
    stats = client.engine.stats()
    assert (stats.prompt_tokens, stats.generated_tokens) == (11, 5)
    assert (stats.running, stats.waiting, stats.kv_usage) == (0, 0, 0)
