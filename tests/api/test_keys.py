"""Keys: who is let in, where, and how much they may use."""

from __future__ import annotations

import gc
import hashlib
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from invar.api.errors import ApiError
from invar.api.key_use import REQUESTS, KeyUse
from invar.api.keys import ApiKey, KeyRing, KeySettings, key_ring
from invar.api.rates import Bucket, DrainRate, duration_text
from invar.api.routes import ROUTES

from .scripted import RunningServer, endless, running, says
from .test_disconnects import open_request, wait_for
from .test_limits import error_of

OPEN = {"/health", "/ready", "/ping"}


def limited(**settings: Any) -> KeyRing:
    return KeyRing([ApiKey("team", hashlib.sha256(b"secret").digest(), KeySettings(**settings))])


def ask(server: RunningServer, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
    body = {"prompt": "Hi", "max_tokens": 4, **fields}
    return server.http.post(path, json=body, headers={"authorization": "Bearer secret"})


def test_every_route_but_health_asks_for_a_key() -> None:
    with running(says("Hello"), keys=key_ring(["secret", "other"], None)) as server:
        for route in ROUTES:
            path = route.path.replace("{model:path}", "scripted")
            for method in route.methods:
                answer = server.http.request(method, path, content=b"{}")
                assert (answer.status_code != 401) == (path in OPEN), path
        for path in ("/nope", "/v1/nope"):
            assert server.http.get(path).status_code == 401
        preflight = {"origin": "http://x", "access-control-request-method": "POST"}
        assert server.http.options("/v1/completions", headers=preflight).status_code == 200


@pytest.mark.parametrize("headers", [
    {"authorization": "Bearer secret"}, {"authorization": "bearer other"}, {"x-api-key": "other"},
    {"api-key": "secret"},
])  # fmt: skip
def test_keys_that_are_right(headers: dict[str, str]) -> None:
    with running(says("Hello"), keys=key_ring(["secret", "other"], None)) as server:
        assert server.http.get("/v1/models", headers=headers).status_code == 200
        assert server.http.get("/metrics", headers=headers).status_code == 200


@pytest.mark.parametrize("headers", [
    {}, {"authorization": "Bearer"}, {"authorization": "Bearer wrong"}, {"x-api-key": ""},
    {"authorization": "Basic secret"}, {"authorization": "secret"}, {"x-api-key": "secretx"},
])  # fmt: skip
def test_keys_that_are_wrong(headers: dict[str, str]) -> None:
    with running(says("Hello"), keys=key_ring(["secret", "other"], None)) as server:
        answer = server.http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
        error = error_of(answer, 401)
        assert error["type"] == "authentication_error"
        assert error["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
        shaped = server.http.post("/v1/messages", json={}, headers=headers)
        assert shaped.status_code == 401
        assert shaped.json()["error"]["type"] == "authentication_error"
        assert shaped.json()["request_id"] == shaped.headers["x-request-id"]
        assert not server.engine.seen


def test_metrics_can_be_open() -> None:
    with running(says("Hello"), keys=key_ring(["secret"], None), open_metrics=True) as server:
        assert server.http.get("/metrics").status_code == 200
        assert "secret" not in server.http.get("/metrics").text


def test_keys_are_kept_as_digests_only() -> None:
    secret = "sk-" + "q" * 20
    ring = key_ring([secret], None)
    assert ring.find({b"x-api-key": secret.encode()}) is ring.keys[0]
    held = [vars(ring), *(vars(key) for key in ring.keys)]
    assert secret not in repr(held)
    gc.collect()


# ------------------------------------------------------------------------------ what a key may do


def test_models_of_a_key() -> None:
    with running(says("Hello"), keys=limited(models=["org/scripted"])) as server:
        assert ask(server, model="org/scripted").status_code == 200
        assert ask(server).status_code == 200  # the one model there is, of which it is a name
        error = error_of(ask(server, model="scripted"), 403)
        assert (error["code"], error["param"]) == ("model_not_allowed", "model")
        headers = {"x-api-key": "secret"}
        models = server.http.get("/v1/models", headers=headers).json()["data"]
        assert [model["id"] for model in models] == ["org/scripted"]
    with running(says("Hello"), keys=limited(models=["another"])) as server:
        error_of(ask(server), 403)
        assert not server.engine.seen


def test_requests_a_minute() -> None:
    with running(says("Hello"), keys=limited(requests_per_minute=3)) as server:
        now = server.server.keys.clock()
        server.server.keys.clock = lambda: now
        for left in (2, 1, 0):
            answer = ask(server)
            assert answer.status_code == 200
            assert answer.headers["x-ratelimit-limit-requests"] == "3"
            assert answer.headers["x-ratelimit-remaining-requests"] == str(left)
        assert answer.headers["x-ratelimit-reset-requests"] == "1m0s"
        refused = ask(server)
        error = error_of(refused, 429)
        assert (error["code"], error["type"]) == ("rate_limit_exceeded", "requests")
        assert refused.headers["retry-after"] == "20"
        assert server.http.get("/v1/models", headers={"api-key": "secret"}).status_code == 200
        server.server.keys.clock = lambda: now + 20
        assert ask(server).status_code == 200
        assert ask(server).status_code == 429


def test_tokens_a_minute_are_reserved_and_settled() -> None:
    with running(says("Hello", " world"), keys=limited(tokens_per_minute=100)) as server:
        now = server.server.keys.clock()
        server.server.keys.clock = lambda: now
        answer = ask(server, max_tokens=50)
        used = answer.json()["usage"]["total_tokens"]
        prompt = answer.json()["usage"]["prompt_tokens"]
        # While it ran, all that it might have used was set aside.
        assert answer.headers["x-ratelimit-remaining-tokens"] == str(100 - 50 - prompt)
        again = ask(server, max_tokens=50, stream=True)
        assert again.headers["x-ratelimit-remaining-tokens"] == str(100 - used - 50 - prompt)
        left = 100 - 2 * used
        # More than is left, and no more than there can be: it is a matter of time.
        refused = ask(server, max_tokens=90)
        assert error_of(refused, 429)["type"] == "tokens"
        wait_s = int(refused.headers["retry-after"])
        assert (wait_s - 1) * 100 / 60 <= 90 + prompt - left <= wait_s * 100 / 60
        server.server.keys.clock = lambda: now + wait_s
        assert ask(server, max_tokens=90).status_code == 200
        # An answer that may be longer than a minute's worth is let in once all of it is there.
        server.server.keys.clock = lambda: now + 1000
        assert ask(server, max_tokens=200).status_code == 200
        hopeless = ask(server, prompt="zz" * 130)
        assert error_of(hopeless, 429)["type"] == "tokens"
        assert hopeless.headers["x-should-retry"] == "false"


def test_tokens_of_clients_that_left_are_settled() -> None:
    with running(endless(pause_s=0.01), keys=limited(tokens_per_minute=1000)) as server:
        now = server.server.keys.clock()
        server.server.keys.clock = lambda: now
        (key,) = server.server.keys.keys
        assert key.tokens is not None
        for stream in (True, False):
            body = {"prompt": "Hi", "max_tokens": 200, "stream": stream}
            client = open_request(server, "/v1/completions", body, "x-api-key: secret\r\n")
            wait_for(lambda: server.engine.running)
            time.sleep(0.1)
            client.close()
            assert server.idle()
        end = time.monotonic() + 5
        while key.running and time.monotonic() < end:
            time.sleep(0.01)
        assert 1000 - 2 * 100 < key.tokens.left(now) < 1000
        assert key.running == 0


def test_requests_at_a_time() -> None:
    with running(endless(pause_s=0.01), keys=limited(max_parallel_requests=2)) as server:
        hold = threading.Event()

        def held() -> int:
            body = {"prompt": "Hi", "max_tokens": 200, "stream": True}
            headers = {"authorization": "Bearer secret"}
            with server.http.stream("POST", "/v1/completions", json=body, headers=headers) as got:
                hold.wait(20)
                got.read()
            return got.status_code

        with ThreadPoolExecutor(2) as pool:
            running_ones = [pool.submit(held) for _ in range(2)]
            end = time.monotonic() + 10
            while len(server.engine.running) < 2 and time.monotonic() < end:
                time.sleep(0.005)
            refused = ask(server)
            assert error_of(refused, 429)["code"] == "rate_limit_exceeded"
            assert int(refused.headers["retry-after"]) >= 1
            hold.set()
            assert [one.result() for one in running_ones] == [200, 200]
        assert server.idle()
        assert ask(server, max_tokens=1).status_code == 200
        # What is refused for another reason is given back too.
        for _ in range(5):
            assert ask(server, n=0).status_code == 400
        assert server.server.keys.keys[0].running == 0


def test_a_bucket() -> None:
    bucket = Bucket(60, KeyUse(1), 0, REQUESTS)
    assert bucket.take(60, 100.0) == 0
    assert bucket.take(2, 100.0) == 2
    assert bucket.take(2, 101.5) == 0.5
    assert bucket.take(2, 102.0) == 0
    bucket.give_back(-30, 102.0)  # used more than was reserved
    assert bucket.take(1, 102.0) == 31
    assert bucket.left(102.0) == 0
    bucket.give_back(1000, 102.0)
    assert bucket.left(102.0) == 60
    assert bucket.full_in(102.0) == 0


def test_processes_count_together(tmp_path: Path) -> None:
    """Each has a ring of its own over one file, as processes have; one is replaced."""
    settings: dict[str, Any] = {
        "requests_per_minute": 5, "tokens_per_minute": 100, "max_parallel_requests": 3
    }  # fmt: skip

    def process(index: int) -> ApiKey:
        ring = limited(**settings)
        ring.share(tmp_path / "keys", 2, index)
        return ring.keys[0]

    one, two = process(0), process(1)
    one.begin(10.0)
    two.begin(10.0)
    two.begin(10.0)
    assert (one.running, two.running) == (3, 3)
    with pytest.raises(ApiError) as parallel:
        one.begin(10.0)
    assert "3 requests at a time" in parallel.value.message
    KeyUse(1, tmp_path / "keys", 2).free(1)  # as the main process does once one was killed
    assert one.running == 1
    two = process(1)
    assert one.running == 1
    assert two.headers(10.0)["x-ratelimit-remaining-requests"] == "2"
    two.begin(10.0)
    one.begin(10.0)
    two.end(1.0)
    with pytest.raises(ApiError) as rate:
        two.begin(10.0)
    assert "5 a minute" in rate.value.message
    assert one.reserve(40, 20, 10.0) == 60
    with pytest.raises(ApiError):
        two.reserve(40, 20, 10.0)
    one.settle(60, 45, 10.0)
    assert two.headers(10.0)["x-ratelimit-remaining-tokens"] == "55"


def test_durations_and_drain() -> None:
    assert [duration_text(s) for s in (0, 0.02, 1, 1.54, 61, 360)] == [
        "0ms", "20ms", "1s", "1.5s", "1m1s", "6m0s",
    ]  # fmt: skip
    drain = DrainRate()
    assert drain.wait_s(1, 0, 0.0) == 5
    for second in range(10):
        drain.add(100, float(second))
    assert drain.wait_s(1, 0, 10.0) in (1, 2)
    assert drain.wait_s(20, 0, 10.0) in (20, 21)
    assert drain.wait_s(0, 1000, 10.0) in (10, 11)
    assert drain.wait_s(10**6, 0, 10.0) == 120
    assert drain.wait_s(1, 0, 100.0) == 5


# ---------------------------------------------------------------------------------------- files


def written(folder: Path, text: str, name: str = "keys.yaml") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_files_of_keys(tmp_path: Path) -> None:
    plain = key_ring([], written(tmp_path, "one\n\n two \n", "keys.txt"))
    assert [key.name for key in plain.keys] == ["line-1", "line-3"]
    assert plain.find({b"authorization": b"Bearer two"}) is plain.keys[1]
    digest = hashlib.sha256(b"hidden").hexdigest()
    text = (
        f"keys:\n- name: a\n  key: one\n  models: [m]\n- sha256: {digest}\n"
        "  tokens_per_minute: 1000\n  requests_per_minute: 10\n  max_parallel_requests: 2\n"
    )
    ring = key_ring(["given"], written(tmp_path, text))
    assert [key.name for key in ring.keys] == ["key-1", "a", "key-2"]
    hidden = ring.find({b"api-key": b"hidden"})
    assert hidden is ring.keys[2]
    assert hidden.tokens is not None
    assert (hidden.tokens.size, hidden.max_parallel) == (1000, 2)
    as_json = json.dumps({"keys": [{"key": "one", "name": "a"}]}, indent=1)
    assert key_ring([], written(tmp_path, as_json, "keys.json")).keys[0].name == "a"


SECRET = "sk-do-not-print"


@pytest.mark.parametrize(("text", "said"), [
    (f"keys:\n- key: {SECRET}\n  name: a\n  models: 5\n", "line 4: keys[0].models: Expected"),
    (f"keys:\n- key: {SECRET}\n- key: b\n  rpm: 5\n", "line 3: keys[1]: Object contains unknown"),
    (f"keys:\n- key: {SECRET}\n  tokens_per_minute: 0\n", "line 3: keys[0].tokens_per_minute:"),
    (f"keys:\n- key: {SECRET}\n  tokens_per_minute: many\n", "line 3: keys[0].tokens_per_minute:"),
    (f"keys:\n- key: {SECRET}\n  sha256: abc\n", "line 2: keys[0]: give either"),
    (f"keys:\n- key: {SECRET}\n- name: b\n", "line 3: keys[1]: give either"),
    (f"keys:\n- sha256: {SECRET}\n", "line 2: keys[0].sha256: 64 hex"),
    (f"keys:\n- key: '{SECRET} x'\n", "keys[0].key: a key is"),
    (f"keys:\n- key: {SECRET}\n  name: 'a b'\n", "keys[0].name: "),
    (f"keys:\n- key: {SECRET}\n  models: []\n", "keys[0].models: name a model"),
    (f"keys:\n- key: {SECRET}\n- key: {SECRET}\n", "key-1 and key-2 are the same"),
    (f"keys:\n- {{key: {SECRET}, name: a}}\n- {{key: b, name: a}}\n", "two have the name a"),
    (f"keys:\n- key: {SECRET}\n  name: [\n", "line 4, column 1:"),
    ("", "line 1: keys: Expected `object`, got `null`"),
    ("keys: []\n", "there is no key in it"),
    ("- a\n", "line 1: keys: Expected `object`"),
    ("[" * 100_000, "nested too deeply"),
])  # fmt: skip
def test_files_that_are_wrong_say_where(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ValueError, match="keys") as caught:
        key_ring([], written(tmp_path, text))
    assert said in str(caught.value)
    assert SECRET not in str(caught.value)


def test_keys_that_are_none(tmp_path: Path) -> None:
    for given, path in (
        ([""], None), (["a b"], None), (["é"], None), (["x"] * 2, None),
        ([], str(tmp_path / "absent")), ([], written(tmp_path, "\n\n", "empty.txt")),
        ([], written(tmp_path, "a b\n", "spaces.txt")),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"key|No such"):
            key_ring(given, path)
