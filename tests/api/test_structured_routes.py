"""Structured output over HTTP, with the real engine and a tiny model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from invar.config import EngineConfig
from invar.grammar.structured_outputs import StructuredOutputs

from .scripted import events
from .test_real_engine import TINY, RealServer, real_server

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "kind": {"enum": ["a", "b"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}
IGNORED = {"type": "integer", "minimum": 1, "maximum": 9, "not": {"const": 3}}
BRACED = r"\{[^}]+\}"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    template = Path(tmp_path_factory.mktemp("template"), "t.jinja")
    template.write_text(TEMPLATE)
    options: dict[str, Any] = {"chat_template": str(template), "max_num_seqs": 4}
    with real_server(EngineConfig(model=str(TINY), num_threads=2, **options)) as server:
        yield server


def chat(real: RealServer, **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 80, "seed": 3, **fields}
    answer = real.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    value: dict[str, Any] = answer.json()
    return value


def text_of(real: RealServer, **fields: Any) -> str:
    text: str = chat(real, **fields)["choices"][0]["message"]["content"]
    return text


def refusal(real: RealServer, route: str = "/v1/chat/completions", **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 80, **fields}
    answer = real.http.post(route, json=body)
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


@pytest.mark.parametrize("fields", [
    {"response_format": {"type": "json_schema", "json_schema": {
        "name": "x", "strict": True, "schema": SCHEMA}}},
    {"structured_outputs": {"json": SCHEMA}}, {"guided_json": SCHEMA},
    {"guided_json": json.dumps(SCHEMA)},
    {"json_schema": SCHEMA}, {"json_schema": json.dumps(SCHEMA)},
    {"response_format": {"type": "json_object", "schema": SCHEMA}},
])  # fmt: skip
def test_every_name_of_a_schema(real: RealServer, fields: dict[str, Any]) -> None:
    assert list(json.loads(text_of(real, **fields))) == ["name", "kind"]


@pytest.mark.parametrize(("fields", "pattern"), [
    ({"response_format": {"type": "json_object"}}, r"\{.*\}"),
    ({"regex": BRACED}, BRACED), ({"guided_regex": "[ab]{3}"}, "[ab]{3}"),
    ({"guided_choice": ["left", "right"]}, "left|right"),
    ({"ebnf": 'root ::= "x" [0-9]'}, "x[0-9]"), ({"grammar": 'start: "y" /[0-9]/'}, "y[0-9]"),
    ({"guided_grammar": 'start: "z"'}, "z"),
    ({"structured_outputs": {"choice": ["one"]}}, "one"),
    ({"guided_json": {"enum": [[1, 2]]}, "guided_whitespace_pattern": " "}, r"\[ ?1 ?, ?2 ?\]"),
])  # fmt: skip
def test_every_other_form(real: RealServer, fields: dict[str, Any], pattern: str) -> None:
    assert re.fullmatch(pattern, text_of(real, **fields), re.DOTALL)


def test_the_other_dialects(real: RealServer) -> None:
    form = {"type": "json_schema", "name": "x", "schema": SCHEMA}
    answer = real.http.post("/v1/responses", json={
        "input": "x", "max_output_tokens": 80, "text": {"format": form}, "seed": 3})  # fmt: skip
    body = answer.json()
    assert json.loads(body["output"][0]["content"][0]["text"])
    assert body["text"]["format"] == form
    message = real.http.post("/v1/messages", json={
        "model": "", "messages": [{"role": "user", "content": "x"}], "max_tokens": 80,
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}})  # fmt: skip
    assert message.status_code == 200, message.text
    assert json.loads(message.json()["content"][0]["text"])
    assert re.fullmatch("[ab]{2}", real.complete(regex="[ab]{2}")["choices"][0]["text"])


def test_streams_say_the_same(real: RealServer) -> None:
    fields = {"structured_outputs": {"json": SCHEMA}, "seed": 9}
    body = {"prompt": [3, 4, 5], "max_tokens": 60, **fields}
    whole = real.complete(**body)["choices"][0]
    stream = real.http.post("/v1/completions", json={**body, "stream": True})
    chunks = [json.loads(data)["choices"][0] for data in events(stream)[:-1]]
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    assert chunks[-1]["finish_reason"] == whole["finish_reason"]


def test_ignored_keywords_are_named(real: RealServer) -> None:
    for strict in (False, None):
        inner = {"name": "x", "schema": IGNORED, "strict": strict}
        body = chat(real, response_format={"type": "json_schema", "json_schema": inner})
        assert body["choices"][0]["message"]["content"] in "123456789"
        assert '"not"' in body["warnings"][0]
    inner["strict"] = True
    error = refusal(real, response_format={"type": "json_schema", "json_schema": inner})
    assert error["param"] == "response_format"
    assert '"not"' in error["message"]


BAD: list[dict[str, Any]] = [
    {"regex": "(a+"}, {"regex": "[z-a]"}, {"regex": "*x"}, {"regex": "(?=a)b"}, {"regex": r"(a)\1"},
    {"regex": "(" * 50_000}, {"guided_json": {"type": "strng"}},
    {"guided_json": {"$ref": "#/$defs/nowhere"}},
    {"guided_json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
    {"guided_json": {"type": "integer", "minimum": 5, "maximum": 3}}, {"guided_json": {"enum": []}},
    {"guided_json": {"enum": ["x" * 5_000_000]}},
    {"ebnf": "root ::= " + "(" * 50_000}, {"grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000},
    {"grammar": "start: start"}, {"grammar": "start: nothing"},
    {"structured_outputs": {"regexp": "a"}}, {"structured_outputs": {}},
    {"response_format": {"type": "xml"}}, {"response_format": {"type": "json_schema"}},
    {"guided_choice": []}, {"regex": "a", "ebnf": 'root ::= "a"'},
]  # fmt: skip


def test_b68_what_is_wrong_is_a_400_and_touches_nobody(real: RealServer) -> None:
    with ThreadPoolExecutor(2) as clients:
        good = [
            clients.submit(real.complete, structured_outputs={"json": SCHEMA}, max_tokens=90),
            clients.submit(real.complete, max_tokens=90),
        ]
        for fields in BAD:
            error = refusal(real, **fields)
            assert error["param"].split(".")[0] in fields, error
            assert len(error["message"]) < 700
        answers = [one.result()["choices"][0] for one in good]
    assert json.loads(answers[0]["text"])


def test_b69_what_is_large_is_bounded(real: RealServer) -> None:
    chain = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(3000)) + 'r3000: "a"'
    assert text_of(real, grammar=chain) == "a"
    longer = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(10_000)) + 'r10000: "a"'
    assert "characters" in refusal(real, grammar=longer)["message"]
    assert re.fullmatch("a*", text_of(real, regex="((a{0,900}){0,900}){0,900}"))
    assert json.loads(text_of(real, guided_json={"type": "array", "maxItems": 10**18})) is not None
    chained = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(5000)}
    schema = {"$ref": "#/$defs/a0", "$defs": {**chained, "a5000": {"type": "null"}}}
    assert text_of(real, guided_json=schema) == "null"


def test_b72_blanks_end(real: RealServer) -> None:
    """A model that loves blanks: they are biased as far as they can be."""
    blanks = [
        token for token in range(real.loaded.tokenizer.vocab_size)
        if real.loaded.tokenizer.token_bytes(token).strip() == b""
        and not real.loaded.tokenizer.is_control(token)
    ]  # fmt: skip
    bias = {str(token): 100 for token in blanks}
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 3}
    text = text_of(real, guided_json=schema, logit_bias=bias, max_tokens=400)
    assert len(json.loads(text)) == 3
    assert len(text) < 300


def test_too_few_tokens_name_the_least(real: RealServer) -> None:
    error = refusal(real, structured_outputs={"json": SCHEMA}, max_tokens=4)
    assert error["param"] == "max_tokens"
    least = int(re.findall(r"has (\d+)", error["message"])[0])
    body = chat(real, structured_outputs={"json": SCHEMA}, max_tokens=least)
    assert json.loads(body["choices"][0]["message"]["content"])
    assert body["choices"][0]["finish_reason"] == "length"
    cut = chat(real, structured_outputs={"json": SCHEMA, "complete_at_limit": False}, max_tokens=4)
    assert cut["choices"][0]["finish_reason"] == "length"


def test_what_is_wrong_with_a_pattern_is_said(real: RealServer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?<=a)b"}}}
    error = refusal(real, structured_outputs={"json": schema})
    assert "look-around" in error["message"]
    assert "(?<=a)b" not in error["message"]


THINKS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    "{% if enable_thinking is not defined or enable_thinking %}<think>\n"
    "{% else %}<think></think>{% endif %}"
)


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    template = Path(tmp_path_factory.mktemp("template"), "t.jinja")
    template.write_text(THINKS)
    options: dict[str, Any] = {"chat_template": str(template), "max_num_seqs": 4}
    with real_server(EngineConfig(model=str(TINY), num_threads=2, **options)) as server:
        yield server


@pytest.mark.parametrize("fields", [
    {"structured_outputs": {"json": SCHEMA}}, {"regex": "[a-c]{4}"},
    {"response_format": {"type": "json_object"}},
])  # fmt: skip
def test_a_form_begins_behind_the_thoughts(thinker: RealServer, fields: dict[str, Any]) -> None:
    message = chat(thinker, **fields)["choices"][0]["message"]
    assert message["reasoning"]
    assert message["content"][0] in "{abc"
    assert message["content"][-1] in "}abc"
    off = chat(thinker, **fields, chat_template_kwargs={"enable_thinking": False})
    silent = off["choices"][0]["message"]
    assert silent["reasoning"] is None
    assert silent["content"][0] in "{abc"
    error = refusal(thinker, regex="a{30}", max_tokens=32)
    assert "to end its thoughts" in error["message"]


def thoughts_in(body: dict[str, Any]) -> int:
    tokens: int = body["usage"]["completion_tokens_details"]["reasoning_tokens"]
    return tokens


@pytest.mark.parametrize("field", [
    "thinking_token_budget", "reasoning_budget_tokens", "max_thinking_tokens", "thinking_budget",
])  # fmt: skip
def test_a_budget_of_thoughts(thinker: RealServer, field: str) -> None:
    free = chat(thinker, ignore_eos=True)
    assert free["choices"][0]["message"]["content"] is None
    assert thoughts_in(free) >= 78  # blanks before the first word are none
    for budget in (0, 1, 7):
        bounded = chat(thinker, ignore_eos=True, **{field: budget})
        message = bounded["choices"][0]["message"]
        assert message["content"]
        assert budget - 2 <= thoughts_in(bounded) <= budget + len("</think>")
        free_text = free["choices"][0]["message"]["reasoning"]
        assert free_text.startswith(message["reasoning"] or "")
    assert chat(thinker, ignore_eos=True, **{field: -1})["choices"] == free["choices"]
    assert refusal(thinker, **{field: -2})["param"] == field
    other = "thinking_budget" if field != "thinking_budget" else "max_thinking_tokens"
    assert "different" in refusal(thinker, **{field: 3, other: 4})["message"]
    both = chat(thinker, **{field: 5}, regex="[a-c]{4}")["choices"][0]
    assert re.fullmatch("[a-c]{4}", both["message"]["content"])
    assert both["finish_reason"] == "stop"


def test_a_budget_in_the_other_dialects(thinker: RealServer) -> None:
    def ask(route: str, **fields: Any) -> Any:
        # Chance might end an answer at its first token.
        return thinker.http.post(f"/v1/{route}", json={"temperature": 0, **fields})

    messages = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 60, "model": ""}
    answer = ask("messages", **messages, thinking={"type": "enabled", "budget_tokens": 6})
    kinds = [part["type"] for part in answer.json()["content"]]
    assert kinds == ["thinking", "text"], answer.text
    wrong = ask("messages", **messages, thinking={"type": "enabled", "budget_tokens": -3})
    assert (wrong.status_code, "thinking.budget_tokens" in wrong.text) == (400, True)
    response = {"input": "x", "max_output_tokens": 60}
    thought = ask("responses", **response, thinking_token_budget=6).json()
    assert [item["type"] for item in thought["output"]] == ["reasoning", "message"]
    silent = ask("responses", **response, reasoning={"effort": "none"}).json()
    assert [item["type"] for item in silent["output"]] == ["message"]
    prompt = {"prompt": "user: x\nassistant:<think>\n", "max_tokens": 40, "ignore_eos": True}
    plain = ask("completions", **prompt).json()["choices"][0]["text"]
    assert "</think>" not in plain
    text = ask("completions", **prompt, thinking_token_budget=4)
    assert "</think>" in text.json()["choices"][0]["text"]


def test_the_budget_of_a_server(tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text(THINKS)
    config = EngineConfig(model=str(TINY), num_threads=2, chat_template=str(template))
    with real_server(config, thinking_budget=3) as server:
        assert chat(server)["choices"][0]["message"]["content"]
        own = chat(server, thinking_token_budget=-1)["choices"][0]["message"]
        assert own["content"] is None


def test_markers_in_a_form_are_its_own(thinker: RealServer) -> None:
    """What a string of JSON says is no thought and no call."""
    said = '{"a": "<think>b</think><tool_call>"}'
    choice = {"choice": [said]}
    for fields in ({}, {"chat_template_kwargs": {"enable_thinking": False}}):
        message = chat(thinker, structured_outputs=choice, max_tokens=120, **fields)
        assert message["choices"][0]["message"]["content"] == said


def test_a_form_is_normalised_once(real: RealServer, monkeypatch: pytest.MonkeyPatch) -> None:
    count, honest = [0], StructuredOutputs.normalised

    def counted(form: StructuredOutputs, **options: bool) -> str:
        count[0] += 1
        return honest(form, **options)

    monkeypatch.setattr(StructuredOutputs, "normalised", counted)
    assert text_of(real, structured_outputs={"choice": ["once"]}) == "once"
    assert count == [1]


DEAD_END = 'start: /[a-z]/ x | "9"\nx: x'


@pytest.mark.parametrize(("fields", "reason"), [
    ({"structured_outputs": {"grammar": DEAD_END}, "seed": 3}, "no text fits it"),
    ({"regex": "[0-9]+", "allowed_token_ids": [3]}, "no token is allowed"),
    ({"guided_json": {"$ref": "#"}}, "no finite value fits"),
    ({"guided_json": {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}},
     "no finite value fits"),
])  # fmt: skip
def test_what_allows_nothing_is_a_400(
    real: RealServer, fields: dict[str, Any], reason: str
) -> None:
    """Also where it shows only when the answer gets there."""
    error = refusal(real, **fields)
    assert reason in error["message"]
    assert error["type"] == "invalid_request_error"
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True, **fields}
    answer = real.http.post("/v1/chat/completions", json=body)
    assert reason in answer.text
    real.settle()
