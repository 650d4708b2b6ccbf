"""How a request becomes complete."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.helpers import make_engine
from engine.scripted_runner import runner_info
from invar.engine.door import Door, SeedSource
from invar.engine.request import EngineRequest
from invar.engine.sampling_params import SamplingParams
from invar.grammar.thoughts import Thoughts

DOOR = Door(
    vocab_size=97,
    max_model_len=256,
    kv_capacity_tokens=1000,
    eos_token_ids=frozenset({2}),
    encode=lambda text: np.frombuffer(text.encode(), np.uint8).astype(np.int32),
)


def resolve(prompt: Any = (1, 2, 3), door: Door = DOOR, **params: Any) -> EngineRequest:
    return door.resolve("r", prompt, SamplingParams(**params))[0]


def test_what_leaves_the_door_is_complete() -> None:
    request = resolve(
        temperature=0.5, top_k=-1, seed=-3, stop_token_ids=[7], logit_bias={"5": 1, 4: 2}
    )
    assert request.id == "r-0"
    assert request.prompt_token_ids.dtype == np.int32
    assert request.stop_token_ids == {2, 7}
    assert request.sampling.seed == 2**64 - 3
    assert request.sampling.top_k == 0
    assert request.sampling.bias == ((4, 2.0), (5, 1.0))
    assert resolve(ignore_eos=True, stop_token_ids=[7]).stop_token_ids == {7}


def test_b21_what_odd_numbers_mean() -> None:
    assert resolve(temperature=-0.0).sampling.temperature == 0
    assert str(resolve(temperature=-0.0).sampling.temperature) == "0.0"
    assert resolve(temperature=1e-320).sampling.temperature == 0.01
    assert np.float32(resolve(top_p=1e-320).sampling.top_p) > 0
    assert np.float32(resolve(min_p=1e-320).sampling.min_p) == 0


def test_greedy_ignores_the_cuts() -> None:
    sampling = resolve(temperature=0, top_k=5, top_p=0.5, min_p=0.5).sampling
    assert (sampling.top_k, sampling.top_p, sampling.min_p) == (0, 1.0, 0.0)


def test_b19_unseeded_requests_differ_and_an_engine_seed_orders_them() -> None:
    assert resolve().sampling.seed != resolve().sampling.seed
    seeds = [
        [resolve(door=door).sampling.seed for _ in range(3)]
        for door in (replace(DOOR, seeds=SeedSource(5)) for _ in range(2))
    ]
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 3


def test_b25_choices_have_an_id_and_an_index_each() -> None:
    requests = DOOR.resolve("r", [1], SamplingParams(n=3, seed=5, prompt_logprobs=1))
    assert [request.id for request in requests] == ["r-0", "r-1", "r-2"]
    assert [request.sampling.choice for request in requests] == [0, 1, 2]
    assert {request.sampling.seed for request in requests} == {5}
    assert [request.sampling.prompt_logprobs for request in requests] == [1, None, None]


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"logit_bias": {"97": 1}}, "logit_bias"),
        ({"allowed_token_ids": [5, 97]}, "allowed_token_ids"),
        ({"stop_token_ids": [97]}, "stop_token_ids"),
    ],
)
def test_b23_ids_beyond_the_vocabulary_are_named(params: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}: token id 97 is outside .* 96\)"):
        resolve(**params)


@pytest.mark.parametrize("prompt", [[1, 97], [-1], np.array([5, 2**40])])
def test_b23_prompt_ids_beyond_the_vocabulary_are_named(prompt: Any) -> None:
    with pytest.raises(ValueError, match="prompt: token id"):
        resolve(prompt)


@pytest.mark.parametrize("prompt", [["a"], [1.5], [[1, 2]], [True], [2**70], [None]])
def test_a_prompt_is_a_list_of_ids(prompt: Any) -> None:
    with pytest.raises(ValueError, match="prompt: expected a list of token ids"):
        resolve(prompt)


def test_b31_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt: it is empty"):
        resolve([])


def test_b33_a_prompt_over_the_window_is_refused_with_both_numbers() -> None:
    message = (
        "This model's maximum context length is 256 tokens. However, your prompt has {} tokens"
    )
    for length in (256, 257, 5000):
        with pytest.raises(ValueError, match=message.format(length)):
            resolve([1] * length)
    assert resolve([1] * 255, max_tokens=100).max_tokens == 1


def test_b36_max_tokens_is_cut_to_the_window() -> None:
    assert resolve([1] * 230, max_tokens=100).max_tokens == 26
    assert resolve([1] * 230, max_tokens=None).max_tokens == 26
    assert resolve([1] * 230, max_tokens=26).max_tokens == 26
    with pytest.raises(ValueError, match="min_tokens"):
        resolve([1] * 230, max_tokens=100, min_tokens=27)


def test_b50_what_kv_memory_cannot_hold_is_refused_or_cut() -> None:
    door = replace(DOOR, max_model_len=8192, kv_capacity_tokens=1024)
    with pytest.raises(ValueError, match=r"holds 1024 tokens .* has 1500 tokens"):
        resolve([1] * 1500, door)
    request = resolve([1] * 900, door, max_tokens=500)
    assert request.max_tokens == 125
    info = runner_info(slabs=32, max_model_len=8192)
    make_engine(info).add_request(request)  # the engine agrees


def test_a_budget_of_thoughts_needs_what_bounds_them() -> None:
    """This door has no compiler of grammars."""
    thoughts = Thoughts("n", (("", "n"),))
    with pytest.raises(ValueError, match="thinking_token_budget: this engine compiles no grammars"):
        DOOR.resolve("r", [1], SamplingParams(thinking_token_budget=5), thoughts=thoughts)
    for unbounded in (None, -1):
        params = SamplingParams(thinking_token_budget=unbounded)
        assert DOOR.resolve("r", [1], params, thoughts=thoughts)[0].sampling.thoughts is None


def test_truncation_keeps_the_end() -> None:
    prompt = np.arange(300) % 97
    kept = resolve(prompt, truncate_prompt_tokens=5).prompt_token_ids
    assert kept.tolist() == prompt[-5:].tolist()
    assert len(resolve(prompt, truncate_prompt_tokens=-1).prompt_token_ids) == 255
    assert len(resolve(prompt[:10], truncate_prompt_tokens=50).prompt_token_ids) == 10


def test_logprobs_have_a_limit() -> None:
    with pytest.raises(ValueError, match=r"logprobs: 21 is more than max_logprobs \(20\)"):
        resolve(logprobs=21)
    with pytest.raises(ValueError, match="prompt_logprobs: 97"):
        resolve(prompt_logprobs=-1)
    assert resolve(door=replace(DOOR, max_logprobs=97), logprobs=-1).sampling.logprobs == 97


def test_bad_words_are_forbidden_with_and_without_a_space() -> None:
    sequences = resolve(bad_words=["ab"]).sampling.bad_sequences
    assert sequences == ((32, 97, 98), (97, 98))


def test_b30_neutral_penalties_leave_no_history() -> None:
    assert not resolve().sampling.has_penalty
    for name in ("repetition_penalty", "frequency_penalty", "presence_penalty"):
        penalty: dict[str, Any] = {name: 1.5}
        assert resolve(**penalty).sampling.has_penalty


def test_fields_assigned_later_are_checked_too() -> None:
    params = SamplingParams()
    params.top_p = 7.0
    with pytest.raises(ValueError, match="top_p"):
        DOOR.resolve("r", [1], params)


def test_b34_parameters_are_read_once_for_all_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(allowed_token_ids=[5, 6], n=2)
    ready = DOOR.prepare(params)
    monkeypatch.setattr(SamplingParams, "validate", None)  # would not be callable
    requests = [request for p in ([1], [2]) for request in DOOR.resolve("r", p, ready)]
    assert {request.sampling.allowed_token_ids for request in requests} == {(5, 6)}
    # Choices share a seed; prompts do not.
    assert len({request.sampling.seed for request in requests}) == 2
    assert requests[0].sampling.seed == requests[1].sampling.seed


def test_a_prompt_that_is_only_scored_may_fill_the_context() -> None:
    door = replace(DOOR, kv_capacity_tokens=255)
    prompt = [3] * 255 + [9]
    request = door.score("r", prompt, 2)
    assert request.prompt_token_ids.tolist() == prompt[:-1]
    assert (request.sampling.allowed_token_ids, request.max_tokens) == ((9,), 1)
    assert (request.sampling.logprobs, request.sampling.prompt_logprobs) == (2, 2)
    assert not request.stop_token_ids
    make_engine(runner_info(max_model_len=256)).add_request(request)  # the engine agrees
    assert door.score("r", [3], 2).prompt_token_ids.tolist() == [3]
    with pytest.raises(ValueError, match=r"length is 256 tokens. However.* 257 tokens"):
        door.score("r", [*prompt, 9], 2)
    with pytest.raises(ValueError, match="KV memory holds 254 tokens"):
        replace(door, kv_capacity_tokens=254).score("r", prompt, 2)


def unspaced(text: str) -> np.ndarray:
    """One id a character, blanks left out: every word of one letter is one id."""
    return np.array([ord(letter) % 90 for letter in text.strip()], np.int32)


@pytest.mark.parametrize(("params", "name"), [
    ({"allowed_token_ids": [2], "min_tokens": 2}, "min_tokens"),
    ({"allowed_token_ids": [5, 2], "stop_token_ids": [5], "min_tokens": 1}, "min_tokens"),
    ({"allowed_token_ids": [7, 8], "bad_words": ["a", "b"]}, "bad_words"),
    ({"allowed_token_ids": [7, 2], "bad_words": ["a"], "min_tokens": 1}, "min_tokens"),
    ({"stop_token_ids": list(range(97)), "min_tokens": 1}, "min_tokens"),
])  # fmt: skip
def test_a_request_that_forbids_every_token_is_refused(params: dict[str, Any], name: str) -> None:
    door = replace(DOOR, encode=unspaced)
    with pytest.raises(ValueError, match=rf"^{name}: "):
        door.resolve("r", [1], SamplingParams(**params))


@pytest.mark.parametrize("params", [
    {"allowed_token_ids": [2]},
    {"allowed_token_ids": [2], "min_tokens": 2, "ignore_eos": True},
    {"allowed_token_ids": [5, 2], "min_tokens": 2, "logit_bias": {5: -100}},
    {"allowed_token_ids": [7, 8], "bad_words": ["a"]},
])  # fmt: skip
def test_one_token_is_enough_to_draw(params: dict[str, Any]) -> None:
    door = replace(DOOR, encode=unspaced)
    assert door.resolve("r", [1], SamplingParams(**params))
