"""The routes over the real engine and a tiny model: nothing is scripted here."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from invar.api.keys import KeyRing
from invar.cli.http_side import HttpOptions, http_server
from invar.config import EngineConfig
from invar.engine.loader import LoadedModel, TextSide, load_engine
from invar.serving.messages import EngineFacts

from .in_process import ThreadPort
from .scripted import events, listening

TINY = Path(__file__).parents[1] / "golden" / "llama_gqa.gguf"


@dataclass
class RealServer:
    http: httpx.Client
    loaded: LoadedModel

    def complete(self, **fields: Any) -> dict[str, Any]:
        answer = self.http.post("/v1/completions", json={"prompt": [3, 4, 5], **fields})
        assert answer.status_code == 200, answer.text
        body: dict[str, Any] = answer.json()
        return body

    def settle(self) -> None:
        """Waits until nothing is in flight nor on its way, then looks at every page."""
        end = time.monotonic() + 20
        idle_since = time.monotonic()
        while time.monotonic() < idle_since + 0.3:
            assert time.monotonic() < end
            time.sleep(0.005)
            if self.loaded.engine.has_unfinished:
                idle_since = time.monotonic()
        self.loaded.engine.check_integrity()
        assert self.loaded.engine.stats().kv_usage == 0


@contextmanager
def real_server(config: EngineConfig, **options: Any) -> Iterator[RealServer]:
    loaded = load_engine(config)
    facts = EngineFacts(
        vocab_size=loaded.info.vocab_size,
        max_model_len=loaded.engine.max_model_len,
        kv_capacity_tokens=loaded.engine.kv_capacity_tokens,
        kv_bytes=0,
        fingerprint=loaded.info.fingerprint,
    )
    text = TextSide(loaded.tokenizer, loaded.chat_template, loaded.defaults)
    server = http_server(
        config, facts, text, ThreadPort(loaded.engine), HttpOptions(KeyRing(), **options)
    )
    with listening(server) as url, httpx.Client(base_url=url, timeout=60) as http:
        yield RealServer(http, loaded)
    loaded.close()


@pytest.fixture(scope="module")
def real() -> Iterator[RealServer]:
    with real_server(EngineConfig(model=str(TINY), max_num_seqs=4, num_threads=2)) as server:
        yield server


SEEDED = {"seed": 11, "temperature": 0.9, "max_tokens": 24, "logprobs": 3, "ignore_eos": True}


def test_streamed_is_plain(real: RealServer) -> None:
    plain = real.complete(**SEEDED)["choices"][0]
    body = {"prompt": [3, 4, 5], "stream": True, **SEEDED}
    text, tokens, logprobs = "", [], []
    for event in events(real.http.post("/v1/completions", json=body))[:-1]:
        (choice,) = json.loads(event)["choices"]
        text += choice["text"]
        if choice["logprobs"]:
            tokens += choice["logprobs"]["tokens"]
            logprobs += choice["logprobs"]["token_logprobs"]
    assert text == plain["text"]
    assert tokens == plain["logprobs"]["tokens"]
    assert logprobs == plain["logprobs"]["token_logprobs"]


def test_b19_b26_an_answer_depends_on_its_request_alone(real: RealServer) -> None:
    alone = real.complete(**SEEDED)["choices"]
    four = real.complete(**SEEDED | {"n": 4})["choices"]
    assert four[0] == alone[0]
    assert len({choice["text"] for choice in four}) > 1

    def stranger(index: int) -> Any:
        fields = {"prompt": [6 + index] * (5 + 9 * index), "max_tokens": 40, "seed": None}
        return real.complete(**fields, temperature=1.3)

    with ThreadPoolExecutor(9) as pool:
        strangers = [pool.submit(stranger, i) for i in range(6)]
        crowded = [pool.submit(real.complete, **SEEDED) for _ in range(3)]
        assert all(answer.result()["choices"] == alone for answer in crowded)
        assert all(one.result() for one in strangers)
    assert real.complete(**SEEDED | {"n": 4})["choices"] == four
    real.settle()


def test_b41_pages_come_back_from_clients_that_left(real: RealServer) -> None:
    body = {"prompt": [3] * 40, "max_tokens": 150, "ignore_eos": True}
    for index in range(24):
        with pytest.raises(httpx.ReadTimeout):
            # Plain and streamed, running and queued: the timeout closes the socket.
            real.http.post(
                "/v1/completions",
                json=body | {"n": 1 + index % 3, "temperature": 1},
                timeout=httpx.Timeout(60, read=0.001 + 0.001 * (index % 4)),
            )
    real.settle()
    assert real.complete(max_tokens=3, ignore_eos=True)["usage"]["completion_tokens"] == 3


def test_b33_b36_the_window_is_the_limit(real: RealServer) -> None:
    window = real.loaded.door.max_model_len
    ids = [3] * (window - 8)
    assert real.complete(prompt=ids, max_tokens=8, ignore_eos=True)["usage"]["total_tokens"] == (
        window
    )
    answer = real.http.post("/v1/completions", json={"prompt": ids, "max_tokens": 9})
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    real.settle()


def test_b50_what_the_pool_cannot_hold_is_refused_and_blocks_nobody() -> None:
    """SmolLM2's 22.5 KiB a token in 24 MiB: less than the 8,192 tokens that it was made for."""
    with real_server(EngineConfig(model="smollm2", kv_cache_memory_bytes=24 << 20)) as server:
        capacity = server.loaded.door.max_model_len
        assert 900 < capacity < 1400

        def ask(length: int, max_tokens: int) -> httpx.Response:
            body = {"prompt": [5 + length] * length, "max_tokens": max_tokens, "ignore_eos": True}
            return server.http.post("/v1/completions", json=body)

        with ThreadPoolExecutor(12) as pool:
            long, over = pool.submit(ask, 1500, 1), pool.submit(ask, 900, 500)
            short = [pool.submit(ask, 10 + index, 4) for index in range(10)]
            for refused in (long.result(), over.result()):
                assert refused.status_code == 400
                assert f"maximum context length is {capacity} tokens" in refused.text
            assert {one.result().json()["usage"]["completion_tokens"] for one in short} == {4}
        filled = ask(900, capacity - 900).json()
        assert filled["choices"][0]["finish_reason"] == "length"
        assert filled["usage"]["total_tokens"] == capacity
        server.settle()


