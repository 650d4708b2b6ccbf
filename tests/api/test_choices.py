"""Several choices, several callers: each gets its own answer and no other."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from invar.engine.request import EngineRequest

from .scripted import RunningServer, Step, endless, events, running, says, token

WORDS = ("Hello", "one", "tool", "zz")


def by_choice(request: EngineRequest) -> Iterator[Step]:
    """Choice i says word i, i + 1 times."""
    for _ in range(request.sampling.choice + 1):
        yield [token(WORDS[request.sampling.choice])]


def by_prompt(request: EngineRequest) -> Iterator[Step]:
    """Repeats the last token of the prompt."""
    for _ in range(5):
        yield [int(request.prompt_token_ids[-1])]


def test_b25_n_choices_come_back_once_each() -> None:
    expected = {i: WORDS[i] * (i + 1) for i in range(3)}
    with running(by_choice) as server:
        body = server.chat(n=3).json()
        found = {c["index"]: c["message"]["content"] for c in body["choices"]}
        assert found == expected
        assert [c["finish_reason"] for c in body["choices"]] == ["stop"] * 3
        # 1 + 2 + 3 words and three ends; the prompt counts once.
        assert body["usage"]["completion_tokens"] == 9
        assert body["usage"]["prompt_tokens"] == server.chat().json()["usage"]["prompt_tokens"]
        streamed: Counter[int] = Counter()
        texts = dict.fromkeys(range(3), "")
        for item in events(server.chat(n=3, stream=True))[:-1]:
            (choice,) = json.loads(item)["choices"]
            texts[choice["index"]] += choice["delta"].get("content", "")
            streamed[choice["index"]] += choice["finish_reason"] is not None
        assert texts == expected
        assert streamed == Counter({0: 1, 1: 1, 2: 1})


def test_b26_choices_of_one_seed_draw_differently_and_repeatably() -> None:
    """The draw is keyed by (seed, choice): the engine hears one seed and four choices."""
    with running(says("Hello")) as server:
        for _ in range(2):
            assert server.chat(n=4, seed=5, temperature=1.2).status_code == 200
        assert server.chat(n=4, temperature=1.2).status_code == 200
        keys = [(r.sampling.seed, r.sampling.choice) for r in server.engine.seen]
    assert keys[:4] == keys[4:8] == [(5, 0), (5, 1), (5, 2), (5, 3)]
    # Without a seed one is drawn at the door, so that the answer can be repeated from the request.
    assert len({seed for seed, _ in keys[8:]}) == 1
    assert keys[8][0] != 5


def test_b44_the_same_caller_id_twice_is_two_requests() -> None:
    headers = {"x-request-id": "mine"}

    def ask(server: RunningServer, letter: str) -> tuple[str, str, str]:
        answer = server.http.post(
            "/v1/completions", json={"prompt": letter, "n": 2}, headers=headers
        )
        body = answer.json()
        texts = {choice["text"] for choice in body["choices"]}
        assert len(texts) == 1
        return answer.headers["x-request-id"], body["id"], texts.pop()

    with running(by_prompt) as server, ThreadPoolExecutor(8) as pool:
        letters = [chr(ord("a") + i) for i in range(16)]
        answers = list(pool.map(lambda letter: ask(server, letter), letters))
        assert {a[0] for a in answers} == {"mine"}
        assert len({a[1] for a in answers}) == 16
        assert [a[2] for a in answers] == [letter * 5 for letter in letters]
        assert len({r.id for r in server.engine.seen}) == 32
        assert server.idle()


def test_b44_aborting_one_does_not_abort_the_other() -> None:
    headers = {"x-request-id": "mine"}
    body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "max_tokens": 60}
    url = "/v1/chat/completions"
    with running(endless(pause_s=0.005)) as server:
        with server.http.stream("POST", url, json=body, headers=headers) as kept:
            lines = kept.iter_lines()
            next(lines)
            with server.http.stream("POST", url, json=body, headers=headers) as left:
                next(left.iter_lines())
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "length"
        assert server.idle()


def test_unsafe_caller_ids_are_replaced() -> None:
    with running(says("Hello")) as server:
        for bad in ("a b", "x" * 200, ""):
            answer = server.http.get("/health", headers={"x-request-id": bad})
            assert answer.headers["x-request-id"] != bad
            assert len(answer.headers["x-request-id"]) == 32
