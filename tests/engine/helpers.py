"""Driving an engine over a scripted runner."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.scripted_runner import VOCAB, Answer, HashRunner, Rules
from invar.backends.runner import RunnerInfo
from invar.engine.engine import Engine
from invar.engine.request import EngineOutput, EngineRequest, Sampling


def request(
    request_id: str, prompt: int | list[int], max_tokens: int = 8, **options: Any
) -> EngineRequest:
    """prompt: ids, or a length to make up ids for (different for different request ids)."""
    if isinstance(prompt, int):
        seed = sum(request_id.encode()) * 1009 + prompt
        ids = np.random.default_rng(seed).integers(0, VOCAB, prompt)
    else:
        ids = np.array(prompt)
    own = (
        "stop_token_ids", "min_tokens", "priority", "output_token_ids", "cache_salt", "reads_cache",
        "tenant",
    )  # fmt: skip
    return EngineRequest(
        id=request_id,
        prompt_token_ids=ids.astype(np.int32),
        max_tokens=max_tokens,
        sampling=Sampling(
            **{
                "seed": 0,
                "temperature": 0.0,
                **{name: value for name, value in options.items() if name not in own},
            }
        ),
        **{name: value for name, value in options.items() if name in own},
    )


def words(seed: int, count: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, 97, count).tolist()
    return ids


def make_engine(info: RunnerInfo, rules: Rules | None = None, **options: Any) -> Engine:
    return Engine(HashRunner(info, rules), poison_freed_pages=True, **options)


class Client:
    """Collects what an engine answers; checks the engine after every operation."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.answers: dict[str, Answer] = {}
        self.errors: dict[str, str] = {}
        self.outputs: list[EngineOutput] = []
        self.cached: dict[str, int] = {}  # tokens of the prompt that were reused

    def resumed(self, one: EngineRequest, asked: list[int], max_tokens: int) -> EngineRequest:
        """The next turn of a conversation whose first one was answered."""
        said = self.answers[one.id].token_ids
        return request(f"{one.id}2", [*one.prompt_token_ids.tolist(), *said, *asked], max_tokens)

    def add(self, *requests: EngineRequest) -> None:
        for one in requests:
            self.engine.add_request(one)
            self.engine.check_integrity()

    def step(self) -> list[EngineOutput]:
        outputs = self.engine.step()
        self.engine.check_integrity()
        for output in outputs:
            self.take(output)
        self.outputs += outputs
        return outputs

    def abort(self, request_id: str) -> bool:
        known = self.engine.abort(request_id)
        self.engine.check_integrity()
        return known

    def drain(self, limit: int = 5000) -> dict[str, Answer]:
        """Steps until nothing is left; never for ever."""
        for _ in range(limit):
            if not self.engine.has_unfinished:
                return self.answers
            self.step()
        raise AssertionError(f"no end after {limit} steps: {self.engine.stats()}")

    def take(self, output: EngineOutput) -> None:
        answer = self.answers.setdefault(output.request_id, Answer([]))
        assert answer.finish_reason is None, "an output after the last one"
        answer.token_ids += output.token_ids
        if output.logprobs is not None:
            answer.logprobs = (answer.logprobs or []) + output.logprobs
        if output.prompt_logprobs is not None:
            assert answer.prompt_logprobs is None, "prompt scores came twice"
            answer.prompt_logprobs = output.prompt_logprobs
        if output.finish_reason is not None:
            answer.finish_reason = str(output.finish_reason)
        if output.cached_tokens is not None:
            self.cached[output.request_id] = output.cached_tokens
        if output.error is not None:
            self.errors[output.request_id] = output.error


def run(engine: Engine, *requests: EngineRequest) -> dict[str, Answer]:
    client = Client(engine)
    client.add(*requests)
    return client.drain()
