"""Law 1 with K and V stored in each format: a token's codes and scales are its own.

What holds for the default format in the other tests of this folder holds for all: batches, chunks,
threads, preemption, shared prefixes, instruction sets. Of the real models one run each.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
from engine.helpers import Client
from engine.scripted_runner import Answer
from golden.tiny_models import TINY_MODELS

from invar import _native
from invar.graph.operations import KVFormat
from law1.test_same_request_same_bytes import on
from law1.workload import Setting, alone, as_bits, engine_of, long_requests, requests_of

OTHERS = (KVFormat.FP16, KVFormat.INT8)
TINY = [f"{name} {kv_format}" for name in TINY_MODELS for kv_format in OTHERS]
REAL = ["smollm2 int8", "smollm2 fp16", "gemma3-270m int8"]


@cache
def expected(model: str) -> dict[str, Answer]:
    return alone(model, requests_of(model), Setting())


@pytest.mark.parametrize("model", [*TINY, *REAL])
def test_in_a_batch_in_chunks_on_two_threads(model: str) -> None:
    client = Client(engine_of(model, Setting(threads=2, chunk=17)))
    client.add(*requests_of(model))
    client.drain()
    assert not client.errors, client.errors
    assert as_bits(client.answers) == as_bits(expected(model))
    client.engine.close()


@pytest.mark.parametrize("model", ["gemma3_scaled fp16", "mistral_window int8"])
def test_preempted_and_found_again(model: str) -> None:
    """Pages come back from the cache, partly filled ones as copies."""
    client = Client(engine_of(model, Setting(chunk=40)))
    client.add(*requests_of(model))
    dice = random.Random(1)
    while client.engine.has_unfinished:
        client.step()
        running = client.engine.scheduler.running
        if running and client.engine.scheduler.num_preemptions < 15 and dice.random() < 0.4:
            client.engine.scheduler.preempt(dice.choice(running))
    assert client.engine.stats().preemptions >= 4
    assert as_bits(client.answers) == as_bits(expected(model))
    client.engine.close()


@pytest.mark.parametrize("model", [f"llama_gqa {kv_format}" for kv_format in OTHERS])
def test_beyond_a_split_of_attention(model: str) -> None:
    requests = long_requests(model)
    whole = alone(model, requests, Setting(chunk=1200, length=1200))
    client = Client(engine_of(model, Setting(chunk=1000, threads=2, length=1200)))
    client.add(*requests)
    client.drain()
    assert as_bits(client.answers) == as_bits(whole)
    client.engine.close()


@pytest.mark.parametrize("model", [f"gemma3_pattern6 {kv_format}" for kv_format in OTHERS])
def test_on_every_instruction_set(model: str) -> None:
    reference = as_bits(alone(model, requests_of(model, output=8, count=3), Setting()))
    for isa in _native.cpu_info()["available_isas"]:
        assert on(isa, model) == reference, isa


@pytest.mark.parametrize("name", TINY_MODELS)
def test_what_is_compared_can_differ(name: str) -> None:
    """Each format gives bits of its own, and its build a name of its own."""

    def bits(model: str) -> list[Any]:
        return as_bits(alone(model, requests_of(model, output=8, count=1), Setting()))["r0"][
            "logprobs"
        ]

    models = [f"{name} {kv_format}" for kv_format in KVFormat]
    answers = [bits(model) for model in models]
    assert answers[0] == bits(name)
    engines = [engine_of(model) for model in models]
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert answers[first] != answers[second]
        assert engines[first].runner.info.fingerprint != engines[second].runner.info.fingerprint
    for engine in engines:
        engine.close()
