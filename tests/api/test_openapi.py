"""The OpenAPI document is true: it names every route, and real answers have the shapes it names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from invar.api.answers import Error, MessageError
from invar.api.response_store import KeptResponses, ResponseStore
from invar.api.routes import ROUTES, Route

from .scripted import RunningServer, running, says


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("kept")
    kept = KeptResponses(ResponseStore(str(folder)))
    with running(says("Hello", " world", "!"), responses=kept) as server:
        yield server


def document(server: RunningServer) -> dict[str, Any]:
    found: dict[str, Any] = server.http.get("/openapi.json").json()
    return found


def test_every_route_is_there(server: RunningServer) -> None:
    paths = document(server)["paths"]
    expected = {(route.path.replace(":path", ""), m) for route in ROUTES for m in route.methods}
    assert {(path, m.upper()) for path, methods in paths.items() for m in methods} == expected
    names = [one["operationId"] for methods in paths.values() for one in methods.values()]
    assert len(set(names)) == len(names)


def test_every_reference_is_there(server: RunningServer) -> None:
    text = json.dumps(document(server))
    schemas = document(server)["components"]["schemas"]
    references = set(re.findall(r'"\$ref": "#/components/schemas/([^"]+)"', text))
    assert references == schemas.keys() & references
    assert not [name for name in schemas if "." in name]  # two types of one name


def test_fields_that_are_refused_are_told(server: RunningServer) -> None:
    fields = document(server)["components"]["schemas"]["ChatFields"]["properties"]
    assert fields["best_of"]["enum"] == [None, 1]
    assert "cannot be honoured" in fields["audio"]["description"]
    assert {"tools", "service_tier", "temperature"} <= fields.keys()


HI = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {"messages": HI}, {"messages": HI, "n": 2, "max_tokens": 2, "logprobs": True,
                           "top_logprobs": 2, "prompt_logprobs": 1}],
    "/v1/completions": [
        {"prompt": "Hi"}, {"prompt": ["a", "b"], "logprobs": 2, "echo": True,
                           "prompt_logprobs": 1, "stop": "wor"}],
    "/v1/messages": [
        {"model": "scripted", "max_tokens": 9, "messages": HI},
        {"model": "scripted", "max_tokens": 999, "messages": HI, "stop_sequences": ["wor"]}],
    "/v1/messages/count_tokens": [{"model": "scripted", "messages": HI}],
    "/v1/responses": [
        {"input": "Hi"}, {"input": HI, "max_output_tokens": 2, "top_logprobs": 2,
                          "background": True, "metadata": {"a": "b"}, "temperature": 1,
                          "reasoning": {"effort": "low"}, "tools": [{"type": "web_search"}]}],
    "/v1/responses/input_tokens": [{"input": "Hi"}],
    "/tokenize": [{"prompt": "Hi", "return_token_strs": True}, {"messages": HI}],
    "/detokenize": [{"tokens": [3, 4]}],
}  # fmt: skip


def path_of(server: RunningServer, route: Route) -> str:
    name = server.http.post("/v1/responses", json={"input": "Hi", "background": True}).json()["id"]
    return route.path.replace("{id}", name).replace("{model:path}", "org/scripted")


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.methods[0]} {route.path}")
def test_answers_have_the_shapes(server: RunningServer, route: Route) -> None:
    bodies: list[Any] = [None]
    if route.body is not None:
        bodies = BODIES[route.path.replace("/v1/tok", "/tok").replace("/v1/det", "/det")]
    for method in route.methods:
        for body in bodies:
            answer = server.http.request(method, path_of(server, route), json=body)
            assert answer.status_code == 200, answer.text
            if isinstance(route.answer, type) and method != "HEAD":
                msgspec.convert(answer.json(), route.answer)
            elif isinstance(route.answer, str):
                assert answer.headers["content-type"].startswith(route.answer)
    if route.body is not None:
        kind = MessageError if route.path.startswith("/v1/messages") else Error
        for content in (b"{", b'{"model": 5}', b'{"model": "gpt-9", "messages": []}'):
            answer = server.http.post(route.path, content=content)
            assert answer.status_code in (400, 404)
            msgspec.json.decode(answer.content, type=kind)


# --------------------------------------------------------------------------------------- fuzzing


SCALARS = st.one_of(
    st.none(), st.booleans(), st.text(max_size=12), st.floats(), st.integers(),
    st.sampled_from([0, 1, -1, 2**31, 2**63, 2**64, 1e308, -0.0, "", "auto", "none", "user",
                     "assistant", "text", "input_text", "tool_result", "tool_use", "function_call",
                     "reasoning", "thinking", "message", "enabled", "\udc80", "\x00", "Hi", 5]),
)  # fmt: skip
NAMES = st.sampled_from(sorted({
    "role", "content", "type", "text", "name", "id", "input", "tool_use_id", "call_id",
    "arguments", "output", "function", "tool_calls", "include_usage", "format", "effort", "mode",
    "user_id", "edits", "summary", "refusal", "thinking", "5", "-1", "x" * 70,
}))  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=5),
    max_leaves=8,
)


def fuzzed(route: Route) -> st.SearchStrategy[bytes]:
    """Bodies that are nearly right: some fields of a good one are replaced or left out."""
    assert route.body is not None
    rules = route.rules
    names = [*route.body.__struct_fields__, *rules.refusals, *rules.known, "unknown\n"]
    good = BODIES[route.path]
    changes = st.dictionaries(st.sampled_from(names), VALUES, max_size=3)
    # Python's own JSON, for what is none: NaN, Infinity and lone surrogates.
    return st.builds(lambda body, new: json.dumps(body | new).encode(), st.sampled_from(good),
                     changes)  # fmt: skip


@pytest.mark.parametrize("path", sorted(BODIES))
def test_no_body_is_answered_with_a_5xx(server: RunningServer, path: str) -> None:
    route = next(route for route in ROUTES if route.path == path)
    kind = MessageError if path.startswith("/v1/messages") else Error

    @settings(max_examples=80, deadline=None, derandomize=True, database=None,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(fuzzed(route))
    def send(body: bytes) -> None:
        answer: httpx.Response = server.http.post(path, content=body)
        assert answer.status_code < 500, (body, answer.text)
        if answer.status_code != 200:
            msgspec.json.decode(answer.content, type=kind)
            assert len(answer.content) < 1500
        elif "json" in answer.headers["content-type"]:
            assert isinstance(route.answer, type)
            msgspec.json.decode(answer.content, type=route.answer)

    send()
    assert server.idle()
