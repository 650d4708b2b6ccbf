"""Bodies that are no JSON, fields that are unknown or not built, models that are not there."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from invar.api.errors import ApiError

from .scripted import EOS, RunningServer, events, failing, running, says, token
from .test_limits import JSON, error_of


def post(server: RunningServer, body: str | bytes) -> httpx.Response:
    return server.http.post("/v1/completions", content=body, headers=JSON)


@pytest.mark.parametrize(("body", "line", "column"), [
    ('{"prompt": "a",\n "n": }', 2, 7),
    ('{"prompt": "\\{"}', 1, 15),
    ('{"prompt": "a"\n  "n": 1}', 2, 3),
    ('{"é": NaN}', 1, 7),
    ('{"prompt": "a"', 1, 15),
    ("", 1, 1),
])  # fmt: skip
def test_malformed_json_has_a_place(
    hello: RunningServer, body: str, line: int, column: int
) -> None:
    message = error_of(post(hello, body))["message"]
    assert f"line {line}, column {column}" in message


@pytest.mark.parametrize("body", ["[]", "5", '"x"', "null"])
def test_the_body_is_an_object(hello: RunningServer, body: str) -> None:
    assert "object" in error_of(post(hello, body))["message"]


def test_deep_nesting(hello: RunningServer) -> None:
    error_of(post(hello, '{"prompt": ' + "[" * 50_000))
    assert hello.complete().status_code == 200


@pytest.mark.parametrize("body", [
    '{"prompt": "a", "n": %s}', '{"prompt": "a", "x": -%s}', '{"prompt": [%s]}',
    '{"prompt": "a", "x": {"y": [%s]}}', "%s", '{"prompt": "a", "seed": %s, }',
    '{"prompt": "a", "logit_bias": {"%s": 1}}', '{"prompt": "a", "temperature": %s}',
])  # fmt: skip
def test_integers_of_many_digits(hello: RunningServer, body: str) -> None:
    for digits in (4301, 100_000):
        error_of(post(hello, body % ("7" * digits)))


@pytest.mark.parametrize("body", [
    b'{"prompt": "\xff\xfe"}', '{"prompt": "é"}'.encode("latin-1"), "{}".encode("utf-16"),
    b'{"\xff": 1}', b'{"prompt": "a", "user": "\xc3"}',
])  # fmt: skip
def test_b40_undecodable_bodies(hello: RunningServer, body: bytes) -> None:
    error_of(post(hello, body))
    assert hello.complete().status_code == 200


@pytest.mark.parametrize("body", [
    '{"prompt": "\\ud800"}', '{"prompt": "a", "model": "\\ud800"}',
    '{"prompt": "a", "stop": ["\\udfff"]}', '{"prompt": "a", "\\ud800": 1}',
])  # fmt: skip
def test_b40_lone_surrogates(hello: RunningServer, body: str) -> None:
    answer = post(hello, body)
    assert answer.status_code in (400, 404)
    answer.content.decode("utf-8")
    assert hello.complete().status_code == 200


def test_b40_a_model_that_emits_lone_bytes() -> None:
    with running(says(b"\x80", "Hello", b"\xf0", b"\x9f", "!", b"\xff")) as server:
        answer = server.chat(logprobs=True, top_logprobs=3)
        text = json.loads(answer.content.decode("utf-8"))["choices"][0]["message"]["content"]
        assert text == "\ufffdHello\ufffd!\ufffd"
        streamed = "".join(
            json.loads(item)["choices"][0]["delta"].get("content", "")
            for item in events(server.chat(stream=True, logprobs=True))[:-1]
        )
        assert streamed == text


@pytest.mark.parametrize(("field", "value"), [
    ("temperature", "hot"), ("n", 1.5), ("stream", "yes"), ("stop", 5), ("stop", ["a", 5]),
    ("logit_bias", [1]), ("stream_options", {"include_usage": "yes"}), ("seed", "x"),
])  # fmt: skip
def test_wrong_types_name_the_path(hello: RunningServer, field: str, value: Any) -> None:
    assert error_of(hello.complete(**{field: value}))["param"].startswith(field)


@pytest.mark.parametrize(("messages", "param"), [
    ([{"content": "x"}], "messages[0]"),
    ([{"role": "user", "content": 5}], "messages[0].content"),
    ([{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0]"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
     "messages[0].content[0].type"),
    ("Hi", "messages"),
    ({}, "messages"),
])  # fmt: skip
def test_messages_that_are_malformed(hello: RunningServer, messages: Any, param: str) -> None:
    assert error_of(hello.chat(messages=messages))["param"] == param


def test_missing_fields_are_named(hello: RunningServer) -> None:
    assert "messages" in error_of(hello.http.post("/v1/chat/completions", json={}))["message"]
    assert "prompt" in error_of(hello.http.post("/v1/completions", json={}))["message"]


NULLABLE = [
    "model", "n", "stream", "stream_options", "max_tokens", "max_completion_tokens", "temperature",
    "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "seed", "stop", "stop_token_ids", "logprobs", "top_logprobs", "ignore_eos",
    "min_tokens", "tools", "tool_choice", "response_format", "user", "metadata", "store",
    "service_tier", "chat_template_kwargs", "add_generation_prompt", "continue_final_message",
    "reasoning_effort", "prompt_logprobs", "skip_special_tokens", "functions", "best_of",
]  # fmt: skip


def test_null_is_the_default_for_every_optional_field(hello: RunningServer) -> None:
    for name in NULLABLE:
        assert hello.chat(**{name: None}).status_code == 200, name
    assert hello.chat(**dict.fromkeys(NULLABLE)).status_code == 200


def test_fields_without_effect_are_accepted(hello: RunningServer) -> None:
    answer = hello.chat(
        user="me", metadata={"a": "b"}, store=False, service_tier="auto", tools=[],
        parallel_tool_calls=True, safety_identifier="x", prompt_cache_key="k",
        tool_choice="none", response_format={"type": "text"}, best_of=1, reasoning_effort="low",
        use_beam_search=False, length_penalty=1.0, verbosity="medium", truncation_side="left",
        chat_template_content_format="auto", stream_interval=1, include_reasoning=True,
        add_special_tokens=False, spaces_between_special_tokens=True,
    )  # fmt: skip
    assert answer.status_code == 200


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.mark.parametrize("fields", [
    {"tool_choice": "required"},
    {"use_beam_search": True}, {"best_of": 4},
    {"mirostat": 2}, {"chat_template": "{{ x }}"}, {"truncate_prompt_tokens": 5}, {"echo": True},
    {"chat_template_kwargs": {"messages": []}}, {"chat_template_kwargs": {"chat_template": "x"}},
    {"store": True}, {"verbosity": "low"}, {"add_bos": True}, {"truncation_side": "right"},
    {"chat_template_content_format": "openai"}, {"stream_interval": 8},
    {"add_special_tokens": True},
    {"stream": True, "stream_options": {"include_obfuscation": True}},
])  # fmt: skip
def test_known_fields_that_cannot_be_honoured(hello: RunningServer, fields: dict[str, Any]) -> None:
    error = error_of(hello.chat(**fields))
    assert error["param"].split(".")[0] in fields


@pytest.mark.parametrize(("body", "param"), [
    ({"messages": [{"role": "user", "content": "x"}], "add_special_tokens": True},
     "add_special_tokens"),
    ({"prompt": "x", "chat_template_kwargs": {}}, "chat_template_kwargs"),
    ({"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
    ({"prompt": "x", "content": "y"}, "prompt"),
])  # fmt: skip
def test_tokenize_honours_or_refuses(
    hello: RunningServer, body: dict[str, Any], param: str
) -> None:
    assert error_of(hello.http.post("/tokenize", json=body))["param"] == param


@pytest.mark.parametrize("spaces", [True, False])
def test_no_spaces_stand_between_special_tokens(spaces: bool) -> None:
    with running(says("<|hidden|>", "<|hidden|>", "Hello")) as server:
        answer = server.complete(
            skip_special_tokens=False, spaces_between_special_tokens=spaces, max_tokens=3
        )
        assert answer.json()["choices"][0]["text"] == "<|hidden|><|hidden|>Hello"


@pytest.mark.parametrize("name", ["self", "tokenizer_", "cls", "variables", "class"])
def test_template_variables_may_have_any_name(hello: RunningServer, name: str) -> None:
    assert hello.chat(chat_template_kwargs={name: 1}).status_code == 200


@pytest.mark.parametrize("fields", [
    {"allowed_token_ids": [token(EOS)], "min_tokens": 2},
    {"allowed_token_ids": [token("!"), token(EOS)], "stop_token_ids": [token("!")],
     "min_tokens": 1},
])  # fmt: skip
def test_what_would_leave_nothing_to_draw(hello: RunningServer, fields: dict[str, Any]) -> None:
    assert error_of(hello.complete(**fields))["param"] == "min_tokens"


def test_tools_that_may_not_be_called_ask_for_nothing(hello: RunningServer) -> None:
    assert hello.chat(tools=[TOOL], tool_choice="none").status_code == 200


def test_unknown_fields_are_counted_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with running(says("Hello")) as server:
        for _ in range(3):
            assert server.chat(frobnicate=1).status_code == 200
        for i in range(300):
            assert server.complete(**{f"x{i}": 1}).status_code == 200
        metrics = server.http.get("/metrics").text
    assert 'invar:unknown_request_fields_total{field="frobnicate"} 3.0' in metrics
    assert 'field="other"' in metrics
    assert sum("frobnicate" in record.message for record in caplog.records) == 1


def test_fields_without_effect_are_counted_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO", "invar"), running(says("Hello")) as server:
        for _ in range(3):
            idle = server.chat(safety_identifier="me", metadata=None, tools=[])
            assert idle.status_code == 200
            # Our template does not read it.
            assert server.chat(chat_template_kwargs={"enable_thinking": 1}).status_code == 200
        metrics = server.http.get("/metrics").text
    assert 'invar:unknown_request_fields_total{field="safety_identifier"} 3.0' in metrics
    kwarg = "chat_template_kwargs.enable_thinking"
    assert f'invar:unknown_request_fields_total{{field="{kwarg}"}} 3.0' in metrics
    said = [record.getMessage() for record in caplog.records if "no effect" in record.getMessage()]
    assert len(said) == 2
    assert not [line for line in said if "metadata" in line or "tools" in line]


def test_strict_fields_refuse_unknown_ones() -> None:
    with running(says("Hello"), strict_fields=True) as server:
        assert error_of(server.chat(frobnicate=1))["param"] == "frobnicate"
        options = {"include_usage": True, "frobnicate": 1}
        error = error_of(server.chat(stream=True, stream_options=options))
        assert error["param"] == "stream_options.frobnicate"
        del options["frobnicate"]
        assert server.chat(stream=True, stream_options=options).status_code == 200
        assert server.chat(user="me", temperature=1).status_code == 200


def test_unknown_models(hello: RunningServer) -> None:
    for answer in (
        hello.chat(model="gpt-9"),
        hello.complete(model="gpt-9"),
        hello.http.get("/v1/models/gpt-9"),
        hello.http.post("/tokenize", json={"model": "gpt-9", "prompt": "x"}),
    ):
        error = error_of(answer, 404)
        assert error["code"] == "model_not_found"
        assert error["param"] == "model"
    assert hello.chat(model="org/scripted").status_code == 200


def test_b11_the_template_refuses_with_its_own_words(hello: RunningServer) -> None:
    error = error_of(hello.chat(messages=[{"role": "forbidden", "content": "x"}]))
    assert "Roles must alternate" in error["message"]
    assert error["type"] == "invalid_request_error"


def test_b12_a_model_without_template_completes_but_does_not_chat() -> None:
    with running(says("Hello"), with_template=False) as server:
        assert "--chat-template" in error_of(server.chat())["message"]
        assert server.complete().status_code == 200


def test_unknown_paths_and_methods(hello: RunningServer) -> None:
    error_of(hello.http.get("/v1/nothing"), 404)
    error_of(hello.http.get("/v1/chat/completions"), 405)


def test_an_engine_error_before_the_first_token_is_a_status() -> None:
    with running(failing(0)) as server:
        for stream in (False, True):
            answer = server.chat(stream=stream)
            error = error_of(answer, 500)
            assert "not finite" in error["message"]
            assert answer.headers["x-should-retry"] == "false"
        assert server.idle()


def test_an_engine_error_in_a_stream_is_an_event_without_done() -> None:
    with running(failing(3)) as server:
        data = events(server.chat(stream=True))
        assert "error" in json.loads(data[-1])
        assert "[DONE]" not in data
        choices = [json.loads(item)["choices"][0] for item in data[:-1]]
        assert "".join(c["delta"].get("content", "") for c in choices) == "Hello" * 3
        assert all(choice["finish_reason"] is None for choice in choices)
        error_of(server.chat(), 500)
        error_of(server.chat(n=3), 500)
        assert server.idle()


@pytest.mark.parametrize(("status", "kind"), [
    (400, "invalid_request_error"), (401, "authentication_error"), (403, "permission_error"),
    (404, "not_found_error"), (413, "request_too_large"), (422, "invalid_request_error"),
    (429, "rate_limit_error"), (500, "api_error"), (503, "overloaded_error"),
    (504, "timeout_error"),
])  # fmt: skip
def test_errors_have_the_shape_of_the_dialect(status: int, kind: str) -> None:
    error = ApiError(status, "No.", type="t", param="p", code="c")
    assert json.loads(error.body("/v1/chat/completions", "r")) == {
        "error": {"message": "No.", "type": "t", "param": "p", "code": "c"}
    }
    shaped = {"type": "error", "error": {"type": kind, "message": "No."}, "request_id": "r"}
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        assert json.loads(error.body(path, "r")) == shaped
    event = error.event("/v1/messages", "r").decode()
    assert event.startswith("event: error\ndata: {")
    assert event.endswith("}\n\n")
    assert error.event("/v1/completions", "r") == b"data: " + error.body() + b"\n\n"