def test_echo_and_prompt_logprobs(real: RealServer) -> None:
    body = real.complete(prompt=[3, 4, 5, 6], echo=True, logprobs=2, max_tokens=0)
    logprobs = body["choices"][0]["logprobs"]
    assert len(logprobs["token_logprobs"]) == len(logprobs["tokens"]) == 4
    assert logprobs["token_logprobs"][0] is None
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    assert body["usage"]["completion_tokens"] == 0
    # The same prompt with an answer behind it, and one that fills the context.
    answered = real.complete(prompt=[3, 4, 5, 6], echo=True, logprobs=2, max_tokens=1)
    for name, values in answered["choices"][0]["logprobs"].items():
        assert logprobs[name] == values[:4]
    window = real.loaded.door.max_model_len
    full = real.complete(prompt=[3] * window, echo=True, logprobs=0, max_tokens=0)
    assert len(full["choices"][0]["logprobs"]["token_logprobs"]) == window
    real.settle()


@pytest.mark.parametrize("length", [1, 32, 33, 96])
def test_b49_scores_of_an_echo_are_those_of_a_cold_prompt(real: RealServer, length: int) -> None:
    prompt = [11 + index * index % 200 for index in range(length)]
    echo = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 2, "temperature": 0}
    assert real.http.post("/v1/cache/reset").status_code == 200
    cold = real.complete(**echo)["choices"]
    assert len(cold[0]["logprobs"]["token_logprobs"]) == length + 2
    assert real.complete(**echo)["choices"] == cold
    assert cached(real.complete(prompt=[*prompt, 7])) == length
    assert real.complete(**echo)["choices"] == cold
    real.settle()


def test_metrics_of_the_real_engine(real: RealServer) -> None:
    text = real.http.get("/metrics").text
    for name in ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting"):
        (line,) = [line for line in text.splitlines() if line.startswith(f"vllm:{name}{{")]
        assert float(line.rpartition(" ")[2]) == 0


# -------------------------------------------------------------------------------- prefix caching


def cached(answer: dict[str, Any]) -> int:
    count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


def metric(real: RealServer, name: str) -> float:
    lines = real.http.get("/metrics").text.splitlines()
    return next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def test_b48_usage_and_metrics_count_what_was_reused(real: RealServer) -> None:
    prompt = [7 + i % 90 for i in range(100)]
    real.complete(prompt=[1])
    found, asked = (metric(real, f"vllm:prefix_cache_{n}_total") for n in ("hits", "queries"))
    assert cached(real.complete(prompt=prompt, max_tokens=4, cache_salt="A")) == 0
    assert cached(real.complete(prompt=prompt, max_tokens=4, cache_salt="B")) == 0
    assert cached(real.complete(prompt=prompt, max_tokens=4, cache_salt="A")) == 99
    real.settle()
    assert metric(real, "vllm:prefix_cache_hits_total") - found == 99
    assert metric(real, "vllm:prefix_cache_queries_total") - asked == 300
    assert metric(real, "invar:prefix_cache_tokens") >= 200
    assert 0 < metric(real, "invar:kv_cache_unfilled_perc") < 1
    assert metric(real, "invar:kv_cache_shared_bytes") == 0
    refuses = {"cache_salt": "A", "skip_reading_prefix_cache": True}
    assert cached(real.complete(prompt=prompt, max_tokens=4, **refuses)) == 0


def test_b25_choices_report_what_the_call_found(real: RealServer) -> None:
    fields = {"prompt": [5 + i % 80 for i in range(60)], "n": 3, "temperature": 1.0, "seed": 3}
    assert cached(real.complete(**fields)) == 0
    assert cached(real.complete(**fields)) == 59
    real.settle()


@pytest.mark.parametrize("path", ["/v1/cache/reset", "/reset_prefix_cache"])
def test_the_cache_is_reset(real: RealServer, path: str) -> None:
    prompt = [9 + i % 70 for i in range(50)]
    real.complete(prompt=prompt)
    before = real.complete(prompt=prompt, **SEEDED)
    assert cached(before) == 49
    assert real.http.post(path).status_code == 200
    after = real.complete(prompt=prompt, **SEEDED)
    assert cached(after) == 0
    assert after["choices"] == before["choices"]
    assert real.http.get(path).status_code == 405
