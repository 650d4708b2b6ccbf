"""OpenAI's newer dialect: /v1/responses, with the official client."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from .scripted import RunningServer, endless, failing, running, says, typed_events


def send(server: RunningServer, **fields: Any) -> httpx.Response:
    return server.http.post("/v1/responses", json={"model": "scripted", "input": "Hi"} | fields)


def count(server: RunningServer, **fields: Any) -> int:
    body = {"model": "scripted", "input": "Hi"} | fields
    answer = server.http.post("/v1/responses/input_tokens", json=body)
    assert answer.status_code == 200, answer.text
    tokens: int = answer.json()["input_tokens"]
    return tokens


def streamed(answer: httpx.Response) -> list[dict[str, Any]]:
    """Every event: numbered, and of a shape that the client's types know."""
    frames = typed_events(answer)
    for frame in frames:
        TypeAdapter(ResponseStreamEvent).validate_python(frame)
    assert [frame["sequence_number"] for frame in frames] == list(range(len(frames)))
    return frames


def text_of(response: dict[str, Any]) -> str:
    Response.model_validate(response, strict=True)
    (item,) = response["output"]
    (part,) = item["content"]
    text: str = part["text"]
    return text


def error_of(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


def test_official_client(hello: RunningServer) -> None:
    answer = hello.client.responses.create(model="scripted", input="Hi")
    assert answer.output_text == "Hello world!"
    assert answer.status == "completed"
    assert answer.usage is not None
    assert answer.usage.output_tokens == 4
    assert answer.usage.input_tokens_details.cached_tokens == 1
    assert answer.id.startswith("resp-")
    assert answer._request_id
    with hello.client.responses.stream(model="scripted", input="Hi") as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == "Hello world!"
    raw = hello.client.responses.with_raw_response.create(model="scripted", input="Hi")
    assert raw.parse().output_text == "Hello world!"
    counted = hello.client.responses.input_tokens.count(model="scripted", input="Hi")
    assert counted.input_tokens == answer.usage.input_tokens


def test_official_async_client(hello: RunningServer) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{hello.url}/v1", api_key="x") as client:
            calls = [client.responses.create(model="scripted", input="Hi") for _ in range(4)]
            texts = [answer.output_text for answer in await asyncio.gather(*calls)]
            async with client.responses.stream(model="scripted", input="Hi") as stream:
                return [*texts, (await stream.get_final_response()).output_text]

    assert asyncio.run(ask()) == ["Hello world!"] * 5


def test_order_of_events(hello: RunningServer) -> None:
    frames = streamed(send(hello, stream=True))
    kinds = [frame["type"].removeprefix("response.") for frame in frames]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert kinds[-4:] == [
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert frames[0]["response"]["status"] == "in_progress"
    text = "".join(frame["delta"] for frame in frames[4:-4])
    final = frames[-1]["response"]
    assert text == frames[-4]["text"] == text_of(final) == "Hello world!"
    plain = send(hello).json()
    own = ("id", "created_at", "completed_at", "output")
    assert {k: v for k, v in final.items() if k not in own} == {
        k: v for k, v in plain.items() if k not in own
    }
    assert final["id"] == frames[0]["response"]["id"]


def test_an_answer_that_was_cut_is_incomplete(hello: RunningServer) -> None:
    body = send(hello, max_output_tokens=2).json()
    assert (body["status"], text_of(body)) == ("incomplete", "Hello world")
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    last = streamed(send(hello, max_output_tokens=2, stream=True))[-1]
    assert last["type"] == "response.incomplete"
    assert text_of(last["response"]) == "Hello world"


def test_logprobs(hello: RunningServer) -> None:
    plain = send(hello, include=["message.output_text.logprobs"], top_logprobs=2).json()
    logprobs = plain["output"][0]["content"][0]["logprobs"]
    assert "".join(entry["token"] for entry in logprobs[:3]) == "Hello world!"
    assert {len(entry["top_logprobs"]) for entry in logprobs} == {2}
    frames = streamed(
        send(hello, include=["message.output_text.logprobs"], top_logprobs=2, stream=True)
    )
    deltas = [frame for frame in frames if frame["type"] == "response.output_text.delta"]
    assert [entry for frame in deltas for entry in frame["logprobs"]] == logprobs
    assert send(hello).json()["output"][0]["content"][0]["logprobs"] == []


FUNCTION = {"type": "function", "name": "shell", "description": "x", "strict": False,
            "parameters": {"type": "object", "properties": {}}}  # fmt: skip
CODEX: dict[str, Any] = {
    "model": "scripted",
    "instructions": "Hello",
    "input": [
        {"type": "message", "role": "developer",
         "content": [{"type": "input_text", "text": "one"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "two"}]},
    ],
    "tools": [FUNCTION, {"type": "web_search", "external_web_access": False},
              {"type": "custom", "name": "apply_patch", "description": "x",
               "format": {"type": "grammar", "syntax": "lark", "definition": "start: \"a\""}}],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199",
    "client_metadata": {"x-codex-installation-id": "1"},
    "text": {"verbosity": "medium"},
    "service_tier": "priority",
}  # fmt: skip


def test_all_that_codex_sends() -> None:
    with running(says("Hello", " world", "!"), max_model_len=4096) as server:
        turns_of_codex(server)


def turns_of_codex(hello: RunningServer) -> None:
    frames = streamed(hello.http.post("/v1/responses", json=CODEX))
    assert frames[-1]["type"] == "response.completed"
    assert frames[-1]["response"]["store"] is False
    # Its next turn: the whole history, with what a model that calls tools would have left there.
    history = [
        *CODEX["input"],
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "zz",
         "content": [{"type": "reasoning_text", "text": "x"}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "END", "annotations": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "shell",
         "arguments": "{}", "status": "completed"},
        {"type": "function_call_output", "call_id": "c1", "output": "three"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "tool"},
        {"role": "user", "content": "Q9"},
    ]  # fmt: skip
    frames = streamed(hello.http.post("/v1/responses", json=CODEX | {"input": history}))
    assert frames[-1]["type"] == "response.completed"
    chat = [
        {"role": "system", "content": "Hello"},
        {"role": "developer", "content": "one"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "END", "tool_calls": [called("shell", {})]},
        {"role": "tool", "content": "three"},
        {"role": "assistant", "tool_calls": [called("apply_patch", {"input": "x"})]},
        {"role": "tool", "content": "tool"},
        {"role": "user", "content": "Q9"},
    ]
    described = {name: value for name, value in FUNCTION.items() if name not in ("type", "strict")}
    body = {"messages": chat, "tools": [{"type": "function", "function": described}]}
    expected = hello.http.post("/tokenize", json=body).json()["tokens"]
    assert hello.engine.seen[-1].prompt_token_ids.tolist() == expected


def called(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_parameters_reach_the_engine(hello: RunningServer) -> None:
    send(hello, seed=5, temperature=0.5, top_p=0.25, top_k=7, user="me", max_output_tokens=9)
    request = hello.engine.seen[-1]
    sampling = request.sampling
    given = (sampling.seed, sampling.temperature, sampling.top_p, sampling.top_k)
    assert given == (5, 0.5, 0.25, 7)
    assert (request.tenant, request.max_tokens) == ("me", 9)


@pytest.mark.parametrize("fields", [
    {"tool_choice": "required", "tools": [FUNCTION]}, {"prompt": {"id": "p"}},
    {"tool_choice": {"type": "function", "name": "shell"}, "tools": [FUNCTION]},
    {"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": []}},
    {"text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}},
    {"conversation": "c"}, {"truncation": "auto"}, {"include": ["everything"]},
    {"context_management": [{"type": "compaction"}]}, {"store": True}, {"background": True},
    {"background": True, "store": False}, {"previous_response_id": "resp-1"}, {"input": []},
    {"input": None}, {"input": [{"type": "item_reference", "id": "x"}]}, {"input": 5},
    {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
    {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}] * 20_000}]},
    {"input": [{"type": "function_call", "name": "f"}]}, {"stream_options": {}},
    {"max_output_tokens": 0}, {"max_output_tokens": 9999}, {"top_logprobs": 99},
    {"temperature": 3}, {"metadata": {"a": 1}},
    {"stream": True, "stream_options": {"include_obfuscation": True}},
])  # fmt: skip
def test_what_cannot_be_honoured(hello: RunningServer, fields: dict[str, Any]) -> None:
    before = len(hello.engine.seen)
    assert error_of(send(hello, **fields))["type"] == "invalid_request_error"
    assert len(hello.engine.seen) == before


