"""Grammars in the engine: the answer fits, and depends on the request alone (law 1)."""

from __future__ import annotations

import dataclasses
import json
import re
import threading
from typing import Any

import numpy as np
import pytest
from engine.helpers import Client, make_engine, request, run
from engine.scripted_runner import VOCAB, Answer, runner_info

from grammar.vocabulary import EOS, TOKENS, compiler, text_of
from invar.engine.engine import Engine
from invar.engine.request import EngineRequest
from invar.grammar.structured_outputs import StructuredOutputs
from invar.text.call_writing import Hand, WrittenTool, calls_only
from invar.text.model_formats import CALL_FORMATS

PERSON = {"name": str, "age?": int, "tags": [("er", "in", "th")], "level": ("yes", "no", None)}
GRAMMARS = compiler()

FORMS: list[Any] = [
    PERSON,
    StructuredOutputs(json=PERSON, disable_any_whitespace=True),
    {"choice": ["yes", "no", "yesno", "level"]},
    {"regex": r"[a-c]{2,4}-[0-9]{3}"},
    {"grammar": 'root ::= "he" [a-z]* "no" ("in" | "er")'},
    {"json_object": True},
    {"choice": ["level:[name]"]},
    {
        "structural_tag": calls_only(
            CALL_FORMATS["functionary_v31"][0],
            [
                WrittenTool("level", {"properties": {"age": {"type": "integer"}}}),
                WrittenTool("name", {"type": "object", "properties": {}}),
            ],
            Hand({}),
            parallel=True,
        )
    },
]


def guided(name: str, form: Any, max_tokens: int = 60, prompt: int = 9, **options: Any) -> Any:
    grammar = StructuredOutputs.of(form).normalised()
    options = {"stop_token_ids": frozenset({EOS}), "seed": 5, "temperature": 1.0} | options
    return request(name, prompt, max_tokens, grammar=grammar, **options)


def engine(jump_forward: bool = True, **info: Any) -> Engine:
    return make_engine(runner_info(**info), grammars=GRAMMARS, jump_forward=jump_forward)


def several(**options: Any) -> list[EngineRequest]:
    return [
        guided(f"r{index}{seed}", form, prompt=5 + 7 * index, seed=seed, **options)
        for index, form in enumerate(FORMS)
        for seed in (1, 2)
    ]


def alone(one: EngineRequest, **options: Any) -> Answer:
    return run(engine(**options), one)[one.id]


def test_the_vocabulary() -> None:
    assert len(TOKENS) == VOCAB


@pytest.mark.parametrize("limit", [200, 40, 32])
def test_answers_fit_whatever_the_limit(limit: int) -> None:
    requests = [guided(f"r{seed}", PERSON, limit, seed=seed) for seed in range(12)]
    answers = run(engine(max_sequences=4), *requests)
    reasons = set()
    for one in requests:
        answer = answers[one.id]
        value = json.loads(text_of(answer.token_ids))
        assert set(value) - {"age"} == {"name", "tags", "level"}
        assert len(answer.token_ids) <= limit
        reasons.add(answer.finish_reason)
    assert reasons <= {"stop", "length"}
    if limit == 32:
        assert "length" in reasons


def test_every_form() -> None:
    answers = run(engine(), *several(max_tokens=100))
    texts = {name: text_of(answer.token_ids) for name, answer in answers.items()}
    assert {texts["r21"], texts["r22"]} <= {"yes", "no", "yesno", "level"}
    assert re.fullmatch(r"[a-c]{2,4}-[0-9]{3}", texts["r31"])
    assert re.fullmatch(r"he[a-z]*no(in|er)", texts["r41"])
    assert isinstance(json.loads(texts["r51"]), dict)
    assert texts["r61"] == "level:[name]"
    assert re.fullmatch(r"(<function=(level|name)>\{.*?\}</function>\s?)+", texts["r71"], re.DOTALL)
    assert {answer.finish_reason for answer in answers.values()} <= {"stop", "length"}


@pytest.mark.parametrize("scored", [{}, {"logprobs": 2}, {"logprobs": 0, "prompt_logprobs": 1}])
def test_jumps_change_nothing(scored: dict[str, int]) -> None:
    for max_tokens in (60, 23):
        requests = several(max_tokens=max_tokens, **scored)
        jumping, plain = Client(engine()), Client(engine(jump_forward=False))
        jumping.add(*requests)
        plain.add(*requests)
        assert jumping.drain() == plain.drain()
        assert any(len(output.token_ids) > 1 for output in jumping.outputs)
        assert all(len(output.token_ids) <= 1 for output in plain.outputs)


def test_alone_and_in_any_company() -> None:
    requests = several()
    expected = {one.id: alone(one, jump_forward=False) for one in requests}
    strangers = [request(f"s{index}", 20, 30) for index in range(4)]
    together = run(engine(max_sequences=8), *requests[:5], *strangers, *requests[5:])
    assert {name: together[name] for name in expected} == expected


@pytest.mark.parametrize("scored", [{}, {"logprobs": 1}])
def test_chunks_preemption_and_cache(scored: dict[str, int]) -> None:
    requests = several(max_tokens=50, **scored)
    expected = {one.id: alone(one) for one in requests}
    assert run(engine(max_tokens_per_step=3), *requests) == expected
    tight = engine(slabs=7, max_model_len=128)
    assert run(tight, *requests) == expected
    assert tight.scheduler.num_preemptions
    warm = engine()
    run(warm, *requests)
    assert run(warm, *requests) == expected


