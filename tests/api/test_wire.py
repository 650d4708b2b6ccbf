"""Golden streams of every dialect, and points of the wire that broke clients of other servers."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest

from invar.api.limits import Limits
from invar.engine.request import EngineRequest

from .scripted import RunningServer, Step, events, running, says, token, typed_events

HI = [{"role": "user", "content": "Hi"}]


def golden(frames: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Frames without what differs from run to run."""
    for name in ("id", "item_id", "created", "created_at", "completed_at"):
        drop(frames, name)
    return frames


def drop(value: Any, name: str) -> None:
    if isinstance(value, dict):
        value.pop(name, None)
        for inner in value.values():
            drop(inner, name)
    elif isinstance(value, list):
        for inner in value:
            drop(inner, name)


def chat_stream(server: RunningServer, **fields: Any) -> list[dict[str, Any]]:
    return golden([json.loads(data) for data in events(server.chat(stream=True, **fields))[:-1]])


HEAD = {"object": "chat.completion.chunk", "model": "scripted", "system_fingerprint": "fp_test"}
USAGE = {
    "prompt_tokens": 22,
    "completion_tokens": 3,
    "total_tokens": 25,
    "prompt_tokens_details": {"cached_tokens": 1},
    "completion_tokens_details": {"reasoning_tokens": 0},
}


def chunk(delta: dict[str, Any], index: int = 0, **more: Any) -> dict[str, Any]:
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
    return HEAD | {"choices": [choice | more]}


ROLE, END = {"role": "assistant", "content": ""}, {"finish_reason": "stop", "stop_reason": None}


@pytest.fixture(scope="module")
def one_step() -> Iterator[RunningServer]:
    """Everything comes in one step, so that a stream has the same frames every time."""
    with running(says("Hello", "!", "<|im_end|>", grouped=3)) as server:
        yield server


def test_golden_chat(one_step: RunningServer) -> None:
    text = chunk({"content": "Hello!"})
    assert chat_stream(one_step) == [chunk(ROLE), text, chunk({}, **END)]


def test_golden_chat_of_two_choices(one_step: RunningServer) -> None:
    found = chat_stream(one_step, n=2)
    assert found[:2] == [chunk(ROLE, 0), chunk(ROLE, 1)]
    for index in (0, 1):
        own = [frame for frame in found[2:] if frame["choices"][0]["index"] == index]
        assert own == [chunk({"content": "Hello!"}, index), chunk({}, index, **END)]
    assert len(found) == 6


def test_golden_chat_with_usage(one_step: RunningServer) -> None:
    found = chat_stream(one_step, stream_options={"include_usage": True})
    assert found[-1] == HEAD | {"choices": [], "usage": USAGE}
    assert [frame["usage"] for frame in found[:-1]] == [None] * 3


def test_golden_chat_with_logprobs(one_step: RunningServer) -> None:
    def scored(piece: str) -> dict[str, Any]:
        return {"token": piece, "logprob": -0.25, "bytes": list(piece.encode())}

    _, content, end = chat_stream(one_step, logprobs=True, max_tokens=2)
    entries = [scored(piece) | {"top_logprobs": []} for piece in ("Hello", "!")]
    logprobs = {"content": entries, "refusal": None}
    assert content == chunk({"content": "Hello!"}, logprobs=logprobs)
    assert end == chunk({}, finish_reason="length", stop_reason=None)


def test_golden_completion(one_step: RunningServer) -> None:
    found = golden([json.loads(d) for d in events(one_step.complete(stream=True))[:-1]])
    choice = {"index": 0, "text": "Hello!", "logprobs": None} | END
    assert found == [HEAD | {"object": "text_completion", "choices": [choice]}]


