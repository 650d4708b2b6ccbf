"""Calls that must be made, and strict ones, over HTTP, with the real engine and a tiny model whose
words mean nothing: all that is right about its calls comes from their grammar."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import jsonschema
import openai
import pytest

from invar.config import EngineConfig

from .scripted import events
from .test_real_engine import TINY, RealServer, real_server
from .test_tools import functions, joined

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["celsius", "kelvin"]},
    },
    "required": ["city", "days", "unit"],
    "additionalProperties": False,
}
SCHEMAS = {"weather": WEATHER, "now": {"type": "object", "properties": {}}}
IGNORED = {"type": "object", "properties": {"x": {"type": "integer", "not": {"const": 3}}}}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
# A model whose words mean nothing may begin one call after the other up to its limit.
ENDS = ("tool_calls", "length")
NOW = {"type": "function", "function": {"name": "now"}}
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module", params=["hermes", "qwen3_xml", "gemma4"])
def real(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealServer]:
    template = Path(tmp_path_factory.mktemp("template"), "t.jinja")
    # One that shows tools: else their words ask for the generic form.
    template.write_text(TEMPLATE + "{% if tools %}{{ tools | tojson }}{% endif %}")
    config = EngineConfig(
        model=str(TINY),
        served_model_name=["tiny"],
        num_threads=2,
        chat_template=str(template),
        max_num_seqs=4,
    )
    with real_server(config, tool_call_parser=request.param) as server:
        yield server


def post(real: RealServer, route: str = "/v1/chat/completions", **fields: Any) -> Any:
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 400,
        "seed": 3,
        "temperature": 2,
        "tools": TOOLS,
        **fields,
    }
    return real.http.post(route, json=body)


def chat(real: RealServer, **fields: Any) -> dict[str, Any]:
    answer = post(real, **fields)
    assert answer.status_code == 200, answer.text
    value: dict[str, Any] = answer.json()
    return value


def calls(real: RealServer, **fields: Any) -> list[tuple[str, str]]:
    (choice,) = chat(real, **fields)["choices"]
    assert choice["message"]["content"] is None
    found = functions(choice["message"]["tool_calls"])
    for name, arguments in found:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    return found


def test_required(real: RealServer) -> None:
    names = set()
    reasons = set()
    for seed in range(10):
        names |= {name for name, _ in calls(real, tool_choice="required", seed=seed)}
        reasons.add(chat(real, tool_choice=NOW, seed=seed)["choices"][0]["finish_reason"])
    assert names == {"weather", "now"}
    assert {"tool_calls"} <= reasons <= set(ENDS)


def test_streams_say_the_same(real: RealServer) -> None:
    for seed in (1, 2):
        fields = {"tool_choice": "required", "seed": seed}
        data = events(post(real, **fields, stream=True))
        assert data[-1] == "[DONE]"
        streamed = joined([json.loads(one) for one in data[:-1]])
        assert functions(streamed["calls"]) == calls(real, **fields)
        assert streamed["content"] == ""
        assert streamed["finish_reason"] in ENDS


def test_named_and_single(real: RealServer) -> None:
    for seed in range(4):
        assert [name for name, _ in calls(real, tool_choice=NAMED, seed=seed)] == ["weather"]
        single = {"tool_choice": "required", "parallel_tool_calls": False, "seed": seed}
        assert len(calls(real, **single)) == 1
    allowed = {"mode": "required", "tools": [NOW]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    assert {name for name, _ in calls(real, tool_choice=choice)} == {"now"}


def test_a_call_that_cannot_be_written_is_a_400(real: RealServer) -> None:
    endless = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
    list_ = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}
    within = {
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/a"}},
        "required": ["x"],
        "$defs": endless["$defs"],
    }
    for schema in (endless, list_, within):
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        answer = post(real, tools=[*TOOLS, tool], tool_choice="required")
        assert answer.status_code == 400, schema
    answer = post(real, tool_choice="required", allowed_token_ids=[3])
    assert answer.status_code == 400
    assert "no token is allowed" in answer.json()["error"]["message"]
    assert calls(real, tool_choice=NOW)
    real.settle()


def test_at_the_limit_calls_are_closed(real: RealServer) -> None:
    refused = post(real, tool_choice=NAMED, max_tokens=5)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == "max_tokens"
    fewest = int(error["message"].split("has ")[1].split(".")[0].split()[0])
    for seed in range(4):
        for room in (0, 9, 30):
            limit = {"max_tokens": fewest + room, "seed": seed}
            assert [name for name, _ in calls(real, tool_choice=NAMED, **limit)] == ["weather"]


def test_an_answer_depends_on_its_request_alone(real: RealServer) -> None:
    requests = [
        {"tool_choice": choice, "seed": s} for choice in ("required", NAMED) for s in range(5)
    ]
    alone = [calls(real, **one) for one in requests]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda one: calls(real, **one), requests)) == alone


def strict(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}


def test_strict(real: RealServer) -> None:
    tools = [strict("weather", WEATHER)]
    answer = chat(real, tools=tools)
    assert (
        answer["choices"][0]["message"]["content"] or answer["choices"][0]["message"]["tool_calls"]
    )
    assert "warnings" not in answer
    refused = post(real, tools=[strict("odd", IGNORED)])
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "tools"
    assert "not" in refused.json()["error"]["message"]


def test_what_is_not_enforced_is_told(real: RealServer) -> None:
    tool = {"type": "function", "function": {"name": "odd", "parameters": IGNORED}}
    answer = chat(real, tools=[tool], tool_choice="required")
    (warning,) = answer["warnings"]
    assert "not" in warning


FORM = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": WEATHER}}


def test_an_answer_in_a_form_or_calls(real: RealServer) -> None:
    told = set()
    for seed in range(12):
        (choice,) = chat(real, response_format=FORM, seed=seed)["choices"]
        message = choice["message"]
        told.add(message["content"] is None)
        if message["content"] is None:
            assert choice["finish_reason"] in ENDS
        else:
            jsonschema.validate(json.loads(message["content"]), WEATHER)
    assert told == {True, False}
    assert calls(real, response_format=FORM, tool_choice="required")
    both = post(real, structured_outputs={"regex": "a+"}, tool_choice="required")
    assert both.status_code == 400
    assert both.json()["error"]["param"] == "tool_choice"


# ---------------------------------------------------------------------------- other dialects


def test_messages(real: RealServer) -> None:
    tools = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
    with anthropic.Anthropic(base_url=str(real.http.base_url), api_key="none") as client:
        for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
            only: Any = choice | {"disable_parallel_tool_use": True}
            for how in (choice, only):
                said: Any = client.messages.create(
                    model="tiny",
                    max_tokens=400,
                    messages=[{"role": "user", "content": "x"}],
                    tools=tools,  # type: ignore[arg-type]
                    tool_choice=how,
                )
                assert said.stop_reason != "end_turn"
                used = [block for block in said.content if block.type != "thinking"]
                assert {block.type for block in used} == {"tool_use"}
                for block in used:
                    jsonschema.validate(block.input, SCHEMAS[block.name])
                if how != {"type": "any"}:
                    assert len(used) == 1
        assert used[0].name == "weather"
        with client.messages.stream(
            model="tiny",
            max_tokens=400,
            messages=[{"role": "user", "content": "x"}],
            tools=tools,  # type: ignore[arg-type]
            tool_choice={"type": "any"},
        ) as stream:
            final: Any = stream.get_final_message()
        assert final.content[-1].type == "tool_use"


def test_responses(real: RealServer) -> None:
    tools: Any = [
        {"type": "function", "name": name, "parameters": schema, "strict": name == "weather"}
        for name, schema in SCHEMAS.items()
    ]
    allowed = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "now"}],
    }
    choices: list[tuple[Any, set[str]]] = [
        ("required", {"weather", "now"}),
        ({"type": "function", "name": "weather"}, {"weather"}),
        (allowed, {"now"}),
    ]
    with openai.OpenAI(base_url=f"{real.http.base_url}/v1", api_key="none") as client:
        for choice, names in choices:
            said: Any = client.responses.create(
                model="tiny", input="x", tools=tools, tool_choice=choice, max_output_tokens=400
            )
            assert said.status in ("completed", "incomplete")
            called = [item for item in said.output if item.type != "reasoning"]
            assert {item.type for item in called} == {"function_call"}
            assert {item.name for item in called} <= names
            for item in called:
                jsonschema.validate(json.loads(item.arguments), SCHEMAS[item.name])
