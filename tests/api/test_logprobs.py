"""Log-probabilities of tokens that are no text on their own, and scoring of prompts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .scripted import RunningServer, events, running, says, token

QUOTE = [bytes([b]) for b in "’".encode()]
KANJI = [bytes([b]) for b in "漢".encode()]


def test_b28_bytes_of_the_chosen_tokens_are_the_text() -> None:
    with running(says("Hello", *QUOTE, *KANJI, "!")) as server:
        choice = server.chat(logprobs=True, top_logprobs=4).json()["choices"][0]
        content = choice["logprobs"]["content"]
        data = b"".join(bytes(item["bytes"]) for item in content)
        assert data.decode("utf-8") == choice["message"]["content"] == "Hello’漢!"
        assert [item["token"] for item in content[:4]] == [
            "Hello", "bytes:\\xe2", "bytes:\\x80", "bytes:\\x99",
        ]  # fmt: skip
        for item in content:
            assert item.keys() == {"token", "logprob", "bytes", "top_logprobs"}
            assert len(item["top_logprobs"]) == 4
            assert len({top["token"] for top in item["top_logprobs"]}) == 4
            for top in item["top_logprobs"]:
                assert top.keys() == {"token", "logprob", "bytes"}
        streamed: list[Any] = []
        for event in events(server.chat(stream=True, logprobs=True, top_logprobs=4))[:-1]:
            logprobs = json.loads(event)["choices"][0]["logprobs"]
            streamed += logprobs["content"] if logprobs else []
        assert streamed == content


def test_chat_logprobs_without_alternatives(hello: RunningServer) -> None:
    content = hello.chat(logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert [item["top_logprobs"] for item in content] == [[]] * 4
    assert hello.chat(logprobs=False).json()["choices"][0]["logprobs"] is None


def test_completion_logprobs_are_parallel_lists(hello: RunningServer) -> None:
    choice = hello.complete(logprobs=2).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["Hello", " world", "!", "<|im_end|>"]
    assert logprobs["text_offset"] == [0, 5, 11, 12]
    assert logprobs["token_logprobs"] == [-0.25] * 4
    assert logprobs["top_logprobs"][0] == {"Hello": -0.25, " world": -1.25}
    assert hello.complete(logprobs=0).json()["choices"][0]["logprobs"]["top_logprobs"][0] == {
        "Hello": -0.25
    }


def test_streamed_completion_logprobs_join_to_the_plain_ones() -> None:
    with running(says("Hello", *QUOTE, " world", "END", "zz")) as server:
        for stop in (None, "END"):
            fields: dict[str, Any] = {"logprobs": 2, "stop": stop, "echo": True}
            plain = server.complete(**fields).json()["choices"][0]
            joined: dict[str, list[Any]] = {key: [] for key in plain["logprobs"]}
            text = ""
            for event in events(server.complete(stream=True, **fields))[:-1]:
                (choice,) = json.loads(event)["choices"]
                text += choice["text"]
                for key, values in (choice["logprobs"] or {}).items():
                    joined[key] += values
            assert text == plain["text"]
            assert joined == plain["logprobs"]


def test_echo_scores_the_prompt(hello: RunningServer) -> None:
    body = hello.complete(prompt="one two", echo=True, logprobs=1, max_tokens=1).json()
    choice = body["choices"][0]
    assert choice["text"] == "one twoHello"
    assert choice["logprobs"]["tokens"] == ["<s>", "one", " two", "Hello"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.25, -0.25, -0.25]
    assert choice["logprobs"]["text_offset"] == [0, 0, 3, 7]
    assert choice["logprobs"]["top_logprobs"][0] is None


def test_echo_without_an_answer_is_how_harnesses_score(hello: RunningServer) -> None:
    prompts = [[token("one"), token(" two")], [token("zz")]]
    body = hello.complete(prompt=prompts, echo=True, logprobs=1, max_tokens=0, n=2).json()
    assert [c["text"] for c in body["choices"]] == ["one two", "one two", "zz", "zz"]
    assert [c["logprobs"]["token_logprobs"] for c in body["choices"]] == [
        [None, -0.25], [None, -0.25], [None], [None],
    ]  # fmt: skip
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 0,
        "total_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


@pytest.mark.parametrize(("logprobs", "prompt_logprobs"), [(1, 4), (4, 1), (0, 2), (2, 0)])
@pytest.mark.parametrize("max_tokens", [0, 2])
def test_an_echo_and_prompt_logprobs_have_their_own_counts(
    hello: RunningServer, logprobs: int, prompt_logprobs: int, max_tokens: int
) -> None:
    choice = hello.complete(
        prompt="one two!", echo=True, max_tokens=max_tokens,
        logprobs=logprobs, prompt_logprobs=prompt_logprobs,
    ).json()["choices"][0]  # fmt: skip
    # The scripted model's token is the highest one.
    echoed = choice["logprobs"]["top_logprobs"][1:4]
    assert [len(position) for position in echoed] == [max(1, logprobs)] * 3
    scored = choice["prompt_logprobs"]
    assert [len(position) for position in scored[1:]] == [max(1, prompt_logprobs)] * 3
    assert len(scored) == 4
    assert str(token("!")) in scored[-1]


def test_scoring_ends_with_length_whatever_was_asked_of_the_answer(hello: RunningServer) -> None:
    fields: dict[str, Any] = {
        "prompt": [token("one"), token(" two"), token("!")], "echo": True, "max_tokens": 0,
        "logprobs": 1, "stop": ["!", "two"], "stop_token_ids": [token("!")], "min_tokens": 5,
    }  # fmt: skip
    plain = hello.complete(**fields).json()
    (streamed,) = map(json.loads, events(hello.complete(**fields, stream=True))[:-1])
    for body in (plain, streamed):
        (choice,) = body["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
        assert choice["text"] == "one two!"
        assert choice["logprobs"]["tokens"] == ["one", " two", "!"]
        assert choice["logprobs"]["token_logprobs"] == [None, -0.25, -0.25]
    assert plain["usage"]["total_tokens"] == 3


def test_a_scored_prompt_may_fill_the_context(hello: RunningServer) -> None:
    for length, status in ((256, 200), (257, 400)):
        prompt = [token("zz")] * length
        answer = hello.complete(prompt=prompt, echo=True, logprobs=1, max_tokens=0)
        assert answer.status_code == status
        if status == 200:
            assert len(answer.json()["choices"][0]["logprobs"]["tokens"]) == length
        else:
            assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_prompt_logprobs_in_vllms_shape(hello: RunningServer) -> None:
    entry = {"logprob": -0.25, "rank": 1, "decoded_token": "i"}
    chat = hello.chat(prompt_logprobs=1).json()["prompt_logprobs"]
    assert chat[0] is None
    completion = hello.complete(prompt_logprobs=1).json()["choices"][0]["prompt_logprobs"]
    assert completion == [
        None,
        {str(token("H")): {"logprob": -0.25, "rank": 1, "decoded_token": "H"}},
        {str(token("i")): entry},
    ]
    assert hello.complete(prompt_logprobs=1, stream=True).status_code == 400