def test_golden_message(one_step: RunningServer) -> None:
    body = {"model": "scripted", "max_tokens": 9, "messages": HI, "stream": True}
    usage = {
        "input_tokens": 21,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 1,
        "output_tokens": 3,
    }
    message = {
        "type": "message", "role": "assistant", "model": "scripted", "content": [],
        "stop_reason": None, "stop_sequence": None, "usage": usage, "system_fingerprint": "fp_test",
    }  # fmt: skip
    block = {"type": "text", "text": "", "citations": None}
    text = {"type": "text_delta", "text": "Hello!"}
    end = {"stop_reason": "end_turn", "stop_sequence": None}
    assert golden(typed_events(one_step.http.post("/v1/messages", json=body))) == [
        {"type": "message_start", "message": message},
        {"type": "content_block_start", "index": 0, "content_block": block},
        {"type": "ping"},
        {"type": "content_block_delta", "index": 0, "delta": text},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": end, "usage": usage},
        {"type": "message_stop"},
    ]


def test_golden_response(one_step: RunningServer) -> None:
    body = {"input": "Hi", "stream": True}
    found = golden(typed_events(one_step.http.post("/v1/responses", json=body)))
    place = {"output_index": 0, "content_index": 0}
    part = {"type": "output_text", "text": "Hello!", "annotations": [], "logprobs": []}
    item = {"type": "message", "status": "completed", "role": "assistant", "content": [part]}
    middle = [
        {"type": "response.output_item.added", "output_index": 0,
         "item": item | {"status": "in_progress", "content": []}},
        {"type": "response.content_part.added", **place, "part": part | {"text": ""}},
        {"type": "response.output_text.delta", **place, "delta": "Hello!", "logprobs": []},
        {"type": "response.output_text.done", **place, "text": "Hello!", "logprobs": []},
        {"type": "response.content_part.done", **place, "part": part},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
    ]  # fmt: skip
    assert [frame.pop("sequence_number") for frame in found] == list(range(9))
    assert found[2:-1] == middle
    kinds = [(frame["type"], frame["response"]["status"]) for frame in (*found[:2], found[-1])]
    assert kinds == [
        ("response.created", "in_progress"),
        ("response.in_progress", "in_progress"),
        ("response.completed", "completed"),
    ]
    assert found[-1]["response"]["output"] == [item]


# ------------------------------------------------------------------------------ points that broke


def test_developer_is_the_system_role(hello: RunningServer) -> None:
    def ids(role: str) -> list[int]:
        hello.chat(messages=[{"role": role, "content": "ab"}, *HI])
        return hello.engine.seen[-1].prompt_token_ids.tolist()

    assert ids("developer") == ids("system") != ids("user")


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_content_may_be_null(hello: RunningServer, role: str) -> None:
    messages = [*HI, {"role": role, "content": None}, *HI]
    assert hello.chat(messages=messages).status_code == 200


def test_the_newer_name_of_the_limit_wins(hello: RunningServer) -> None:
    body = hello.chat(max_tokens=3, max_completion_tokens=2).json()
    assert body["usage"]["completion_tokens"] == 2
    assert (
        hello.chat(max_completion_tokens=None, max_tokens=1).json()["usage"]["completion_tokens"]
        == 1
    )
    assert hello.chat(stream=True, stream_options=None).status_code == 200


@pytest.mark.parametrize("seed", [0, 2**63 - 1, -(2**63), 2**64 - 1])
def test_seeds_of_64_bits(hello: RunningServer, seed: int) -> None:
    hello.chat(seed=seed)
    assert hello.engine.seen[-1].sampling.seed == seed % 2**64


def test_head_of_what_can_be_got(hello: RunningServer) -> None:
    for path in ("/health", "/ping", "/v1/models", "/v1/models/org/scripted", "/version"):
        answer = hello.http.head(path)
        assert (answer.status_code, answer.content) == (200, b""), path
    assert hello.http.get("/v1/models/org/nothing").json()["error"]["code"] == "model_not_found"


def test_models_in_one_list_for_both_dialects(hello: RunningServer) -> None:
    body = hello.http.get("/v1/models").json()
    assert (body["first_id"], body["last_id"], body["has_more"]) == (
        "scripted", "org/scripted", False,
    )  # fmt: skip
    for card in body["data"]:
        assert (card["object"], card["type"], card["owned_by"]) == ("model", "model", "invar")
        assert card["created_at"].endswith("+00:00")


class Person(pydantic.BaseModel):
    name: str


