"""Replies of every format: what they say, and that it does not depend on how they were cut."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text.reply_samples import SAMPLES, TOOLS, Sample, form_of

from invar.text.model_formats import CALL_FORMATS, WHOLE_FORMATS
from invar.text.reply import CallStart, Reply, ReplyFormat, ReplyMessage, joined
from invar.text.scanner import Stops

BY_NAME = {sample.name: sample for sample in SAMPLES}
assert len(BY_NAME) == len(SAMPLES)


def read(
    form: ReplyFormat,
    pieces: Iterable[str],
    prompt_end: str = "",
    tools: dict[str, Any] | None = TOOLS,
    **options: Any,
) -> ReplyMessage:
    reply, message = Reply(form, tools=tools, prompt_end=prompt_end, **options), ReplyMessage()
    for piece in pieces:
        message.take(reply.push(piece))
    message.take(reply.finish())
    return message


def cut(text: str, places: Iterable[int]) -> list[str]:
    ends = sorted({0, *(place for place in places if place < len(text)), len(text)})
    return [text[a:b] for a, b in itertools.pairwise(ends)]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_a_reply(sample: Sample) -> None:
    message = read(sample.form, [sample.text], sample.prompt_end)
    assert [(call.name, call.arguments) for call in message.calls] == list(sample.calls)
    assert (message.content, message.reasoning) == (sample.content, sample.reasoning)
    assert all(call.complete for call in message.calls) == sample.complete
    assert len({call.id for call in message.calls}) == len(message.calls)


def test_every_format_has_a_sample() -> None:
    known = {*CALL_FORMATS, *WHOLE_FORMATS}
    assert known - {sample.name.rpartition("-")[0] for sample in SAMPLES} == set()


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_every_chunking_gives_the_same_message(sample: Sample) -> None:
    text, whole = sample.text, read(sample.form, [sample.text], sample.prompt_end)
    if len(text) < 2000:
        for place in range(1, len(text), 1 if len(text) < 400 else 3):
            assert read(sample.form, cut(text, [place]), sample.prompt_end) == whole, place
    for size in (1, 3, 7) if len(text) < 5000 else (1, 7):
        pieces = cut(text, range(0, len(text), size))
        assert read(sample.form, pieces, sample.prompt_end) == whole, size


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "<function=weather>", "</function>"),
    *("<parameter=city>", "</parameter>", "\n", " ", "{", "}", "[", "]", '"', "\\", ":", ",", "'"),
    *('{"name": "weather", "arguments": ', '{"city": "x"}', "weather", "<arg_key>", "</arg_key>"),
    *("<arg_value>", "</arg_value>", "[TOOL_CALLS]", "[ARGS]", "<|channel|>", "<|message|>"),
    *("<|start|>assistant", "<|end|>", " to=functions.now", "analysis", ">>>", "all\n", "("),
    *(")", "call:", '<|"|>', "<|tool_call>", "<tool_call|>", "😀", "é", "<", "|"),
]


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(sorted({*CALL_FORMATS, *WHOLE_FORMATS})),
    st.lists(st.sampled_from(FRAGMENTS), max_size=25),
    st.lists(st.integers(1, 200), max_size=12),
    st.sampled_from(["", "<think>\n", ">>>", "<|start|>assistant"]),
)
def test_hostile_text_in_any_chunking(
    name: str, fragments: list[str], places: list[int], prompt_end: str
) -> None:
    text, form = "".join(fragments), form_of(name)
    whole = read(form, [text], prompt_end)
    assert read(form, cut(text, places), prompt_end) == whole
    assert read(form, text, prompt_end) == whole
    # Without tools nothing is a call.
    assert not read(form, text, prompt_end, tools=None).calls


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_a_start_comes_before_its_arguments_and_names_once(sample: Sample) -> None:
    reply, started = Reply(sample.form, tools=TOOLS, prompt_end=sample.prompt_end), list[int]()
    for character in sample.text:
        for event in reply.push(character):
            if isinstance(event, CallStart):
                started.append(event.index)
            elif hasattr(event, "index"):
                assert event.index == started[-1]
    reply.finish()
    assert started == list(range(len(started)))


def test_arguments_come_as_they_are_written() -> None:
    """Long strings are not held back until they are complete (sglang#27005)."""
    for name, head in (
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "'),
        ("qwen3_xml", "<tool_call>\n<function=weather>\n<parameter=city>\n"),
        ("glm45", "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>"),
        ("gemma4", '<|tool_call>call:weather{city:<|"|>'),
    ):
        reply = Reply(form_of(name), tools=TOOLS)
        reply.push(head)
        for _ in range(5):
            assert reply.push("word "), name


def test_a_call_that_is_cut_is_not_completed() -> None:
    form, text = form_of("qwen3_xml"), "<function=weather>\n<parameter=days>\n3\n</parameter>"
    reply, message = Reply(form, tools=TOOLS), ReplyMessage()
    message.take([*reply.push(text), *reply.finish(cut=True)])
    assert (message.calls[0].arguments, reply.complete_calls) == ('{"days": 3', 0)
    reply, message = Reply(form, tools=TOOLS), ReplyMessage()
    message.take([*reply.push(text), *reply.finish(cut=False)])  # the model left its end out
    assert (message.calls[0].arguments, reply.complete_calls) == ('{"days": 3}', 1)


def test_ids() -> None:
    kimi = "<|tool_call_begin|>functions.now:7<|tool_call_argument_begin|>{}<|tool_call_end|>"
    assert [c.id for c in read(form_of("hermes"), [SAMPLES[2].text], seed="a").calls] == [
        c.id for c in read(form_of("hermes"), SAMPLES[2].text, seed="a").calls
    ]
    mistral = read(
        form_of("mistral"), ["[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]now[CALL_ID]a1[ARGS]{}"]
    )
    assert len(mistral.calls[0].id) == 9
    assert mistral.calls[0].id.isalnum()
    assert mistral.calls[1].id == "a1"
    assert read(form_of("kimi_k2"), [kimi]).calls[0].id == "functions.now:7"


def test_a_value_of_no_known_type() -> None:
    text = "<function=other><parameter=a>\n1\n</parameter><parameter=b>x</parameter></function>"
    (call,) = read(form_of("qwen3_xml"), [text]).calls
    assert call.arguments == '{"a": 1, "b": "x"}'


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("days", "3", "3"), ("days", "three", '"three"'), ("days", "3.5", "3.5"),
        ("exact", "True", "true"), ("near", "None", "null"), ("near", "['a']", '["a"]'),
        ("near", "[1, 2", '"[1, 2"'), ("opt", '{"a": {}}', '{"a": {}}'), ("city", "3", '"3"'),
        ("days", "9" * 5000, '"' + "9" * 5000 + '"'), ("opt", "[" * 5000, '"' + "[" * 5000 + '"'),
        ("opt", "NaN", '"NaN"'),
    ],
)  # fmt: skip
def test_types_come_from_the_schema(key: str, value: str, expected: str) -> None:
    text = f"<function=weather><parameter={key}>\n{value}\n</parameter></function>"
    (call,) = read(form_of("qwen3_xml"), [text]).calls
    assert call.arguments == f'{{"{key}": {expected}}}'


def test_reasoning_is_counted_by_place() -> None:
    form = form_of("hermes")
    text = "<think>ab cd</think>ef"
    tokens = ["<th", "ink>", "ab", " cd", "</th", "ink>", "ef"]
    offsets = [sum(map(len, tokens[:i])) for i in range(len(tokens))]
    whole = Reply(form)
    whole.push(text)
    whole.finish()
    assert whole.count_reasoning(offsets) == 4  # with the marker that ends it
    streamed, count = Reply(form), 0
    for offset, token in zip(offsets, tokens, strict=True):
        streamed.push(token)
        count += streamed.count_reasoning([offset])
    assert count == 4


def test_huge_arguments_take_linear_time() -> None:
    value = "x" * 200_000
    text = f'<tool_call>{{"name": "weather", "arguments": {{"city": "{value}"}}}}</tool_call>'
    pieces = cut(text, range(0, len(text), 50))
    (call,) = read(form_of("hermes"), pieces).calls
    assert call.arguments == f'{{"city": "{value}"}}'


def test_stops_that_could_not_be_told_apart_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be looked for"):
        Stops(["ab", "xaby"])
    assert joined([]) == []
