"""Tools in chat completions: what the model is shown, and calls whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from .replies import HERMES, NOW, OPENS_THINK, PARIS, ROME, TOOLS, WEATHER, call_text, writes
from .scripted import RunningServer, events, running

TWO = f"I look.\n{call_text(PARIS)}\n{call_text(ROME)}"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running(writes(TWO), template=HERMES, max_model_len=9000) as server:
        yield server


def says(server: RunningServer, text: str, grouped: int = 1) -> RunningServer:
    server.engine.script = writes(text, grouped)
    return server


def message(server: RunningServer, **fields: Any) -> dict[str, Any]:
    answer = server.chat(**{"tools": TOOLS, **fields})
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return {**choice["message"], "finish_reason": choice["finish_reason"]}


def chunks(server: RunningServer, **fields: Any) -> list[dict[str, Any]]:
    data = events(server.chat(**{"tools": TOOLS, **fields}, stream=True))
    assert data[-1] == "[DONE]"
    return [json.loads(one) for one in data[:-1]]


def joined(frames: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of a stream; on the way every delta is held to the rules."""
    content, reasoning, calls, finish = "", "", list[dict[str, Any]](), None
    for frame in frames:
        (choice,) = frame["choices"]
        delta = choice["delta"]
        assert finish is None, "something after the end"
        assert delta == {} or choice["finish_reason"] is None
        finish = choice["finish_reason"]
        content += delta.get("content") or ""
        assert delta.get("reasoning") == delta.get("reasoning_content")
        reasoning += delta.get("reasoning") or ""
        for part in delta.get("tool_calls", ()):
            if part["index"] == len(calls):
                assert set(part) == {"index", "id", "type", "function"}
                assert part["function"].keys() == {"name", "arguments"}
                assert part["function"]["arguments"] == ""
                calls.append(
                    {"id": part["id"], "type": "function", "function": dict(part["function"])}
                )
            else:
                assert part["index"] == len(calls) - 1
                assert set(part) == {"index", "function"}
                assert part["function"].keys() == {"arguments"}
                calls[-1]["function"]["arguments"] += part["function"]["arguments"]
    assert frames[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    return {"content": content, "reasoning": reasoning, "calls": calls, "finish_reason": finish}


def functions(calls: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def test_two_calls(server: RunningServer) -> None:
    said = message(says(server, TWO))
    assert functions(said["tool_calls"]) == [("weather", PARIS), ("weather", ROME)]
    assert {call["type"] for call in said["tool_calls"]} == {"function"}
    assert len({call["id"] for call in said["tool_calls"]}) == 2
    assert (said["content"], said["finish_reason"]) == ("I look.", "tool_calls")
    alone = message(says(server, call_text(ROME)))
    assert (alone["content"], alone["finish_reason"]) == (None, "tool_calls")


@pytest.mark.parametrize("calls", [[PARIS], [PARIS, ROME], ["{}"]])
@pytest.mark.parametrize("grouped", [1, 2, 5, 1000])
def test_b76_deltas_of_calls(server: RunningServer, calls: list[str], grouped: int) -> None:
    says(server, "Ok. " + "".join(map(call_text, calls)), grouped)
    whole, streamed = message(server), joined(chunks(server))
    assert functions(streamed["calls"]) == functions(whole["tool_calls"])
    assert functions(streamed["calls"]) == [("weather", one) for one in calls]
    assert streamed["content"] == whole["content"] == "Ok."
    assert streamed["finish_reason"] == whole["finish_reason"] == "tool_calls"


def test_what_the_model_is_shown(server: RunningServer) -> None:
    message(says(server, "Hi"), tools=[WEATHER | {"x": 1}])
    tokenizer = server.server.model.tokenizer
    prompt = tokenizer.decode(server.engine.seen[-1].prompt_token_ids, skip_special_tokens=False)
    assert json.dumps(WEATHER) in prompt
    for fields in ({"tool_choice": "none"}, {"tools": []}, {"tools": None, "tool_choice": "auto"}):
        said = message(says(server, TWO), **fields)
        # Without tools in play, what looks like a call is words.
        assert said["content"] == TWO
        assert "tool_calls" not in said
        prompt = tokenizer.decode(server.engine.seen[-1].prompt_token_ids)
        assert "weather" not in prompt


def test_history(server: RunningServer) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": ROME}}
    history = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "reasoning": "Hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    message(says(server, "Sunny"), messages=history)
    tokenizer = server.server.model.tokenizer
    prompt = tokenizer.decode(server.engine.seen[-1].prompt_token_ids, skip_special_tokens=False)
    written = (
        '<think>\nHm\n</think>\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}'
    )
    assert written in prompt
    assert "<|im_start|>tool\nsunny<|im_end|>" in prompt
    shown = server.http.post("/tokenize", json={"messages": history, "tools": TOOLS}).json()
    assert shown["tokens"] == server.engine.seen[-1].prompt_token_ids.tolist()


def test_a_call_that_is_cut(server: RunningServer) -> None:
    text = call_text(PARIS)
    size = len(text) - 25
    said = message(says(server, text), max_tokens=size)
    assert said["finish_reason"] == "length"
    (arguments,) = [text for _, text in functions(said["tool_calls"])]
    assert PARIS.startswith(arguments.rstrip("\ufffd"))  # cut inside of a character
    assert len(arguments) > 5
    assert joined(chunks(server, max_tokens=size))["finish_reason"] == "length"
    said = message(says(server, text), max_tokens=15)  # nobody knows yet that it is a call
    assert (said["content"], said["finish_reason"]) == (text[:15], "length")


def test_arguments_that_are_no_json_are_told_as_they_stand(server: RunningServer) -> None:
    broken = "{'city': None,}"
    said = message(says(server, call_text(broken)))
    assert functions(said["tool_calls"]) == [("weather", broken)]
    assert functions(joined(chunks(server))["calls"]) == [("weather", broken)]


def test_choices_have_calls_of_their_own(server: RunningServer) -> None:
    answer = says(server, TWO).chat(tools=TOOLS, n=2).json()
    ids = [call["id"] for choice in answer["choices"] for call in choice["message"]["tool_calls"]]
    assert len(set(ids)) == 4


def test_a_stop_string_ends_what_is_said(server: RunningServer) -> None:
    said = message(says(server, TWO), stop=["</tool_call>"])
    assert functions(said["tool_calls"]) == [("weather", PARIS)]
    assert said["finish_reason"] == "tool_calls"


def test_logprobs_stand_beside_calls(server: RunningServer) -> None:
    answer = says(server, TWO).chat(tools=TOOLS, logprobs=True).json()
    (choice,) = answer["choices"]
    assert len(choice["logprobs"]["content"]) == answer["usage"]["completion_tokens"]
    frames = chunks(server, logprobs=True)
    scored = [frame["choices"][0]["logprobs"] for frame in frames]
    assert sum(len(one["content"]) for one in scored if one) == len(choice["logprobs"]["content"])


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [NOW, NOW]}, "tools[1].function.name"),
    ({"tool_choice": "required", "tools": []}, "tool_choice"),
    ({"tool_choice": "sometimes"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}}, "tool_choice"),
    ({"tool_choice": {"type": "mcp"}}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG)