def test_parse_says_what_is_not_built(hello: RunningServer) -> None:
    messages: Any = HI
    plain = hello.client.chat.completions.parse(model="scripted", messages=messages)
    assert plain.choices[0].message.content == "Hello world!"
    with pytest.raises(openai.BadRequestError) as chat:
        hello.client.chat.completions.parse(
            model="scripted", messages=messages, response_format=Person
        )
    with pytest.raises(openai.BadRequestError) as response:
        hello.client.responses.parse(model="scripted", input="Hi", text_format=Person)
    assert (chat.value.param, response.value.param) == ("response_format", "text.format")


SECRET = "the-secret-of-a-user"
WRONG: list[tuple[str, dict[str, Any]]] = [
    ("/v1/messages", {"messages": [{"role": SECRET, "content": "x"}]}),
    ("/v1/messages", {"messages": [{"role": "user", "content": {SECRET: SECRET}}]}),
    ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": SECRET}]}]}),
    ("/v1/messages", {"messages": HI, "system": [{"type": SECRET, "text": SECRET}]}),
    ("/v1/messages", {"messages": HI, "thinking": {"type": SECRET}}),
    ("/v1/messages", {"messages": HI, "tool_choice": {"type": SECRET}}),
    ("/v1/messages", {"messages": [{"role": "user", "content": SECRET * 500}]}),
    ("/v1/responses", {"input": [{"role": "user", "content": [{"type": SECRET}]}]}),
    ("/v1/responses", {"input": [{"type": SECRET}]}),
    ("/v1/responses", {"input": [SECRET]}),
    ("/v1/responses", {"input": SECRET * 500}),
    ("/v1/responses", {"input": "Hi", "include": [SECRET]}),
    ("/v1/responses", {"input": "Hi", "metadata": {SECRET: 5}}),
    ("/v1/responses", {"input": "Hi", "previous_response_id": SECRET}),
    ("/v1/responses", {"input": "Hi", "tool_choice": {"type": SECRET}}),
]


@pytest.mark.parametrize(("path", "body"), WRONG)
def test_errors_repeat_nothing_of_a_body(
    hello: RunningServer, path: str, body: dict[str, Any]
) -> None:
    answer = hello.http.post(path, json={"model": "scripted", "max_tokens": 5} | body)
    assert answer.status_code == 400, answer.text
    assert SECRET not in answer.text
    assert len(answer.content) < 600


def test_unknown_fields_of_every_dialect(caplog: pytest.LogCaptureFixture) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/messages": {"model": "scripted", "max_tokens": 5, "messages": HI},
        "/v1/responses": {"input": "Hi"},
    }
    for path, body in bodies.items():
        with running(says("Hello")) as server, caplog.at_level("WARNING", "invar.api"):
            caplog.clear()
            for _ in range(2):
                assert server.http.post(path, json=body | {"flavour": 1}).status_code == 200
            said = [r.getMessage() for r in caplog.records if "flavour" in r.getMessage()]
            assert len(said) == 1
            metrics = server.http.get("/metrics").text
            assert any("flavour" in line and line.endswith(" 2.0") for line in metrics.splitlines())
        with running(says("Hello"), strict_fields=True) as server:
            answer = server.http.post(path, json=body | {"flavour": 1})
            assert answer.status_code == 400
            assert "flavour" in answer.json()["error"]["message"]
            assert server.http.post(path, json=body).status_code == 200


def test_a_slow_prompt_is_no_silence_on_messages() -> None:
    """Keep-alives are pings there, before the first token too."""

    def slow(request: EngineRequest) -> Iterator[Step]:
        time.sleep(1.5)
        yield [token("Hello")]

    with running(slow, limits=Limits(keep_alive_s=0.2)) as server:
        body = {"model": "scripted", "max_tokens": 5, "messages": HI, "stream": True}
        kinds = [f["type"] for f in typed_events(server.http.post("/v1/messages", json=body))]
    assert kinds[0] == "ping"
    assert kinds[kinds.index("message_start") + 1] == "content_block_start"
    assert kinds[-1] == "message_stop"
