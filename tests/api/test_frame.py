"""The last resort: what nobody has caught is said once in the log, and in shape to the client."""

from __future__ import annotations

import json
from typing import Any

import pytest

from invar.api.chat import ChatFrames

from .scripted import endless, events, running, says
from .test_limits import error_of


def fail(*args: Any, **options: Any) -> Any:
    raise ZeroDivisionError("a private matter")


def failures(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Records with a traceback."""
    return [record.getMessage() for record in caplog.records if record.exc_info]


def test_a_failure_is_an_answer_in_shape(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with running(says("Hello")) as server:
        monkeypatch.setattr(server.server.metrics, "render", fail)
        answer = server.http.get("/metrics", headers={"x-request-id": "mine"})
        error = error_of(answer, 500)
        assert error["code"] == "internal_error"
        assert "mine" in error["message"]
        assert "private" not in answer.text
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["x-request-id"] == "mine"
        assert answer.headers["x-should-retry"] == "false"
        assert failures(caplog) == ["request mine failed"]
        monkeypatch.undo()
        assert server.http.get("/metrics").status_code == 200


@pytest.mark.parametrize("error", [RecursionError, MemoryError, ValueError, KeyError])
def test_whatever_the_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: type[Exception]
) -> None:
    def give_up(*args: Any, **options: Any) -> Any:
        raise error

    with running(says("Hello")) as server:
        monkeypatch.setattr(server.server.engine, "submit", give_up)
        answers = [server.chat(), server.chat(stream=True), server.complete()]
        for answer in answers:
            assert error_of(answer, 500)["type"] == "server_error"
            assert len(answer.headers["x-request-id"]) == 32
        assert len(failures(caplog)) == 3


def test_a_failure_in_a_stream_is_an_event_without_done(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    deltas, calls = ChatFrames.deltas, []

    def some(self: ChatFrames, given: Any) -> Any:
        calls.append(given)
        return deltas(self, given) if len(calls) < 4 else fail()

    monkeypatch.setattr(ChatFrames, "deltas", some)
    with running(endless()) as server:
        answer = server.chat(stream=True, max_tokens=100)
        data = events(answer)
        error = json.loads(data[-1])["error"]
        assert error["code"] == "internal_error"
        assert answer.headers["x-request-id"] in error["message"]
        assert "[DONE]" not in data
        assert all(json.loads(d)["choices"][0]["finish_reason"] is None for d in data[:-1])
        assert server.idle()
    assert len(failures(caplog)) == 1
