"""What a stream looks like on the wire, and that it says what the plain response says."""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from invar.api.chat import ChatFrames
from invar.api.protocol import Connection
from invar.api.streams import TextFrames
from invar.api.streams import events as encoded
from invar.engine.request import EngineRequest

from .scripted import RunningServer, Script, Step, endless, events, running, says, token
from .test_disconnects import wait_for

EMOJI = [bytes([b]) for b in "🙂".encode()]
KANJI = [bytes([b]) for b in "漢".encode()]


def chunks(server: RunningServer, **fields: Any) -> list[dict[str, Any]]:
    data = events(server.chat(stream=True, **fields))
    assert data[-1] == "[DONE]"
    assert data.count("[DONE]") == 1
    return [json.loads(item) for item in data[:-1]]


def streamed_text(server: RunningServer, **fields: Any) -> tuple[str, str | None, Any]:
    text, finish, stop = "", None, None
    for chunk in chunks(server, **fields):
        for choice in chunk["choices"]:
            piece = choice["delta"].get("content", "")
            assert "\ufffd" not in piece or finish is None
            text += piece
            if choice["finish_reason"]:
                finish, stop = choice["finish_reason"], choice["stop_reason"]
    return text, finish, stop


def plain_text(server: RunningServer, **fields: Any) -> tuple[str, str | None, Any]:
    choice = server.chat(**fields).json()["choices"][0]
    return choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]


def test_b01_split_characters_reach_the_client_whole() -> None:
    with running(says("Hello", *EMOJI, *KANJI, "!")) as server:
        for chunk in chunks(server):
            for choice in chunk["choices"]:
                assert "\ufffd" not in choice["delta"].get("content", "")
        assert streamed_text(server) == plain_text(server) == ("Hello🙂漢!", "stop", None)


def test_b01_an_end_inside_a_character_flushes_one_replacement() -> None:
    with running(says("Hello", *EMOJI[:3])) as server:
        assert streamed_text(server) == plain_text(server) == ("Hello\ufffd", "stop", None)


STOPS: list[tuple[Script, list[str], tuple[str, str, Any]]] = [
    (says("ab", "EN", "D_", "HERE", "zz"), ["END_HERE"], ("ab", "stop", "END_HERE")),
    (says("ab", "END_H", "OPE"), ["END_HERE"], ("abEND_HOPE", "stop", None)),
    (says("ab", "EN", "D_", "HERE"), ["END_HERE", "END"], ("ab", "stop", "END")),
    (says("ab", "END_H"), ["END_HERE"], ("abEND_H", "stop", None)),
    (says("Hello", "axb", "zz"), ["x"], ("Helloa", "stop", "x")),
    (says("ab", "EN", "D_", "HERE", "zz", grouped=5), ["END_HERE"], ("ab", "stop", "END_HERE")),
]


@pytest.mark.parametrize(("script", "stop", "expected"), STOPS)
def test_b15_nothing_of_a_stop_string_is_sent(
    script: Script, stop: list[str], expected: tuple[str, str, Any]
) -> None:
    with running(script) as server:
        assert streamed_text(server, stop=stop) == plain_text(server, stop=stop) == expected


def test_b16_included_stop_string_ends_the_text_inside_a_token() -> None:
    with running(says("Hello", "axb")) as server:
        expected = ("Helloax", "stop", "x")
        wanted: dict[str, Any] = {"stop": "x", "include_stop_str_in_output": True}
        assert streamed_text(server, **wanted) == plain_text(server, **wanted) == expected


@pytest.mark.parametrize(
    ("skip", "include", "text"),
    [(True, False, "Hello"), (True, True, "Hello"), (False, False, "Hello"),
     (False, True, "Hello<|hidden|>")],
)  # fmt: skip
def test_b16_a_hidden_stop_token_removes_no_text(skip: bool, include: bool, text: str) -> None:
    hidden = token("<|hidden|>")
    with running(says("Hello", "<|hidden|>", "zz")) as server:
        fields: dict[str, Any] = {
            "stop_token_ids": [hidden],
            "skip_special_tokens": skip,
            "include_stop_str_in_output": include,
        }
        assert plain_text(server, **fields) == (text, "stop", hidden)
        assert streamed_text(server, **fields) == (text, "stop", hidden)


