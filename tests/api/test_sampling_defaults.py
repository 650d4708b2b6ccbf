"""Where a request is silent the model's own defaults hold, on every route; what it says wins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from invar.engine.request import EngineRequest
from invar.engine.sampling_defaults import SamplingDefaults

from .scripted import RunningServer, running, says

OWN = {
    **{"temperature": 0.5, "top_p": 0.75, "top_k": 20, "min_p": 0.25, "repetition_penalty": 1.25},
    "max_tokens": 9,
}
NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
MESSAGES = [{"role": "user", "content": "Hi"}]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4, "model": "scripted"},
    "/v1/responses": {"input": "Hi", "store": False},
}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running(says("Hello"), defaults=SamplingDefaults(OWN)) as server:
        yield server


def request_of(server: RunningServer, route: str, **fields: Any) -> EngineRequest:
    answer = server.http.post(route, json=ROUTES[route] | fields)
    assert answer.status_code == 200, answer.text
    return server.engine.seen[-1]


@pytest.mark.parametrize("route", ROUTES)
def test_silent_requests_get_them(server: RunningServer, route: str) -> None:
    sampling = request_of(server, route).sampling
    assert [getattr(sampling, name) for name in NAMES] == [OWN[name] for name in NAMES]


@pytest.mark.parametrize("route", ROUTES)
def test_what_a_request_says_wins(server: RunningServer, route: str) -> None:
    sampling = request_of(server, route, temperature=1.0, top_p=1.0).sampling
    assert (sampling.temperature, sampling.top_p) == (1.0, 1.0)
    if route in ("/v1/chat/completions", "/v1/completions"):
        off = {"top_k": 0, "min_p": 0, "repetition_penalty": 1}
        sampling = request_of(server, route, **off).sampling
        assert [getattr(sampling, name) for name in off] == list(off.values())


def test_the_length_of_answers(server: RunningServer) -> None:
    chat = "/v1/chat/completions"
    assert request_of(server, chat).max_tokens == 9
    assert request_of(server, chat, max_tokens=30).max_tokens == 30
    assert request_of(server, "/v1/responses").max_tokens == 9
    assert request_of(server, "/v1/completions").max_tokens == 16  # OpenAI's default is a value
    with running(says("Hello"), defaults=SamplingDefaults(OWN, max_tokens=6)) as bounded:
        for route in ROUTES:
            assert request_of(bounded, route).max_tokens == (4 if route == "/v1/messages" else 6)
            name = "max_output_tokens" if route == "/v1/responses" else "max_tokens"
            assert request_of(bounded, route, **{name: 30}).max_tokens == 6


def test_responses_say_what_was_used(server: RunningServer) -> None:
    for fields, used in (({}, (0.5, 0.75)), ({"temperature": 1.0}, (1.0, 0.75))):
        body = ROUTES["/v1/responses"] | fields
        answer = server.http.post("/v1/responses", json=body).json()
        assert (answer["temperature"], answer["top_p"]) == used
