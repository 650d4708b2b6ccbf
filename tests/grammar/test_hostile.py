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
from grammar.vocabulary import TOKENS, compiler, text_of
from invar.grammar import compiler as compiling
from invar.grammar import completion, guide
from invar.grammar.compiler import CompiledGrammar, GrammarError, Lanes
from invar.grammar.guide import Guide
from invar.grammar.structured_outputs import StructuredOutputs

OPTIONAL = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(8000)}}
AMBIGUOUS = 'start: a "z"\na: a a | "x" | ' + " | ".join(f'"x" a "y{i}"' for i in range(300))


def tag_that_ends(*ends: str) -> dict[str, Any]:
    tags = [{"type": "tag", "begin": "<", "content": {"type": "any_text"}, "end": e} for e in ends]
    return {"type": "structural_tag", "format": {"type": "or", "elements": tags}}


HOSTILE: list[Any] = [
    {"json": OPTIONAL}, {"regex": "a{60000}"}, {"regex": r"(\w{1,100} ){1,300}x"},
    {"regex": "(a?){3000}a{3000}"}, {"regex": "((a{1,100}){1,100}){1,100}"},
    {"regex": "([a-z]{1,200}){1,200}"}, {"grammar": AMBIGUOUS},
    {"json": {"type": "integer", "multipleOf": 999983, "minimum": 1, "maximum": 10**15}},
    {"structural_tag": tag_that_ends("x" * 20_000)},
    {"grammar": f'start: text\ntext[suffix="{"x" * 20_000}"]: /(?s:.*)/'},
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


def test_ends_that_are_followed_are_few_and_short() -> None:
    ends = ["x" * (completion.LONGEST_END + 1), *(f"</{one}>" for one in range(40))]
    completer = compiler()._compiled(normalised({"structural_tag": tag_that_ends(*ends)})).completer
    assert len(completer._ends) == completion.MOST_ENDS
    assert max(map(len, completer._ends)) <= completion.LONGEST_END


PLAIN = "start: /[ab]+c/\n"


@pytest.mark.parametrize(
    "comment",
    [
        "// <[200]>", "// <[99999999]>", "// opening: [99999999999999]", "// opening: 5",
        "// opening: hello", '// end: "\\q"', '// end: "c"',
    ],
)  # fmt: skip
def test_comments_of_a_grammar_say_nothing(comment: str) -> None:
    with_comment = compiler()._compiled(normalised({"grammar": f"{PLAIN}{comment}\n"}))
    plain = compiler()._compiled(normalised({"grammar": PLAIN}))
    assert with_comment.end == plain.end


def test_a_token_that_is_not_there() -> None:
    for form in (
        {"grammar": 'start: "x" <[99999999]>\n'},
        {"structural_tag": {"type": "structural_tag", "format": {"type": "token", "token": 10**8}}},
    ):
        with pytest.raises(GrammarError, match=r"token \d+: the model has \d+$"):
            compiler().check(normalised(form))


@pytest.mark.parametrize("openings", [5, [5], [["a", None]], [[True]], {"a": 1}])
def test_openings_of_a_tag_that_are_none(openings: Any) -> None:
    tag = tag_that_ends("x") | {"openings": openings}
    with pytest.raises(ValueError, match=r"structural_tag\.openings"):
        normalised({"structural_tag": tag})


def test_openings_beyond_the_vocabulary_are_left_out() -> None:
    tag = tag_that_ends("a") | {"openings": [[10**15], [-1], ["<"]]}
    compiled = compiler().check(normalised({"structural_tag": tag}))
    assert compiled.completer._openings == [["<"]]


def test_a_lane_is_free_again_when_no_thread_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(timer: threading.Timer) -> None:
        raise RuntimeError("can't start new thread")

    grammars = compiler()
    with monkeypatch.context() as broken:
        broken.setattr(threading.Timer, "start", fail)
        for one in range(2 * compiling.COMPILING_AT_ONCE):
            with pytest.raises(RuntimeError, match="start new thread"):
                grammars.check(normalised({"choice": [f"choice {one}"]}))
    assert grammars.check(normalised({"choice": ["another"]}))


def test_no_mask_waits_behind_a_slow_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does once: a grammar's first mask says how long its others may take."""
    honest, release, inside = Guide.write_mask, threading.Event(), threading.Event()

    def write(one: Guide) -> None:
        if one is costly and one.is_slow:
            inside.set()
            assert release.wait(60)
        honest(one)
        if one is costly:
            busy_until = time.thread_time() + 2 * guide.SLOW_MASK_S
            while time.thread_time() < busy_until:
                pass

    grammar = compiler().check(normalised({"regex": "[ab]{9}"}))
    costly, quick = (Guide(grammar, len(TOKENS), max_tokens=20) for _ in range(2))
    monkeypatch.setattr(Guide, "write_mask", write)
    writer = guide.MaskWriter()
    writer.write([costly])
    while not costly.is_slow:
        writer.wait(1)
    writer.write([costly])
    assert inside.wait(60)
    quick._written[-1] = 0
    writer.write([costly, quick])
    deadline = time.monotonic() + 30
    while not quick.is_ready and time.monotonic() < deadline:
        writer.wait(1)
    was_ready = quick.is_ready
    release.set()
    writer.close()
    assert was_ready