def test_usage_and_logprobs_end_at_the_token_that_completes_a_stop_string() -> None:
    def never_ends(request: EngineRequest) -> Iterator[Step]:
        yield [token(piece) for piece in ("ab", "EN", "D_", "HERE", "zz", "zz")]
        yield from endless()(request)

    with running(never_ends) as server:
        body = server.chat(stop="END_HERE", logprobs=True).json()
        assert body["usage"]["completion_tokens"] == 4
        assert [t["token"] for t in body["choices"][0]["logprobs"]["content"]] == [
            "ab", "EN", "D_", "HERE",
        ]  # fmt: skip
        # Stopped by text: the engine did not know and was told.
        assert server.idle()
        assert server.engine.aborted == [server.engine.seen[0].id]


def test_b17_tokens_that_come_together_give_the_same_text() -> None:
    pieces = ("one", " two", "Q9", ":", " three")
    for stop in ([], ["Q9:"]):
        answers = set()
        for grouped in (1, 2, 5):
            with running(says(*pieces, grouped=grouped)) as server:
                answers.add(streamed_text(server, stop=stop))
                answers.add(plain_text(server, stop=stop))
        assert len(answers) == 1


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    ("fields", "reason"),
    [({}, "stop"), ({"max_tokens": 2}, "length"), ({"stop": ["world"]}, "stop")],
)
def test_b39_every_chunk_has_the_keys_and_each_choice_one_end(
    n: int, fields: dict[str, Any], reason: str
) -> None:
    with running(says("Hello", " world", "!")) as server:
        found = chunks(server, n=n, **fields)
    ids, created = {c["id"] for c in found}, {c["created"] for c in found}
    assert len(ids) == len(created) == 1
    assert next(iter(ids)).startswith("chatcmpl-")
    finished: list[int] = []
    opened: set[int] = set()
    for chunk in found:
        assert chunk["object"] == "chat.completion.chunk"
        assert chunk["model"] == "scripted"
        assert chunk["system_fingerprint"] == "fp_test"
        assert "usage" not in chunk
        (choice,) = chunk["choices"]
        assert {"index", "delta", "logprobs", "finish_reason"} <= choice.keys()
        assert choice["logprobs"] is None
        assert choice["index"] not in finished
        if choice["index"] not in opened:
            assert choice["delta"] == {"role": "assistant", "content": ""}
            opened.add(choice["index"])
        else:
            assert "role" not in choice["delta"]
        if choice["finish_reason"] is not None:
            assert choice["finish_reason"] == reason
            assert "stop_reason" in choice
            finished.append(choice["index"])
    assert sorted(finished) == list(range(n))


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": True}])
def test_b38_usage_comes_once_and_only_when_asked(n: int, options: dict[str, Any] | None) -> None:
    with running(says("Hello", " world", "!")) as server:
        found = chunks(server, n=n, stream_options=options)
        plain = server.chat(n=n).json()["usage"]
    assert plain["completion_tokens"] == 4 * n
    assert plain["total_tokens"] == plain["prompt_tokens"] + 4 * n
    carrying = [chunk for chunk in found if chunk.get("usage")]
    if options and options["include_usage"]:
        assert carrying == [found[-1]]
        assert found[-1]["choices"] == []
        assert found[-1]["usage"] == plain
        assert all(chunk["usage"] is None for chunk in found[:-1])
    else:
        assert not carrying
        assert all(chunk["choices"] for chunk in found)


def test_continuous_usage_counts_up() -> None:
    with running(says("Hello", " world", "!")) as server:
        options = {"include_usage": True, "continuous_usage_stats": True}
        found = chunks(server, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in found]
    assert counts == sorted(counts)
    assert counts[-1] == 4


def test_stream_options_need_a_stream(hello: RunningServer) -> None:
    answer = hello.chat(stream_options={"include_usage": True})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "stream_options"
    assert hello.chat(stream_options=None).status_code == 200


