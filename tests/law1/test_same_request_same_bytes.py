"""Law 1: tokens and log-probabilities are a function of the request alone, bit for bit."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from engine.helpers import Client
from engine.scripted_runner import Answer
from golden.tiny_models import TINY_MODELS

from invar import _native
from invar.engine.failures import NOT_FINITE
from law1.workload import (
    REAL_MODELS,
    Setting,
    alone,
    as_bits,
    engine_of,
    long_requests,
    requests_of,
)

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module", params=[*TINY_MODELS, *REAL_MODELS])
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@cache
def expected(model: str) -> dict[str, Answer]:
    """Each request alone, its prompt in one piece, on one thread."""
    answers = alone(model, requests_of(model), Setting())
    for request in requests_of(model):
        answer = answers[request.id]
        assert len(answer.token_ids) == request.max_tokens
        assert answer.logprobs is not None
        assert len(answer.logprobs) == request.max_tokens
    return answers


def check(model: str, client: Client) -> None:
    assert not client.errors, client.errors
    assert as_bits(client.answers) == as_bits(expected(model))
    client.engine.close()


def test_in_a_batch_of_strangers(model: str) -> None:
    client = Client(engine_of(model))
    client.add(*requests_of(model))
    client.drain()
    check(model, client)


def test_b20_in_another_order_and_arriving_late(model: str) -> None:
    client = Client(engine_of(model))
    for request in reversed(requests_of(model)):
        client.add(request)
        for _ in range(3):
            client.step()
    client.drain()
    check(model, client)


@pytest.mark.parametrize("chunk", [1, 7, 16, 17, 64])
def test_b53_with_any_chunk_size(model: str, chunk: int) -> None:
    client = Client(engine_of(model, Setting(chunk=chunk)))
    client.add(*requests_of(model))
    client.drain()
    check(model, client)


def test_b53_a_read_of_unwritten_kv_would_show(model: str) -> None:
    """Freed pages are NaN: one of them in the place of a page that was written."""
    client = Client(engine_of(model))
    (request,) = requests_of(model)[4:5]
    client.add(request)
    client.step()
    slot = client.engine.states[request.id].slot
    assert slot is not None
    memory = client.engine.memory
    for group, held in enumerate(memory.held[slot].groups):
        last = memory.tables[group][slot, held.end - 1 : held.end]  # every window reaches it
        client.engine.runner.clear_pages(group, last.copy())
    client.drain()
    assert client.errors == {request.id: NOT_FINITE}


def test_on_two_threads(model: str) -> None:
    client = Client(engine_of(model, Setting(threads=2, chunk=48)))
    client.add(*requests_of(model))
    client.drain()
    check(model, client)


def test_preempted_at_random(model: str) -> None:
    client = Client(engine_of(model, Setting(chunk=40)))
    client.add(*requests_of(model))
    dice = random.Random(1)
    most = 4 if model in REAL_MODELS else 25  # recomputing costs time
    while client.engine.has_unfinished:
        client.step()
        running = client.engine.scheduler.running
        if running and client.engine.scheduler.num_preemptions < most and dice.random() < 0.4:
            client.engine.scheduler.preempt(dice.choice(running))
            client.engine.check_integrity()
    assert client.engine.stats().preemptions >= 4
    check(model, client)


@pytest.mark.parametrize(("model", "slabs"), [("smollm2", 3), ("gemma3-270m", 2)])
def test_preempted_for_want_of_memory(model: str, slabs: int) -> None:
    """Pages for one long request and a half."""
    client = Client(engine_of(model, Setting(slabs=slabs)))
    client.add(*requests_of(model))
    client.drain()
    assert client.engine.stats().preemptions > 0
    check(model, client)


@pytest.mark.parametrize("tiny", TINY_MODELS)
def test_beyond_a_split_of_attention(tiny: str) -> None:
    """Splits end at token 1,024, whoever computes them and in however many chunks."""
    requests = long_requests(tiny)
    whole = alone(tiny, requests, Setting(chunk=1200, length=1200))
    assert all(len(whole[one.id].token_ids) == one.max_tokens for one in requests)
    for chunk, threads in ((1200, 1), (1024, 1), (1000, 2), (37, 1)):
        client = Client(engine_of(tiny, Setting(chunk=chunk, threads=threads, length=1200)))
        client.add(*requests, *requests_of(tiny))
        client.drain()
        assert not client.errors, client.errors
        expected_bits = as_bits(whole | expected(tiny))
        assert as_bits(client.answers) == expected_bits, (chunk, threads)
        client.engine.close()


def test_aborted_strangers_leave_no_trace(model: str) -> None:
    client = Client(engine_of(model, Setting(chunk=32, sequences=4)))
    kept, *strangers = requests_of(model)
    client.add(strangers[3], kept)
    client.step()
    client.add(*strangers[:3])
    for stranger in strangers:
        client.step()
        client.abort(stranger.id)
    client.drain()
    assert as_bits({kept.id: client.answers[kept.id]}) == as_bits(
        {kept.id: expected(model)[kept.id]}
    )
    assert client.engine.stats().kv_usage == 0


def test_what_is_compared_can_differ(model: str) -> None:
    """Another seed or another prompt gives other bits: the comparison is not of constants."""
    requests = requests_of(model, output=8, count=3)
    other_seed = replace(requests[1].sampling, seed=99)
    other_prompt = requests[0].prompt_token_ids[1:]
    changed = (
        replace(requests[0], prompt_token_ids=other_prompt),
        replace(requests[1], sampling=other_seed),
    )
    before = as_bits(alone(model, requests[:2], Setting()))
    after = as_bits(alone(model, changed, Setting()))
    assert before["r0"]["logprobs"] != after["r0"]["logprobs"]
    assert before["r1"]["token_ids"] != after["r1"]["token_ids"]


# ------------------------------------------------------------------------------ instruction sets


def on(isa: str, model: str, threads: int = 1) -> dict[str, Any]:
    run = subprocess.run(
        [sys.executable, "-m", "law1.workload", model, str(threads)],
        env={**os.environ, "INVAR_ISA": isa, "PYTHONPATH": f"{TESTS}:{TESTS.parent}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    answers: dict[str, Any] = json.loads(run.stdout)
    return answers


def test_on_every_instruction_set(model: str) -> None:
    isas = _native.cpu_info()["available_isas"]
    requests = requests_of(model, output=8, count=3)
    reference = as_bits(alone(model, requests, Setting()))
    for isa in isas:
        assert on(isa, model) == reference, isa