def test_errors_name_the_fields_of_the_dialect(hello: RunningServer) -> None:
    assert error_of(send(hello, input=[]))["param"] == "input"
    assert error_of(send(hello, max_output_tokens=0))["param"] == "max_output_tokens"
    long = error_of(send(hello, input="x" * 300))
    assert (long["code"], long["param"]) == ("context_length_exceeded", "input")
    assert "maximum context length is 256 tokens" in long["message"]
    assert "(300" not in long["message"]
    assert error_of(send(hello, model="gpt-9"), 404)["code"] == "model_not_found"
    bad = {
        "input": [{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "x"}]}]
    }
    assert error_of(send(hello, **bad))["param"] == "input[1].content[0]"


def test_null_is_the_default_of_every_field(hello: RunningServer) -> None:
    names = [
        "instructions", "previous_response_id", "reasoning", "text", "tools", "tool_choice",
        "parallel_tool_calls", "stream", "stream_options", "store", "background", "include",
        "max_output_tokens", "temperature", "top_p", "top_logprobs", "metadata", "user", "prompt",
        "conversation", "truncation", "service_tier", "max_tool_calls", "prompt_cache_key",
    ]  # fmt: skip
    assert text_of(send(hello, **dict.fromkeys(names)).json()) == "Hello world!"


def test_a_failure_is_a_status_before_the_first_token_and_an_event_after_it() -> None:
    with running(failing(0)) as server:
        assert error_of(send(server, stream=True), 500)["type"] == "server_error"
    with running(failing(2)) as server:
        last = streamed(send(server, stream=True))[-1]
        assert last["type"] == "response.failed"
        assert last["response"]["status"] == "failed"
        assert last["response"]["error"]["code"] == "server_error"
        assert "not finite" in last["response"]["error"]["message"]


def test_b41_a_client_that_leaves_ends_its_response() -> None:
    with running(endless(), max_model_len=100_000) as server:
        with server.http.stream(
            "POST", "/v1/responses", json={"input": "Hi", "stream": True}
        ) as answer:
            next(answer.iter_lines())
        assert server.idle()