@pytest.mark.parametrize("n", [1, 3])
def test_completion_chunks(n: int) -> None:
    with running(says("Hello", " world", "!")) as server:
        data = events(
            server.complete(stream=True, n=n, prompt=["a", "b"], stream_options={
                "include_usage": True})
        )  # fmt: skip
        plain = server.complete(n=n, prompt=["a", "b"]).json()
    assert data[-1] == "[DONE]"
    found = [json.loads(item) for item in data[:-1]]
    texts = dict.fromkeys(range(2 * n), "")
    ends = dict.fromkeys(range(2 * n), 0)
    for chunk in found[:-1]:
        assert chunk["object"] == "text_completion"
        assert chunk["system_fingerprint"] == "fp_test"
        (choice,) = chunk["choices"]
        assert {"index", "text", "logprobs", "finish_reason"} <= choice.keys()
        texts[choice["index"]] += choice["text"]
        ends[choice["index"]] += choice["finish_reason"] is not None
    assert found[-1]["choices"] == []
    assert found[-1]["usage"] == plain["usage"]
    assert set(texts.values()) == {"Hello world!"}
    assert set(ends.values()) == {1}
    assert [c["index"] for c in plain["choices"]] == list(range(2 * n))


def test_an_empty_answer_still_opens_and_ends() -> None:
    with running(says()) as server:
        found = chunks(server)
        assert [c["choices"][0]["finish_reason"] for c in found] == [None, "stop"]
        assert plain_text(server) == ("", "stop", None)


def test_a_text_frame_is_the_frame_with_the_text_in_it() -> None:
    for text in ("Hello", '"\\', "\n\t\0", "🙂\u2028", TextFrames.MARK, "</script>"):
        for name in ({}, {"type": "delta"}):
            frame = [{**name, "id": "a", "delta": {"text": text}, "end": None}]
            marked = {**name, "id": "a", "delta": {"text": TextFrames.MARK}, "end": None}
            assert TextFrames(marked).event(text) == encoded(frame)


def test_tokens_are_written_without_their_task_and_say_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts: list[bytes] = []
    write = Connection.write_part

    def counted(connection: Connection, data: bytes) -> None:
        parts.append(data)
        write(connection, data)

    pieces = ["Hello", *EMOJI, " world", '"', "!"]
    with running(slowly(*pieces)) as server:
        monkeypatch.setattr(Connection, "write_part", counted)
        direct = [events(server.chat(stream=True, n=2)), events(server.complete(stream=True, n=2))]
        assert len(parts) >= 4
        monkeypatch.setattr(Connection, "takes_part", False)
        before = len(parts)
        by_task = [events(server.chat(stream=True, n=2)), events(server.complete(stream=True, n=2))]
        assert len(parts) == before
    for one, other in zip(direct, by_task, strict=True):
        assert texts(one) == texts(other) == {0: 'Hello🙂 world"!', 1: 'Hello🙂 world"!'}
        assert {bare(event) for event in one} == {bare(event) for event in other}


def texts(data: list[str]) -> dict[int, str]:
    """Those of the choices of a stream."""
    found: dict[int, str] = defaultdict(str)
    for chunk in map(json.loads, data[:-1]):
        for choice in chunk["choices"]:
            found[choice["index"]] += choice.get("text", choice.get("delta", {}).get("content", ""))
    return found


def bare(event: str) -> str:
    """Without what differs between calls, and between readers."""
    return re.sub(r'"(id|created|text|content)":("(\\.|[^"\\])*"|\d+)', "", event)


def slowly(*pieces: str | bytes) -> Script:
    """So that every step finds its reader waiting."""

    def script(request: EngineRequest) -> Iterator[Step]:
        for piece in pieces:
            time.sleep(0.02)
            yield [token(piece)]

    return script


def test_a_fault_outside_the_task_ends_its_stream_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    content = ChatFrames._content

    def faulty(frames: ChatFrames, index: int, text: str) -> bytes:
        if "zz" in text:
            raise RuntimeError("a fault in the frames")
        return content(frames, index, text)

    monkeypatch.setattr(ChatFrames, "_content", faulty)
    with running(slowly("Hello", "zz", "!")) as server:
        *_, text, error = events(server.chat(stream=True))
        assert "Hello" in text
        assert json.loads(error)["error"]["type"] == "server_error"
        assert server.complete(stream=True).text.endswith("data: [DONE]\n\n")
        wait_for(server.idle)