@pytest.mark.parametrize("jump_forward", [True, False])
@pytest.mark.parametrize("limit", [60, 22])
def test_an_answer_goes_on_after_any_of_its_tokens(jump_forward: bool, limit: int) -> None:
    for one in (guided("a", PERSON, limit), guided("b", FORMS[1], limit, seed=9)):
        client = Client(engine(jump_forward))
        client.add(one)
        whole = client.drain()[one.id]
        said: list[int] = []
        steered = False
        for output in client.outputs:
            resumed = dataclasses.replace(
                one, output_token_ids=np.array(said, np.int32), was_steered=steered
            )
            rest = alone(resumed, jump_forward=jump_forward)
            assert [*said, *rest.token_ids] == whole.token_ids
            assert rest.finish_reason == whole.finish_reason
            said += output.token_ids
            steered |= "steered" in output.timing


def test_other_constraints_hold_too() -> None:
    never = TOKENS.index(b"e")
    letters = (EOS, *(index for index, one in enumerate(TOKENS) if one.isalpha()))
    one = guided("a", {"regex": "[a-z]{20}"}, bias=((never, -np.inf),), allowed_token_ids=letters)
    text = text_of(alone(one).token_ids)
    assert len(text) == 20
    two = guided("b", {"regex": "[0-9]{20}"}, allowed_token_ids=letters, completes_grammar=False)
    client = Client(engine())
    client.add(two)
    assert client.drain()["b"].finish_reason == "error"


def test_without_steering_an_answer_is_cut() -> None:
    cut = alone(guided("a", PERSON, 12, completes_grammar=False))
    assert (cut.finish_reason, len(cut.token_ids)) == ("length", 12)
    with pytest.raises(json.JSONDecodeError):
        json.loads(text_of(cut.token_ids))


class SlowGrammars:
    """Hands a grammar out when it is told to."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.inner = compiler()

    def compile(self, grammar: str) -> Any:
        from concurrent.futures import ThreadPoolExecutor

        def late() -> Any:
            self.gate.wait(30)
            return self.inner.check(grammar)

        return ThreadPoolExecutor(1).submit(late)


def test_nobody_waits_for_anothers_grammar() -> None:
    grammars: Any = SlowGrammars()
    client = Client(make_engine(runner_info(), grammars=grammars))
    client.add(guided("slow", PERSON), guided("gone", PERSON), request("plain", 8, 6))
    while "plain" not in client.answers or client.answers["plain"].finish_reason is None:
        client.step()
    assert client.engine.stats().waiting == 2
    assert client.abort("gone")
    assert client.engine.stats().waiting == 1
    assert "slow" not in client.answers
    grammars.gate.set()
    answers = client.drain()
    assert json.loads(text_of(answers["slow"].token_ids))
    assert "gone" not in answers


def test_a_mask_that_is_late_makes_its_row_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    from invar.grammar.guide import Guide

    write, gate = Guide.write_mask, threading.Event()

    def late(guide: Guide) -> None:
        gate.wait(30)
        write(guide)

    one = guided("late", PERSON)
    expected = alone(one)
    monkeypatch.setattr(Guide, "write_mask", late)
    client = Client(engine())
    client.add(one, request("plain", 8, 20))
    while "plain" not in client.answers or client.answers["plain"].finish_reason is None:
        client.step()
    assert not client.answers.get("late", Answer([])).finish_reason
    gate.set()
    assert client.drain()["late"] == expected


def test_what_cannot_be_compiled_fails_alone() -> None:
    client = Client(engine())
    client.add(request("plain", 8, 6), request("bad", 8, 6, grammar="{}"))
    client.add(guided("other", PERSON, output_token_ids=np.array([TOKENS.index(b"}")], np.int32)))
    answers = client.drain()
    assert answers["plain"].finish_reason == "length"
    assert answers["bad"].finish_reason == answers["other"].finish_reason == "error"
    assert "structured_outputs" in client.errors["bad"]
    with pytest.raises(ValueError, match="compiles no grammars"):
        make_engine(runner_info()).add_request(guided("a", PERSON))


def test_what_leaves_no_token_is_the_fault_of_its_request() -> None:
    lark = StructuredOutputs(grammar='start: /[ab]/ x | "no"\nx: x')
    ids = {name: TOKENS.index(name.encode()) for name in ("a", "b", "n", "no")}
    choice = StructuredOutputs(choice=["no"])
    client = Client(engine())
    client.add(
        request("plain", 8, 6),
        guided("later on", lark, bias=((ids["a"], 99.0),)),
        guided("allowed", choice, allowed_token_ids=(ids["a"], ids["b"])),
        guided("banned", choice, bad_sequences=((ids["n"],), (ids["no"],))),
        request("bad", 8, 6, grammar="{}"),
        request("both", 8, 6, allowed_token_ids=(5,), bias=((5, -np.inf),)),
    )
    answers = client.drain()
    refused = {one.request_id: one.refused for one in client.outputs if one.error is not None}
    assert refused.pop("bad") is False  # not a grammar at all, which the door never lets through
    assert refused == dict.fromkeys(("later on", "allowed", "banned", "both"), True)
    assert "no text fits it" in client.errors["later on"]
    assert all("no token is allowed" in client.errors[one] for one in ("allowed", "banned", "both"))
    assert answers["plain"].finish_reason == "length"
    assert client.engine.num_corrupted == 0