def test_wrong_tools(server: RunningServer, fields: dict[str, Any], param: str) -> None:
    answer = server.chat(**{"tools": TOOLS, **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_allowed_tools_are_those_that_are_shown(server: RunningServer) -> None:
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "now"}}]}
    message(says(server, "Hi"), tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    prompt = server.server.model.tokenizer.decode(server.engine.seen[-1].prompt_token_ids)
    assert '"now"' in prompt
    assert "weather" not in prompt


# ---------------------------------------------------------------------------------- reasoning


def test_reasoning(server: RunningServer) -> None:
    text = f"<think>\nHm.\n</think>\n\nSo. {call_text(ROME)}"
    said = message(says(server, text))
    assert (said["reasoning"], said["reasoning_content"], said["content"]) == ("Hm.", "Hm.", "So.")
    streamed = joined(chunks(server))
    assert (streamed["reasoning"], streamed["content"]) == ("Hm.", "So.")
    without = message(server, include_reasoning=False)
    assert (without["reasoning"], without["content"]) == (None, "So.")
    assert joined(chunks(server, include_reasoning=False))["reasoning"] == ""
    left = message(server, separate_reasoning=False, tools=[])
    assert left["content"] == text
    usage = server.chat().json()["usage"]
    # Three characters, the blank after them, and the marker that ends them.
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len("Hm.\n</think>")


def test_a_template_that_opens_thoughts() -> None:
    with running(writes("Hm.\n</think>\nYes"), template=OPENS_THINK, max_model_len=9000) as server:
        said = message(server)
        assert (said["reasoning"], said["content"]) == ("Hm.", "Yes")
        says(server, "Yes")
        said = message(server, chat_template_kwargs={"enable_thinking": False})
        assert (said["reasoning"], said["content"]) == (None, "Yes")
        # All thoughts, no answer.
        said = message(says(server, "Hm, and on"), max_tokens=5)
        assert (said["reasoning"], said["content"], said["finish_reason"]) == (
            "Hm, a",
            None,
            "length",
        )
        user = [{"role": "user", "content": "<think>"}]
        said = message(says(server, "a</think>b"), messages=user, continue_final_message=False)
        assert (said["reasoning"], said["content"]) == ("a", "b")
        begun = [*user, {"role": "assistant", "content": "<think>so"}]
        said = message(says(server, " on</think>b"), messages=begun, continue_final_message=True)
        assert (said["reasoning"], said["content"]) == ("on", "b")


def test_parsers_can_be_forced() -> None:
    text = "[TOOL_CALLS]weather[ARGS]{}"
    with running(
        writes(text), template=HERMES, max_model_len=9000, tool_parser="mistral"
    ) as server:
        said = message(server)
        assert functions(said["tool_calls"]) == [("weather", "{}")]
        assert len(said["tool_calls"][0]["id"]) == 9
    for name, expected in (
        ("none", "Hm</think>Hi"),
        ("deepseek_r1", "Hi"),
        ("qwen3", "Hm</think>Hi"),
    ):
        with running(writes("Hm</think>Hi"), template=HERMES, reasoning_parser=name) as server:
            assert message(server, tools=[])["content"] == expected


def test_a_template_without_tools(server: RunningServer) -> None:
    """The model is told of them in words, and of calls and results too."""
    with running(writes(TWO), max_model_len=9000) as plain:
        said = message(plain)
        assert functions(said["tool_calls"]) == [("weather", PARIS), ("weather", ROME)]
        tokenizer = plain.server.model.tokenizer

        def prompt() -> str:
            return tokenizer.decode(
                plain.engine.seen[-1].prompt_token_ids, skip_special_tokens=False
            )

        assert prompt().startswith("<s><|im_start|>system\nYou may call functions")
        assert json.dumps(WEATHER) in prompt()
        call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": ROME}}
        history = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "tool_calls": [call, call]},
            {"role": "tool", "tool_call_id": "c", "content": "sunny"},
            {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "rain"}]},
        ]
        message(plain, messages=history)
        assert prompt().startswith("<s><|im_start|>system\nBe brief.\n\nYou may call functions")
        assert f"assistant\n{call_text(ROME)}\n{call_text(ROME)}<|im_end|>" in prompt()
        results = (
            "<tool_response>\nsunny\n</tool_response>\n<tool_response>\nrain\n</tool_response>"
        )
        assert f"<|im_start|>user\n{results}<|im_end|>" in prompt()


def test_without_parallel_calls_the_first_alone_is_told(server: RunningServer) -> None:
    says(server, TWO)
    told = message(server, parallel_tool_calls=False)
    assert functions(told["tool_calls"]) == [("weather", PARIS)]
    assert told["finish_reason"] == "tool_calls"
    streamed = joined(chunks(server, parallel_tool_calls=False))
    assert functions(streamed["calls"]) == [("weather", PARIS)]
    assert streamed["finish_reason"] == "tool_calls"
