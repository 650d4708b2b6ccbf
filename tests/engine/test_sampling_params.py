"""What `SamplingParams` takes and refuses."""

from __future__ import annotations

import copy
import math
import pickle
import time
from typing import Any

import numpy as np
import pytest

from invar.engine.sampling_params import MAX_CHOICES, RequestOutputKind, SamplingParams

FLOATS = [
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
]


def test_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (
        (1, 1.0, 1.0, 0, 0.0)
    )
    assert (params.max_tokens, params.min_tokens, params.seed, params.logprobs) == (
        (16, 0, None, None)
    )
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (
        (1.0, 0.0, 0.0)
    )
    assert (params.stop, params.stop_token_ids, params.ignore_eos) == ([], [], False)
    assert params.skip_special_tokens
    assert params.detokenize
    assert not params.include_stop_str_in_output


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan")])
def test_b21_what_is_not_finite_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}: must be finite"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("value", [True, False, "0.5", None, [1.0], 1j])
def test_b21_what_is_no_number_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}: expected a number"):
        SamplingParams(**{name: value})


def test_b21_minus_zero_and_denormals_have_an_answer() -> None:
    assert SamplingParams(temperature=-0.0, min_p=-0.0, presence_penalty=-0.0).temperature == 0
    SamplingParams(temperature=1e-320, min_p=1e-320, top_p=1e-320)  # what they mean: test_door
    with pytest.raises(ValueError, match=r"top_p: -0.0 is outside \(0, 1\]"):
        SamplingParams(top_p=-0.0)
    with pytest.raises(ValueError, match="repetition_penalty"):
        SamplingParams(repetition_penalty=1e-320)


def test_integers_and_numpy_numbers_are_numbers() -> None:
    numbers: dict[str, Any] = {"top_p": np.float32(0.5), "top_k": np.int64(7)}
    params = SamplingParams(temperature=1, seed=-5, **numbers)
    assert params.temperature == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("n", 2_000_000),
        ("n", MAX_CHOICES + 1),
        ("n", True),
        ("n", 1.0),
        ("best_of", 2_000_000),
        ("best_of", 3),
        ("temperature", -0.1),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_k", 2**63),
        ("min_p", 1.5),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0.0),
        ("max_tokens", 0),
        ("max_tokens", 2**63),
        ("max_tokens", 10**4000),
        ("max_tokens", "5"),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("logprobs", -2),
        ("logprobs", True),
        ("prompt_logprobs", 2**40),
        ("seed", "x"),
        ("seed", 2**64),
        ("stop", [""]),
        ("stop", [1]),
        ("stop", 5),
        ("bad_words", "ab"),
        ("stop_token_ids", 5),
        ("stop", ["x"] * 100_000),
        ("stop", ["x" * 100_000]),
        ("bad_words", [""]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["1"]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [True]),
        ("logit_bias", {"abc": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {-1: 1}),
        ("logit_bias", {True: 1}),
        ("logit_bias", {1: 1000}),
        ("logit_bias", {1: None}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", dict.fromkeys(range(100000), 1)),
        ("logit_bias", [1]),
        ("truncate_prompt_tokens", 0),
        ("ignore_eos", 1),
        ("output_kind", "delta"),
        ("structured_outputs", {"regex": ""}),
        ("structured_outputs", {"json": {}, "regex": "a"}),
        ("structured_outputs", {"choice": []}),
        ("logits_processors", [print]),
        ("use_beam_search", True),
    ],
)
def test_b34_what_is_out_of_bounds_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name}") as refusal:
        SamplingParams(**{name: value})
    assert len(str(refusal.value)) < 300  # never echoes what was sent


def test_b34_a_whole_vocabulary_of_ids_is_checked_at_once() -> None:
    ids = list(range(256_000))
    began = time.thread_time()
    params = SamplingParams(allowed_token_ids=ids)
    for _ in range(9):
        params.validate()
    assert time.thread_time() - began < 0.7
    for wrong in (-1, 2**31, True, "1", 1.5):
        with pytest.raises(ValueError, match=r"^allowed_token_ids"):
            SamplingParams(allowed_token_ids=[*ids, wrong])  # type: ignore[list-item]
    assert SamplingParams(stop_token_ids=list(np.arange(3))).stop_token_ids == [0, 1, 2]


def test_several_greedy_choices_are_refused() -> None:
    with pytest.raises(ValueError, match="greedy"):
        SamplingParams(n=2, temperature=0)


def test_stop_strings_need_text() -> None:
    with pytest.raises(ValueError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(TypeError, match="'temprature'; did you mean 'temperature'"):
        SamplingParams(temprature=0.5)  # type: ignore[call-arg]


def test_spellings_of_none() -> None:
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(stop="a").stop_strings == ["a"]
    assert SamplingParams(top_k=-1).top_k == -1
    assert SamplingParams(output_kind=RequestOutputKind.DELTA).output_kind.name == "DELTA"


def test_copies() -> None:
    params = SamplingParams(stop=["a"], logit_bias={"7": 1})
    assert params.clone() == params == copy.copy(params) == pickle.loads(pickle.dumps(params))
    assert params.clone().stop is not params.stop
