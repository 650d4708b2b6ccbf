"""Anthropic's dialect: /v1/messages and /v1/messages/count_tokens, with the official client."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from invar.api.keys import ApiKey, KeyRing, KeySettings, key_ring

from .scripted import RunningServer, endless, failing, running, says, token, typed_events

HI: Any = [{"role": "user", "content": "Hi"}]


def send(server: RunningServer, **fields: Any) -> httpx.Response:
    body = {"model": "scripted", "max_tokens": 20, "messages": HI} | fields
    return server.http.post("/v1/messages", json=body)


def count(server: RunningServer, **fields: Any) -> int:
    body = {"model": "scripted", "messages": HI} | fields
    answer = server.http.post("/v1/messages/count_tokens", json=body)
    assert answer.status_code == 200, answer.text
    tokens: int = answer.json()["input_tokens"]
    return tokens


def error_of(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert body.keys() == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert body["request_id"] == answer.headers["x-request-id"]
    error: dict[str, Any] = body["error"]
    assert error.keys() == {"type", "message"}
    return error


@pytest.fixture(scope="module")
def client(hello: RunningServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=hello.url, api_key="none", max_retries=0) as client:
        yield client


def test_official_client(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(model="scripted", max_tokens=20, messages=HI)
    assert answer.content[0].text == "Hello world!"
    assert answer.stop_reason == "end_turn"
    assert answer.id.startswith("msg-")
    # The cached part of a prompt is told apart: the scripted engine finds one token.
    assert answer.usage.cache_read_input_tokens == 1
    assert answer.usage.output_tokens == 4
    assert answer._request_id
    counted = client.messages.count_tokens(model="scripted", messages=HI)
    assert counted.input_tokens == answer.usage.input_tokens + 1
    with client.messages.stream(model="scripted", max_tokens=20, messages=HI) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == "Hello world!"
    assert final.usage.output_tokens == 4
    assert final.stop_reason == "end_turn"
    raw = client.messages.with_raw_response.create(model="scripted", max_tokens=2, messages=HI)
    assert raw.parse().stop_reason == "max_tokens"


def test_official_async_client(hello: RunningServer) -> None:
    async def ask() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=hello.url, api_key="none") as client:
            calls = [
                client.messages.create(model="scripted", max_tokens=20, messages=HI)
                for _ in range(4)
            ]
            texts = [answer.content[0].text for answer in await asyncio.gather(*calls)]
            async with client.messages.stream(
                model="scripted", max_tokens=20, messages=HI
            ) as stream:
                return [*texts, await stream.get_final_text()]

    assert asyncio.run(ask()) == ["Hello world!"] * 5


def test_order_of_events(hello: RunningServer) -> None:
    frames = typed_events(send(hello, stream=True))
    kinds = [frame["type"] for frame in frames]
    assert kinds[:3] == ["message_start", "content_block_start", "ping"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[3:-3]) == {"content_block_delta"}
    start = frames[0]["message"]
    # What Claude Code reads before anything else has come.
    assert (start["type"], start["role"], start["content"]) == ("message", "assistant", [])
    assert start["usage"]["input_tokens"] > 0
    assert start["stop_reason"] is None
    assert frames[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    plain = send(hello).json()
    text = "".join(frame["delta"]["text"] for frame in frames[3:-3])
    assert text == plain["content"][0]["text"]
    assert frames[-2]["usage"] == plain["usage"]


def test_an_empty_answer_has_an_empty_block() -> None:
    with running(says()) as server:
        assert send(server).json()["content"][0]["text"] == ""
        kinds = [frame["type"] for frame in typed_events(send(server, stream=True))]
    assert kinds == [
        "message_start", "content_block_start", "ping", "content_block_stop", "message_delta",
        "message_stop",
    ]  # fmt: skip


def test_why_an_answer_ended(hello: RunningServer) -> None:
    stopped = send(hello, stop_sequences=["zz", "wor"]).json()
    assert stopped["content"][0]["text"] == "Hello "
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "wor")
    assert send(hello, max_tokens=2).json()["stop_reason"] == "max_tokens"
    frames = typed_events(send(hello, stop_sequences=["!"], stream=True))
    assert frames[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "!"}


def test_b33_a_limit_beyond_the_window_ends_at_the_window_and_says_so() -> None:
    """Claude Code asks for 32,000 tokens of any model."""
    with running(endless(pause_s=0)) as server:
        body = send(server, max_tokens=32000).json()
        assert body["stop_reason"] == "model_context_window_exceeded"
        assert body["usage"]["output_tokens"] == 256 - count(server)
        long = [{"role": "user", "content": "x" * 300}]
        error = send(server, messages=long)
        assert error.status_code == 400
        tokens = count(server, messages=long)
        assert f"prompt is too long: {tokens} tokens > 255 maximum" in error.text
        assert "maximum context length is 256 tokens" in error.text


def tool(name: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
    return {"name": name, "description": "x", "input_schema": schema}


CLAUDE_CODE: dict[str, Any] = {
    "model": "org/scripted",
    "max_tokens": 32000,
    "stream": True,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=00000;"},
        {"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "world", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ],
    "messages": [
        {"role": "user", "content": [
            {"type": "text", "text": "one"},
            {"type": "text", "text": "two", "cache_control": {"type": "ephemeral"}},
        ]},
    ],
    "tools": [tool("Bash"), tool("Read") | {"cache_control": {"type": "ephemeral"}}],
    "metadata": {"user_id": "user_0_account__session_1"},
    "thinking": {"type": "enabled", "budget_tokens": 31999},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "temperature": 1,
}  # fmt: skip
HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
    "x-app": "cli",
    "authorization": "Bearer none",
}


def test_claude_codes_first_requests() -> None:
    with running(says("Hello", " world", "!"), max_model_len=4096) as server:
        first_requests(server)


def first_requests(hello: RunningServer) -> None:
    probe = {"model": "scripted", "max_tokens": 1, "metadata": {"user_id": "me"},
             "messages": [{"role": "user", "content": "quota"}]}  # fmt: skip
    for body in (probe, CLAUDE_CODE):
        answer = hello.http.post("/v1/messages?beta=true", json=body, headers=HEADERS)
        assert answer.status_code == 200, answer.text
    assert typed_events(answer)[-1] == {"type": "message_stop"}
    names = ("model", "messages", "system", "tools", "thinking")
    body = {name: CLAUDE_CODE[name] for name in names}
    answer = hello.http.post("/v1/messages/count_tokens?beta=true", json=body, headers=HEADERS)
    assert answer.json()["input_tokens"] == len(hello.engine.seen[-1].prompt_token_ids)


def test_a_line_that_is_new_in_every_request_is_no_part_of_the_prompt(hello: RunningServer) -> None:
    line = {"type": "text", "text": "x-anthropic-billing-header: cch=1234;"}
    system = [{"type": "text", "text": "Hello"}]
    assert count(hello, system=[line, *system]) == count(hello, system="Hello")


def chat_tokens(server: RunningServer, messages: list[dict[str, Any]], **fields: Any) -> int:
    answer = server.http.post("/tokenize", json={"messages": messages} | fields)
    tokens: int = answer.json()["count"]
    return tokens


def test_a_conversation_is_that_of_chat(hello: RunningServer) -> None:
    """Blocks of tools and thinking become the messages that templates know."""
    blocks = [
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "one two", "signature": "s"},
            {"type": "redacted_thinking", "data": "zz"},
            {"type": "text", "text": "END"},
            {"type": "tool_use", "id": "t1", "name": "tool", "input": {"path": "a"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "is_error": False,
             "content": [{"type": "text", "text": "three"}]},
            {"type": "text", "text": "Q9"},
        ]},
    ]  # fmt: skip
    call = {
        "id": "t1",
        "type": "function",
        "function": {"name": "tool", "arguments": '{"path": "a"}'},
    }
    messages = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "END", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "three"},
        {"role": "user", "content": "Q9"},
    ]
    assert count(hello, messages=blocks) == chat_tokens(hello, messages)
    system = [{"role": "system", "content": "Hello"}]
    assert count(hello, messages=HI, system="Hello") == chat_tokens(hello, system + HI)


def test_an_answer_goes_on_where_the_assistant_ends(hello: RunningServer) -> None:
    messages = [*HI, {"role": "assistant", "content": "Hello"}]
    expected = chat_tokens(hello, messages, continue_final_message=True)
    assert count(hello, messages=messages) == expected
    send(hello, messages=messages)
    assert hello.engine.seen[-1].prompt_token_ids[-1] == token("Hello")


def test_parameters_reach_the_engine(hello: RunningServer) -> None:
    send(hello, seed=5, temperature=0.5, top_p=0.25, top_k=7, metadata={"user_id": "me"})
    request = hello.engine.seen[-1]
    sampling = request.sampling
    given = (sampling.seed, sampling.temperature, sampling.top_p, sampling.top_k, request.tenant)
    assert given == (5, 0.5, 0.25, 7, "me")


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "eA=="}}


@pytest.mark.parametrize("fields", [
    {"tool_choice": {"type": "any"}, "tools": [tool("f")]},
    {"tool_choice": {"type": "tool", "name": "f"}, "tools": [tool("f")]},
    {"output_format": {"type": "json_schema", "schema": {}}},
    {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
    {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
    {"mcp_servers": [{"type": "url"}]}, {"container": "c"},
    {"messages": [{"role": "user", "content": [IMAGE]}]},
    {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
    {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
    {"messages": [{"role": "tool", "content": "x"}]}, {"messages": []},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 20_000}]},
    {"system": [IMAGE]}, {"max_tokens": 0}, {"max_tokens": None}, {"temperature": 3},
    {"stop_sequences": [""]}, {"stop_sequences": ["a"] * 100}, {"thinking": {"type": "maybe"}},
])  # fmt: skip
def test_what_cannot_be_honoured(hello: RunningServer, fields: dict[str, Any]) -> None:
    before = len(hello.engine.seen)
    assert error_of(send(hello, **fields))["type"] == "invalid_request_error"
    assert len(hello.engine.seen) == before


def test_fields_that_ask_for_nothing(hello: RunningServer) -> None:
    for fields in (
        {"tools": []}, {"tools": [tool("f")], "tool_choice": {"type": "none"}},
        {"thinking": {"type": "adaptive"}},
        {"service_tier": "auto", "cache_control": {"type": "ephemeral"}, "unknown": 1},
        {"metadata": {}, "stop_sequences": [], "mcp_servers": [], "system": []}, {"system": ""},
        dict.fromkeys(("system", "tools", "tool_choice", "thinking", "metadata", "stream", "top_k",
                       "stop_sequences", "temperature", "top_p", "container"))
    ):  # fmt: skip
        assert send(hello, **fields).status_code == 200, fields


def test_errors_name_the_fields_of_the_dialect(hello: RunningServer) -> None:
    assert error_of(send(hello, stop_sequences=[""]))["message"].startswith("stop_sequences[0]")
    missing = hello.http.post("/v1/messages", json={"model": "scripted", "messages": HI})
    assert "max_tokens" in error_of(missing)["message"]
    malformed = hello.http.post("/v1/messages", content=b'{"model": \n "x",}')
    assert "line 2, column" in error_of(malformed)["message"]


def test_types_of_errors(hello: RunningServer) -> None:
    assert error_of(send(hello, model="claude-x"), 404)["type"] == "not_found_error"
    assert error_of(hello.http.get("/v1/messages"), 405)["type"] == "invalid_request_error"
    assert error_of(hello.http.post("/v1/messages/x"), 404)["type"] == "not_found_error"
    large = hello.http.post("/v1/messages", content=b" " * (33 << 20))
    assert error_of(large, 413)["type"] == "request_too_large"
    with running(says("Hello"), keys=key_ring(["secret"], None)) as server:
        assert error_of(send(server), 401)["type"] == "authentication_error"
        server.http.headers["x-api-key"] = "secret"
        assert send(server).status_code == 200
        with anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0) as client:
            with pytest.raises(anthropic.AuthenticationError):
                client.messages.create(model="scripted", max_tokens=2, messages=HI)
            with pytest.raises(anthropic.NotFoundError):
                client.with_options(api_key="secret").messages.create(
                    model="claude-x", max_tokens=2, messages=HI
                )


def test_a_failure_is_a_status_before_the_first_token_and_an_event_after_it() -> None:
    with running(failing(0)) as server:
        assert error_of(send(server, stream=True), 500)["type"] == "api_error"
    with running(failing(2)) as server:
        frames = typed_events(send(server, stream=True))
        assert frames[-1]["type"] == "error"
        assert frames[-1]["error"]["type"] == "api_error"
        assert "message_stop" not in {frame["type"] for frame in frames}
        with (
            anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as client,
            pytest.raises(anthropic.APIError),
            client.messages.stream(model="scripted", max_tokens=9, messages=HI) as stream,
        ):
            stream.get_final_message()


def test_an_engine_that_has_ended_is_overloaded() -> None:
    with running(says("Hello")) as server:
        server.server.engine.fatal = "it was killed"
        answer = send(server)
        assert error_of(answer, 503)["type"] == "overloaded_error"
        assert answer.headers["retry-after"]


def test_limits_of_a_key() -> None:
    settings = KeySettings(requests_per_minute=1, models=["scripted"])
    ring = KeyRing([ApiKey("one", hashlib.sha256(b"secret").digest(), settings)])
    with (
        running(says("Hello"), keys=ring) as server,
        anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0) as client,
    ):
        call: Any = {"max_tokens": 5, "messages": HI}
        client.messages.create(model="scripted", **call)
        with pytest.raises(anthropic.RateLimitError) as limited:
            client.messages.create(model="scripted", **call)
        assert limited.value.body["error"]["type"] == "rate_limit_error"
        assert int(limited.value.response.headers["retry-after"]) > 0
    settings = KeySettings(models=["scripted"])
    ring = KeyRing([ApiKey("one", hashlib.sha256(b"secret").digest(), settings)])
    with running(says("Hello"), keys=ring) as server:
        server.http.headers["x-api-key"] = "secret"
        denied = send(server, model="org/scripted")
        assert error_of(denied, 403)["type"] == "permission_error"
