"""Two requests with the same system prompt: the second one computes its own question only."""

from __future__ import annotations

from typing import Any

import httpx
from cli.commands import Serving, serving

from .model import model_file

SYSTEM = "You are a patient librarian. Answer in one short sentence, and name a book. " * 8
QUESTIONS = ("Who wrote about a white whale?", "Where does a hobbit live?")


def ask(server: Serving, question: str, **fields: Any) -> tuple[str, int, int]:
    """The answer, how many tokens its prompt has, and how many of them were reused."""
    body = {
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": question},
        ],
        "max_tokens": 16,
        "temperature": 0,
        **fields,
    }
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120).json()
    usage = answer["usage"]
    found = usage["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["message"]["content"], usage["prompt_tokens"], found


def test_the_second_reuses_the_system_prompt_and_answers_as_a_cold_run() -> None:
    words = ("--max-model-len", "1024")
    with serving(model_file(), *words, "--no-enable-prefix-caching") as server:
        cold = [ask(server, question) for question in QUESTIONS]
    assert [found for _, _, found in cold] == [0, 0]
    assert len({text for text, _, _ in cold}) == 2
    with serving(model_file(), *words) as server:
        warm = [ask(server, question) for question in QUESTIONS]
    assert [(text, tokens) for text, tokens, _ in warm] == [
        (text, tokens) for text, tokens, _ in cold
    ]
    (_, _, first), (_, tokens, second) = warm
    assert first == 0
    # All but the question and what the template puts around it.
    assert tokens - 20 < second < tokens
