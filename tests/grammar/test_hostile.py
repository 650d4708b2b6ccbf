"""Grammars that are costly to read or to follow: whoever sends one is the only one to wait."""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from typing import Any

import pytest
from engine.helpers import Client

from grammar.test_guided import alone, engine, guided
from grammar.vocabulary import compiler, text_of
from invar.grammar import compiler as compiling
from invar.grammar import guide
from invar.grammar.compiler import CompiledGrammar, GrammarError, Lanes
from invar.grammar.structured_outputs import StructuredOutputs

OPTIONAL = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(8000)}}
AMBIGUOUS = 'start: a "z"\na: a a | "x" | ' + " | ".join(f'"x" a "y{i}"' for i in range(300))
HOSTILE: list[Any] = [
    {"json": OPTIONAL}, {"regex": "a{60000}"}, {"regex": r"(\w{1,100} ){1,300}x"},
    {"regex": "(a?){3000}a{3000}"}, {"regex": "((a{1,100}){1,100}){1,100}"},
    {"regex": "([a-z]{1,200}){1,200}"}, {"grammar": AMBIGUOUS},
    {"json": {"type": "integer", "multipleOf": 999983, "minimum": 1, "maximum": 10**15}},
]  # fmt: skip
# Of a core: reading and the first mask by llguidance's limits, and the search for an end.
WORST_S = 5.0


def normalised(form: Any) -> str:
    return StructuredOutputs(**form).normalised()


@pytest.mark.parametrize("form", HOSTILE, ids=lambda form: str(form)[:30])
def test_what_one_costs_is_bounded(form: Any) -> None:
    grammars, spent = compiler(), list[float]()

    def compiled() -> None:
        began = time.thread_time()
        with suppress(GrammarError):
            grammars._compiled(normalised(form))
        spent.append(time.thread_time() - began)

    compiling.start_thread(compiled, "grammar").join()
    assert spent
    assert spent[0] < WORST_S


def test_a_schema_of_too_many_symbols_is_refused() -> None:
    with pytest.raises(GrammarError, match="grammar size"):
        compiler().compile(normalised({"json": OPTIONAL})).result(120)
    kept = dict(list(OPTIONAL["properties"].items())[:1000])  # type: ignore[attr-defined]
    form = normalised({"json": {**OPTIONAL, "properties": kept}})
    assert compiler().compile(form).result(120)


def test_an_end_that_is_too_costly_to_find(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "END_LIMIT_S", 0.0)
    with pytest.raises(GrammarError, match="too costly"):
        compiler().check(normalised({"regex": "[ab]{3,9}c"}))


def test_nobody_waits_for_slow_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than there are quick lanes, and then somebody else."""
    monkeypatch.setattr(compiling, "SLOW_S", 0.05)
    grammars, release = compiler(), threading.Event()
    honest = grammars._compiled

    def slow(grammar: str) -> CompiledGrammar:
        if "slow" in grammar:
            assert release.wait(60)
        return honest(grammar)

    monkeypatch.setattr(grammars, "_compiled", slow)
    hostile = [grammars.compile(normalised({"choice": [f"slow{i}"]})) for i in range(4)]
    try:
        assert grammars.check(normalised({"choice": ["yes"]}))
        assert not any(one.done() for one in hostile)
    finally:
        release.set()
    assert all(one.result(60) for one in hostile)


def test_lanes_are_given_back() -> None:
    lanes = Lanes(1, 1, 0.02)
    with lanes.taken():  # becomes slow
        with lanes.taken():  # stays where it is: the slow lane is taken
            waiter = threading.Thread(target=lambda: lanes.taken().__enter__(), daemon=True)
            time.sleep(0.1)
            waiter.start()
            waiter.join(0.1)
            assert waiter.is_alive()
        waiter.join(10)
        assert not waiter.is_alive()


def test_long_forced_runs_are_drawn_to_the_same_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    one = guided("a", {"regex": "[0-9]a{40}[0-9]b{9}[0-9]"}, 90, seed=4)
    expected = alone(one)
    monkeypatch.setattr(guide, "LONGEST_RUN", 12)
    client = Client(engine())
    client.add(one)
    assert client.drain()["a"] == expected == alone(one, jump_forward=False)
    sizes = [len(output.token_ids) for output in client.outputs]
    assert 10 <= max(sizes) <= 14
    assert sizes.count(1) >= 20
    assert json.dumps(text_of(expected.token_ids)).count("a") == 40
