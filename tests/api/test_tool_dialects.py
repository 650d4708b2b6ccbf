"""Tools and thoughts in Anthropic's dialect and in Responses, with the official clients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from .replies import HERMES, PARIS, ROME, SCHEMA, call_text, writes
from .scripted import RunningServer, running, typed_events

TEXT = f"<think>\nHm.\n</think>\nI look. {call_text(PARIS)}\n{call_text(ROME)}"
ARGUMENTS = [{"city": 'P{ar}"is 😀', "days": 3}, {"city": "Rome"}]
TOOLS = [{"name": "weather", "description": "Of a city.", "input_schema": SCHEMA}]
FUNCTIONS: Any = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}]
ASKED: Any = [{"role": "user", "content": "Weather?"}]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running(writes(TEXT), template=HERMES, max_model_len=9000) as server:
        yield server


@pytest.fixture(scope="module")
def claude(server: RunningServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def prompt(server: RunningServer) -> str:
    ids = server.engine.seen[-1].prompt_token_ids
    return server.server.model.tokenizer.decode(ids, skip_special_tokens=False)


def shape(content: list[Any]) -> list[Any]:
    return [
        {"thinking": lambda b: b.thinking, "text": lambda b: b.text, "tool_use": lambda b: b.input}[
            one.type
        ](one)
        for one in content
    ]


@pytest.mark.parametrize("grouped", [1, 7, 1000])
def test_messages(server: RunningServer, claude: anthropic.Anthropic, grouped: int) -> None:
    server.engine.script = writes(TEXT, grouped)
    call: Any = {"model": "scripted", "messages": ASKED, "max_tokens": 500, "tools": TOOLS}
    whole = claude.messages.create(**call)
    with claude.messages.stream(**call) as stream:
        streamed = stream.get_final_message()
    for answer in (whole, streamed):
        assert shape(answer.content) == ["Hm.", "I look.", *ARGUMENTS]
        assert answer.stop_reason == "tool_use"
        assert len({one.id for one in answer.content if one.type == "tool_use"}) == 2
    # The loop goes on with what came, thoughts too.
    results = [
        {"type": "tool_result", "tool_use_id": one.id, "content": "sunny"}
        for one in whole.content
        if one.type == "tool_use"
    ]
    history = [
        *ASKED,
        {"role": "assistant", "content": whole.content},
        {"role": "user", "content": results},
    ]
    server.engine.script = writes("Sunny.")
    said = claude.messages.create(**call | {"messages": history})
    assert (said.content[0].text, said.stop_reason) == ("Sunny.", "end_turn")
    assert "<think>\nHm.\n</think>\nI look.<tool_call>" in prompt(server)
    assert prompt(server).count("<|im_start|>tool\nsunny<|im_end|>") == 2


def test_events_of_messages(server: RunningServer) -> None:
    server.engine.script = writes(TEXT)
    body = {"model": "scripted", "messages": ASKED, "max_tokens": 500, "tools": TOOLS}
    frames = typed_events(server.http.post("/v1/messages", json=body | {"stream": True}))
    kinds = [frame["type"] for frame in frames]
    assert kinds[:3] == ["message_start", "content_block_start", "ping"]
    assert kinds[-2:] == ["message_delta", "message_stop"]
    opened = [f for f in frames if f["type"] == "content_block_start"]
    assert [f["index"] for f in opened] == [0, 1, 2, 3]
    assert [f["content_block"]["type"] for f in opened] == [
        "thinking", "text", "tool_use", "tool_use",
    ]  # fmt: skip
    partial = [f["delta"]["partial_json"] for f in frames if f.get("index") == 2 and "delta" in f]
    assert "".join(partial) == PARIS
    assert frames[-2]["delta"]["stop_reason"] == "tool_use"


def test_choices_of_messages(server: RunningServer, claude: anthropic.Anthropic) -> None:
    server.engine.script = writes(TEXT)
    call: Any = {"model": "scripted", "messages": ASKED, "max_tokens": 500, "tools": TOOLS}
    none = claude.messages.create(**call, tool_choice={"type": "none"})
    assert [one.type for one in none.content] == ["thinking", "text"]
    assert "weather" not in prompt(server)
    without: Any = {"type": "disabled"}
    assert shape(claude.messages.create(**call, thinking=without).content)[0] == "I look."
    assert "assistant\n<think>\n\n</think>" in prompt(server)
    search: Any = {"type": "web_search_20250305", "name": "web_search"}
    claude.messages.create(**call | {"tools": [search, *TOOLS]})
    assert "web_search" not in prompt(server)
    for wrong in ([{"name": "a b", "input_schema": {}}], [{"name": "f"}]):
        with pytest.raises(anthropic.BadRequestError):
            claude.messages.create(**call | {"tools": wrong})
    broken = call_text("{'no json'}")
    server.engine.script = writes(broken)
    assert shape(claude.messages.create(**call).content) == [{"arguments": "{'no json'}"}]


@pytest.mark.parametrize("grouped", [1, 7, 1000])
def test_responses(server: RunningServer, grouped: int) -> None:
    server.engine.script = writes(TEXT, grouped)
    call: Any = {"model": "scripted", "input": ASKED, "tools": FUNCTIONS}
    whole = server.client.responses.create(**call)
    with server.client.responses.stream(**call) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_response()
    for answer in (whole, streamed):
        thoughts, message, *calls = answer.output
        assert thoughts.content[0].text == "Hm."
        assert message.content[0].text == "I look."
        assert [one.arguments for one in calls] == [PARIS, ROME]
        assert {one.name for one in calls} == {"weather"}
        assert len({one.call_id for one in calls}) == len({one.id for one in calls}) == 2
        assert answer.status == "completed"
    assert (
        kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 4
    )
    assert kinds.count("response.function_call_arguments.done") == 2
    assert kinds.count("response.reasoning_text.done") == 1
    assert whole.usage.output_tokens_details.reasoning_tokens > 0
    outputs = [
        {"type": "function_call_output", "call_id": one.call_id, "output": "sunny"}
        for one in whole.output
        if one.type == "function_call"
    ]
    history = [*ASKED, *[one.model_dump() for one in whole.output], *outputs]
    server.engine.script = writes("Sunny.")
    said = server.client.responses.create(**call | {"input": history})
    assert said.output_text == "Sunny."
    assert "I look.<tool_call>" in prompt(server)
    assert prompt(server).count("<|im_start|>tool\nsunny<|im_end|>") == 2


def test_responses_with_other_tools(server: RunningServer) -> None:
    server.engine.script = writes(TEXT)
    call: Any = {"model": "scripted", "input": "Weather?"}
    others: Any = [*FUNCTIONS, {"type": "web_search"}, {"type": "custom", "name": "patch"}]
    answer = server.client.responses.create(**call, tools=others)
    assert len(answer.output) == 4
    alone = server.client.responses.create(**call, tools=others, parallel_tool_calls=False)
    assert [one.type for one in alone.output] == [one.type for one in answer.output[:3]]
    assert "patch" not in prompt(server)
    cut = server.client.responses.create(**call, tools=FUNCTIONS, max_output_tokens=60)
    assert (cut.status, cut.output[-1].status) == ("incomplete", "incomplete")
    with pytest.raises(openai.BadRequestError, match="names a tool"):
        server.client.responses.create(
            **call, tools=FUNCTIONS, tool_choice={"type": "function", "name": "other"}
        )
    with pytest.raises(openai.BadRequestError, match=r"tools\[0\]"):
        server.client.responses.create(**call, tools=[{"type": "function"}])  # type: ignore[list-item]


def test_the_loop_of_the_openai_client(server: RunningServer) -> None:
    """Calls whole and streamed go back into the next request as they came."""
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    create = server.client.chat.completions.create
    server.engine.script = writes(TEXT)
    message = create(model="scripted", messages=ASKED, tools=[tool]).choices[0].message
    with server.client.chat.completions.stream(
        model="scripted", messages=ASKED, tools=[tool]
    ) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == "tool_calls"
    for said in (message, streamed.message):
        assert [one.function.arguments for one in said.tool_calls] == [PARIS, ROME]
        results: Any = [
            {"role": "tool", "tool_call_id": one.id, "content": "sunny"} for one in said.tool_calls
        ]
        server.engine.script = writes("Sunny.")
        turns = [*ASKED, said.model_dump(exclude_none=True), *results]
        answer = create(model="scripted", messages=turns, tools=[tool])
        assert answer.choices[0].message.content == "Sunny."
        assert prompt(server).count("<|im_start|>tool\nsunny<|im_end|>") == 2
        assert "<think>\nHm.\n</think>" in prompt(server)
