"""What is wrong with a request is found before the engine sees it, and said in a bounded answer."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import httpx
import pytest

from .scripted import RunningServer, endless, running, says, token

JSON = {"content-type": "application/json"}


def error_of(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert len(answer.content) < 2000
    error: dict[str, Any] = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.mark.parametrize("field", [
    "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
])  # fmt: skip
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "true", '"0.5"', "[]"])
def test_b21_only_finite_numbers_are_numbers(hello: RunningServer, field: str, value: str) -> None:
    body = f'{{"prompt": "Hi", "{field}": {value}}}'
    answer = hello.http.post("/v1/completions", content=body, headers=JSON)
    error = error_of(answer)
    if value in ("true", '"0.5"', "[]"):
        assert error["param"] == field
    else:
        assert "JSON" in error["message"]


@pytest.mark.parametrize("value", [0, -0.0, 1e-320, 1, 0.5, 2, None])
def test_b21_odd_but_right_temperatures(hello: RunningServer, value: float | None) -> None:
    assert hello.complete(temperature=value).status_code == 200


@pytest.mark.parametrize(("field", "value"), [
    ("temperature", -1), ("temperature", 2.5), ("top_p", 0), ("top_p", 1.5), ("min_p", -0.1),
    ("presence_penalty", 3), ("repetition_penalty", 0), ("top_k", -2), ("n", 0), ("n", -1),
    ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 2**63), ("min_tokens", -1),
    ("seed", 2**70), ("min_tokens", 200), ("stop", ""), ("stop", ["a", ""]), ("logprobs", -1),
    ("allowed_token_ids", []), ("cache_salt", "a/b"), ("priority", 3),
])  # fmt: skip
def test_ranges(hello: RunningServer, field: str, value: Any) -> None:
    error = error_of(hello.complete(**{field: value}))
    assert error["param"].startswith(field), error
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("fields", [
    {"logit_bias": {"100000": 1}}, {"logit_bias": {"-1": 1}}, {"logit_bias": {"abc": 1}},
    {"logit_bias": {"5": 1000}}, {"logit_bias": {"5": None}}, {"stop_token_ids": [100000]},
    {"stop_token_ids": [-1]}, {"allowed_token_ids": [100000]}, {"prompt": [5, 100000]},
    {"prompt": [[5], [-7]]},
])  # fmt: skip
def test_b23_ids_beyond_the_vocabulary(hello: RunningServer, fields: dict[str, Any]) -> None:
    error = error_of(hello.complete(**fields))
    assert error["param"].startswith(next(iter(fields)))
    assert hello.complete().status_code == 200


@pytest.mark.parametrize("prompt", [[], [[]], ["Hi", []], [[5], 5], ["Hi", 5], [True], [1.5]])
def test_b31_prompts_that_are_none(hello: RunningServer, prompt: Any) -> None:
    assert error_of(hello.complete(prompt=prompt))["param"].startswith("prompt")
    assert hello.complete().status_code == 200


def test_b31_an_empty_text_begins_with_bos_where_there_is_one(hello: RunningServer) -> None:
    for prompt in ("", [""]):
        body = hello.complete(prompt=prompt).json()
        assert body["usage"]["prompt_tokens"] == 1
    with running(says("Hello"), add_bos=False) as server:
        for prompt in ("", [""], ["Hi", ""]):
            assert error_of(server.complete(prompt=prompt))["param"].startswith("prompt")
        assert server.complete().status_code == 200
        assert not [r for r in server.engine.seen if not len(r.prompt_token_ids)]


def test_b31_messages(hello: RunningServer) -> None:
    assert error_of(hello.chat(messages=[]))["param"] == "messages"
    assert hello.chat(messages=[{"role": "user", "content": ""}]).status_code == 200
    assert hello.chat(messages=[{"role": "assistant", "content": None}]).status_code == 200


def test_b33_the_context_is_never_cut_silently() -> None:
    with running(says("Hello"), max_model_len=64) as server:
        ids = [token("zz")] * 64
        for length, max_tokens, fits in ((63, 1, True), (64, 1, False), (65, 1, False),
                                         (40, 24, True), (40, 25, False)):  # fmt: skip
            prompt = (ids * 2)[:length]
            answer = server.complete(prompt=prompt, max_tokens=max_tokens)
            if fits:
                assert answer.json()["usage"]["prompt_tokens"] == length
                continue
            error = error_of(answer)
            assert error["code"] == "context_length_exceeded"
            assert (
                "This model's maximum context length is 64 tokens. However, you requested "
                f"{length + max_tokens} tokens" in error["message"]
            )
        error = error_of(server.chat(messages=[{"role": "user", "content": "z" * 100}]))
        assert error["code"] == "context_length_exceeded"
        # A text that cannot fit whatever it says is refused without being tokenised.
        began = time.monotonic()
        error = error_of(server.complete(prompt="word " * 2_000_000))
        assert error["code"] == "context_length_exceeded"
        assert time.monotonic() - began < 2


def test_b36_without_max_tokens_the_window_is_the_limit() -> None:
    with running(endless(pause_s=0), max_model_len=64) as server:
        choice = server.chat().json()
        assert choice["choices"][0]["finish_reason"] == "length"
        assert choice["usage"]["total_tokens"] == 64
        # /v1/completions has OpenAI's default instead.
        assert server.complete().json()["usage"]["completion_tokens"] == 16


@pytest.mark.alone
@pytest.mark.parametrize("fields", [
    {"n": 2_000_000}, {"best_of": 2_000_000}, {"logprobs": 300_000_000}, {"max_tokens": 2**63},
    {"stop": ["x"] * 100_000}, {"prompt": ["a"] * 100_000}, {"n": 128, "prompt": ["a"] * 1000},
    {"stop_token_ids": [1] * 100_000}, {"prompt_logprobs": 300_000_000},
    {"logit_bias": {str(i): 1.0 for i in range(1_000_000)}}, {"bad_words": ["x"] * 1000},
    {"allowed_token_ids": [5] * 3_000_000}, {"prompt": [5] * 3_000_000},
    {"prompt": [[5] * 3_000_000]}, {f"x{i}": 1 for i in range(300_000)},
    {"stream": True, "stream_options": {f"x{i}": 1 for i in range(300_000)}},
])  # fmt: skip
def test_b34_giant_requests_are_refused_before_anything_is_made_of_them(
    hello: RunningServer, fields: dict[str, Any]
) -> None:
    before = len(hello.engine.seen)
    body = json.dumps({"prompt": "Hi", **fields}).encode()
    answer, elapsed = polled(hello, "/v1/completions", body)
    error_of(answer)
    assert elapsed < 2
    assert len(hello.engine.seen) == before


@pytest.mark.alone
@pytest.mark.parametrize(("path", "body"), [
    ("/detokenize", {"tokens": [5] * 3_000_000}),
    ("/v1/chat/completions",
     {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 300_000}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": ""}] * 300_000}),
    ("/v1/messages/count_tokens", {"model": "scripted", "messages": [{"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "a",
         "content": [{"type": "text", "text": ""}] * 300_000}]}]}),
    ("/v1/responses", {"input": [{"type": "function_call_output", "call_id": "a",
                                  "output": [{"type": "input_text", "text": ""}] * 300_000}]}),
    ("/v1/responses", {"input": [{"role": "user", "content": ""}] * 300_000}),
])  # fmt: skip
def test_b34_on_the_other_routes(hello: RunningServer, path: str, body: dict[str, Any]) -> None:
    answer, elapsed = polled(hello, path, json.dumps(body).encode())
    assert answer.status_code == 400
    assert len(answer.content) < 2000
    assert elapsed < 2


@pytest.mark.alone
@pytest.mark.parametrize(("path", "body"), [
    ("/v1/completions", {
        "prompt": ["a"] * 500, "allowed_token_ids": list(range(300)), "max_tokens": 1,
        "stop": [f"{i:02}" + "x" * 1000 for i in range(16)],
    }),
    ("/v1/completions", {"prompt": [[5] * 250] * 500, "echo": True, "max_tokens": 1}),
    ("/tokenize", {"prompt": "zz " * 20_000, "return_token_strs": True}),
    ("/tokenize",
     {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 9000}]}),
])  # fmt: skip
def test_b34_heavy_requests_that_are_allowed_hold_nobody_up(
    hello: RunningServer, path: str, body: dict[str, Any]
) -> None:
    answer, _ = polled(hello, path, json.dumps(body).encode())
    assert answer.status_code == 200, answer.text


def polled(server: RunningServer, path: str, body: bytes) -> tuple[httpx.Response, float]:
    """The answer and its seconds, while another client asks whether the server is well."""
    stop, slowest = threading.Event(), [0.0]

    def poll() -> None:
        with httpx.Client(base_url=server.url) as client:
            while not stop.is_set():
                began = time.monotonic()
                assert client.get("/health").status_code == 200
                slowest[0] = max(slowest[0], time.monotonic() - began)

    poller = threading.Thread(target=poll)
    poller.start()
    began = time.monotonic()
    answer = server.http.post(path, content=body, headers=JSON)
    elapsed = time.monotonic() - began
    stop.set()
    poller.join()
    assert slowest[0] < 1
    return answer, elapsed


def test_b34_top_logprobs(hello: RunningServer) -> None:
    error = error_of(hello.chat(logprobs=True, top_logprobs=300_000_000))
    assert error["param"] == "top_logprobs"
    assert error_of(hello.chat(top_logprobs=2))["param"] == "top_logprobs"


def test_b35_errors_do_not_grow_with_the_request(hello: RunningServer) -> None:
    secret = "secret" * 200
    error = error_of(hello.chat(messages=[{"role": 5, "content": secret}] * 3000))
    assert error["param"] == "messages[0].role"
    assert "secret" not in error["message"]
    error = error_of(hello.chat(messages=[secret] * 3000))
    assert "secret" not in error["message"]
    error = error_of(hello.chat(**{"temperature": secret}))
    assert "secret" not in error["message"]
    assert "secret" not in error_of(hello.chat(model="m" * 5000 + secret), 404)["message"]


def test_bodies_have_a_size(hello: RunningServer) -> None:
    from invar.api.limits import Limits

    with running(says("Hello"), limits=Limits(body_bytes=1000)) as server:
        assert server.complete(prompt="x" * 500).status_code in (200, 400)
        error = error_of(server.complete(prompt="x" * 2000), 413)
        assert error["code"] == "request_too_large"

        def parts() -> Any:
            for _ in range(10):
                yield b" " * 500

        answer = server.http.post("/v1/completions", content=parts(), headers=JSON)
        error_of(answer, 413)
