"""Thoughts before a grammar and under a budget: where they end, and what has no say in it."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import numpy as np
import pytest
from engine.helpers import Client, request, run
from engine.scripted_runner import Answer

from grammar.test_guided import PERSON, alone, engine, guided
from grammar.vocabulary import EOS, TOKENS, TinyTokenizer, text_of
from invar.grammar.thoughts import Phase, Rules, Thoughts
from invar.grammar.vocabulary import RawVocabulary
from invar.text.channel_formats import ADDRESSED_THOUGHTS, HARMONY_THOUGHTS
from invar.text.model_formats import WHOLE_FORMATS

END = "</th>"  # three tokens: "<", "/", "th", ">" is a fourth
BEGUN = Thoughts(re.escape(END), (("", END),))
OPENED = dataclasses.replace(BEGUN, start="<th>")
SOON = Thoughts("[#~]", (("", "#"),))  # the model ends them itself before long
FORMS: list[Any] = [
    PERSON, {"choice": ["yes", "no", "level"]}, {"regex": "[a-c]{2,4}-[0-9]{3}"},
]  # fmt: skip


def thinking(name: str, form: Any, limit: int = 90, **options: Any) -> Any:
    return guided(name, form, limit, **({"thoughts": BEGUN} | options))


def free(name: str, budget: int | None, limit: int = 60, **options: Any) -> Any:
    thoughts = dataclasses.replace(options.pop("thoughts", BEGUN), budget=budget)
    options = {"stop_token_ids": frozenset({EOS}), "seed": 5, "temperature": 1.0} | options
    return request(name, 9, limit, thoughts=thoughts, **options)


def several(limit: int = 90, budget: int | None = 12) -> list[Any]:
    thoughts = [dataclasses.replace(one, budget=budget) for one in (BEGUN, OPENED)]
    guided_ones = [
        thinking(f"g{index}{place}{seed}", form, limit, seed=seed, thoughts=one)
        for index, form in enumerate(FORMS)
        for place, one in enumerate(thoughts)
        for seed in (1,)
    ]
    free_ones = [
        free(f"f{place}{seed}", 12, limit, seed=seed, thoughts=one)
        for place, one in enumerate(thoughts)
        for seed in (1, 2)
    ]
    soon = [thinking(f"n{seed}", PERSON, limit, seed=seed, thoughts=SOON) for seed in range(3)]
    return [*guided_ones, *free_ones, *soon]


def parts(answer: Answer) -> tuple[str, str]:
    thought, end, said = text_of(answer.token_ids).partition(END)
    assert end
    return thought, said


@pytest.mark.parametrize("limit", [34, 50, 90, 240])
def test_a_grammar_begins_behind_the_thoughts_whatever_the_limit(limit: int) -> None:
    for seed in range(4):
        answer = alone(thinking("a", PERSON, limit, seed=seed))
        thought, said = parts(answer)
        assert set(json.loads(said)) - {"age"} == {"name", "tags", "level"}
        assert len(answer.token_ids) <= limit
        assert EOS not in answer.token_ids[:-1]
        if len(thought) > 2 * limit:
            assert answer.finish_reason == "length"


def test_thoughts_that_the_model_ends() -> None:
    reasons, leads = set(), set()
    for seed in range(16):
        answer = alone(thinking("a", {"choice": ["yes", "no"]}, 200, seed=seed, thoughts=SOON))
        match = re.fullmatch(r"[^#~]*[#~](\n{0,2})(yes|no)", text_of(answer.token_ids), re.DOTALL)
        assert match, text_of(answer.token_ids)
        leads.add(match[1])
        reasons.add(answer.finish_reason)
    assert reasons == {"stop"}
    assert leads == {"", "\n"}


def test_the_smallest_limit_is_that_of_the_end_and_the_shortest_answer() -> None:
    for limit in range(7, 12):
        answer = alone(thinking("a", {"choice": ["yes"]}, limit, seed=3))
        _, said = parts(answer)
        assert said.strip() == "yes"
        assert answer.finish_reason == "length"
        assert len(answer.token_ids) <= limit


@pytest.mark.parametrize("budget", [0, 1, 5, 30])
def test_a_budget_is_used_up_and_then_the_answer_begins(budget: int) -> None:
    plain = alone(free("a", None, 200))
    unbounded = alone(request("a", 9, 200, stop_token_ids=frozenset({EOS}), seed=5,
                              temperature=1.0))  # fmt: skip
    assert plain == unbounded
    answer = alone(free("a", budget, 200))
    closing = TinyTokenizer().encode_inside(END)
    assert answer.token_ids[:budget] == plain.token_ids[:budget]
    assert answer.token_ids[budget : budget + len(closing)] == closing
    assert len(answer.token_ids) > budget + len(closing)
    form = alone(thinking("b", {"choice": ["yes"]}, thoughts=dataclasses.replace(
        BEGUN, budget=budget)))  # fmt: skip
    _, said = parts(form)
    assert said.strip() == "yes"
    assert form.finish_reason == "stop"  # the caller's wish is no want of room


def test_thoughts_that_the_model_may_begin() -> None:
    said = set()
    for seed in range(16):
        one = thinking("a", {"choice": ["yes", "no"]}, 40, seed=seed, thoughts=OPENED)
        text = text_of(alone(one).token_ids)
        said.add(text.startswith("<th>"))
        assert re.fullmatch(r"(<th>.*</th>\n{0,2})?(yes|no)", text, re.DOTALL), text
    assert said == {True, False}
    # No thoughts are begun where the limit has no room for their end.
    for seed in range(12):
        one = thinking("a", {"choice": ["yes", "no"]}, 6, seed=seed, thoughts=OPENED)
        assert text_of(alone(one).token_ids) in ("yes", "no")


def test_an_answer_may_begin_like_thoughts() -> None:
    texts = set()
    for seed in range(24):
        one = thinking("a", {"regex": "<t?[a-c]{3}"}, 60, seed=seed, thoughts=OPENED)
        text = text_of(alone(one).token_ids)
        texts.add(text[:3])
        assert re.fullmatch(r"(<th>.*</th>\n{0,2})?<t?[a-c]{3}", text, re.DOTALL), text
    assert "<th" in texts
    assert len(texts) > 1


@pytest.mark.parametrize("scored", [{}, {"logprobs": 2}])
def test_jumps_change_nothing(scored: dict[str, int]) -> None:
    for limit in (90, 26):
        requests = [dataclasses.replace(
            one, sampling=dataclasses.replace(one.sampling, **scored)) for one in several(limit)
            if limit > 40 or one.id[:2] not in ("g0", "n0")]  # fmt: skip
        jumping, plain = Client(engine()), Client(engine(jump_forward=False))
        jumping.add(*requests)
        plain.add(*requests)
        assert jumping.drain() == plain.drain()
        assert all(len(output.token_ids) <= 1 for output in plain.outputs)
        assert any(len(output.token_ids) > 3 for output in jumping.outputs)


def test_company_chunks_preemption_and_cache_change_nothing() -> None:
    requests = several(60)
    expected = {one.id: alone(one) for one in requests}
    strangers = [request(f"s{index}", 20, 30) for index in range(4)]
    together = run(engine(max_sequences=8), *requests[:5], *strangers, *requests[5:])
    assert {name: together[name] for name in expected} == expected
    assert run(engine(max_tokens_per_step=3), *requests) == expected
    tight = engine(slabs=7, max_model_len=128)
    assert run(tight, *requests) == expected
    assert tight.scheduler.num_preemptions
    warm = engine()
    run(warm, *requests)
    assert run(warm, *requests) == expected


@pytest.mark.parametrize("jump_forward", [True, False])
def test_an_answer_goes_on_after_any_of_its_tokens(jump_forward: bool) -> None:
    for one in several(40)[::3]:
        client = Client(engine(jump_forward))
        client.add(one)
        whole = client.drain()[one.id]
        said: list[int] = []
        steered = False
        for place, output in enumerate(client.outputs):
            resumed = dataclasses.replace(
                one, output_token_ids=np.array(said, np.int32), was_steered=steered
            )
            if place % 3 == 0 or len(said) < 8:
                rest = alone(resumed, jump_forward=jump_forward)
                assert [*said, *rest.token_ids] == whole.token_ids
                assert rest.finish_reason == whole.finish_reason
            said += output.token_ids
            steered |= "steered" in output.timing


def raw(tokens: list[str]) -> RawVocabulary:
    class Source(TinyTokenizer):
        vocab_size = len(tokens)

        def visible_bytes(self, token_id: int, *, skip_special_tokens: bool) -> bytes:
            return tokens[token_id].encode()

        def encode_inside(self, text: str, *, parse_special: bool = False) -> list[int]:
            ids = []
            while text:
                best = max((one for one in tokens if one and text.startswith(one)), key=len)
                ids.append(tokens.index(best))
                text = text[len(best) :]
            return ids

    return RawVocabulary(Source())


PIECES = ["", "a", "b", "</", "th", ">", ">b", "</th>", "{", "<", "[c]", "[", "c]"]


def walk(thoughts: Thoughts, pieces: list[str], vocabulary: list[str] = PIECES) -> Any:
    place = Rules(thoughts, raw(vocabulary), None).begin()
    for piece in pieces:
        place = place.after(vocabulary.index(piece))
    return place


def test_the_end_is_found_however_it_is_cut() -> None:
    for pieces in (["</th>"], ["a", "</", "th", ">"], ["<", "a", "</", "th", ">b"]):
        place = walk(BEGUN, pieces)
        assert place.phase is Phase.ENDED
        assert place.rest == (b"b" if pieces[-1] == ">b" else b"")
    assert walk(BEGUN, ["</", "th", "a"]).phase is Phase.THINKING
    calls = dataclasses.replace(BEGUN, openers=("[c]",))
    for pieces in (["a", "[c]"], ["[", "c]"]):
        place = walk(calls, pieces)
        assert (place.phase, place.rest, place.is_opener) == (Phase.ENDED, b"[c]", True)
        assert place.going_on().after(PIECES.index("a")).phase is Phase.THINKING


def test_a_token_that_says_more_than_the_end() -> None:
    """The grammar takes the rest of it, or it is drawn without."""
    joined = TOKENS.index(b"no")
    end = Thoughts("n", (("", "n"),))
    one = guided("a", {"regex": "o[0-9]{3}"}, 40, thoughts=end, seed=2,
                 bias=((joined, 30.0),))  # fmt: skip
    assert re.fullmatch(r"[^n]*no[0-9]{3}", text_of(alone(one).token_ids), re.DOTALL)
    other = guided("a", {"regex": "x?[0-9]{3}"}, 40, thoughts=end, seed=2,
                   bias=((joined, 30.0),))  # fmt: skip
    for jump_forward in (True, False):
        text = text_of(alone(other, jump_forward=jump_forward).token_ids)
        assert re.fullmatch(r"[^n]*n\n{0,2}[0-9]{3}", text, re.DOTALL)


HARMONY = ["<|channel|>", "analysis", "<|message|>", "a", "<|end|>", "<|start|>", "assistant",
           "final", "commentary", " to=functions.f", "<|constrain|>", "json"]  # fmt: skip


@pytest.mark.parametrize("pieces", [
    [], ["<|channel|>"], ["<|channel|>", "analysis"], ["<|channel|>", "analysis", "<|message|>"],
    ["<|channel|>", "analysis", "<|message|>", "a"],
    ["<|channel|>", "analysis", "<|message|>", "a", "<|end|>"],
    ["<|channel|>", "analysis", "<|message|>", "a", "<|end|>", "<|start|>"],
    ["<|channel|>", "analysis", "<|message|>", "a", "<|end|>", "<|start|>", "assistant"],
    ["<|channel|>", "final"], ["<|channel|>", "final", "<|constrain|>", "json"],
    ["<|channel|>", "commentary", " to=functions.f", "<|constrain|>", "json"],
])  # fmt: skip
def test_channels_are_led_to_the_final_one_from_anywhere(pieces: list[str]) -> None:
    from invar.text.channel_formats import HarmonyFormat
    from invar.text.reply_detection import read

    place = walk(HARMONY_THOUGHTS, pieces, HARMONY)
    assert place.phase is Phase.THINKING
    place = dataclasses.replace(place, rules=Rules(
        dataclasses.replace(HARMONY_THOUGHTS, budget=0), raw(HARMONY), None)).bounded()  # fmt: skip
    closing = list(place.closing)
    for token in closing[:-1]:
        place = place.after(token)
        assert place.phase is Phase.THINKING
    assert place.after(closing[-1]).phase is Phase.ENDED
    text = "".join([*pieces, *(HARMONY[one] for one in closing), '{"a": 1}<|return|>'])
    message = read(HarmonyFormat(), text, None, "<|start|>assistant")
    assert message.content == '{"a": 1}'
    assert message.reasoning == ("a" if "a" in pieces else "")


ADDRESSED = ["<|message|>", "a", "<|eom|>", "<|start|>", "assistant", " to=self", " to=user",
             " to=weather"]  # fmt: skip


@pytest.mark.parametrize("pieces", [
    [], [" to=self"], [" to=self", "<|message|>"], [" to=self", "<|message|>", "a"],
    [" to=self", "<|message|>", "a", "<|eom|>"], [" to=user"], [" to=weather"],
    [" to=self", "<|message|>", "a", "<|eom|>", "<|start|>"],
    [" to=self", "<|message|>", "a", "<|eom|>", "<|start|>", "assistant"],
    [" to=self", "<|message|>", "a", "<|eom|>", "<|start|>", "assistant", " to=weather"],
])  # fmt: skip
def test_messages_are_led_to_the_user_from_anywhere(pieces: list[str]) -> None:
    from invar.text.reply_detection import read

    place = walk(ADDRESSED_THOUGHTS, pieces, ADDRESSED)
    assert place.phase is Phase.THINKING
    closing = walk_closing(pieces)
    assert walk(ADDRESSED_THOUGHTS, [*pieces, *closing[:-1]], ADDRESSED).phase is Phase.THINKING
    assert walk(ADDRESSED_THOUGHTS, [*pieces, *closing], ADDRESSED).phase is Phase.ENDED
    form, prompt = WHOLE_FORMATS["muse_glimmer"], "<|start|>assistant"
    said = "".join([*pieces, *closing, "{}<|eot|>"])
    message = read(form, said, None, prompt)
    assert message.content == "{}"
    assert message.reasoning == ("a" if "a" in pieces else "")


def walk_closing(pieces: list[str]) -> list[str]:
    """What ends the thoughts there."""
    place = walk(ADDRESSED_THOUGHTS, pieces, ADDRESSED)
    rules = Rules(dataclasses.replace(ADDRESSED_THOUGHTS, budget=0), raw(ADDRESSED), None)
    return [ADDRESSED[one] for one in dataclasses.replace(place, rules=rules).bounded().closing]
