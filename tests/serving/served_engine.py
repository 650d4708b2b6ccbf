"""A supervised engine process and an `AsyncEngine` before it, in one test."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from invar.config import EngineConfig
from invar.engine.request import EngineRequest, FinishReason, Sampling
from invar.observe.metrics import Metrics
from invar.serving.async_engine import AsyncEngine, ChoiceRequest, Generation
from invar.serving.client import EngineClient
from invar.serving.supervisor import Supervisor

TINY = Path(__file__).parents[1] / "golden" / "llama_gqa.gguf"
CONFIG = EngineConfig(model=str(TINY), max_num_seqs=16, num_threads=2)
FAULTY = [sys.executable, str(Path(__file__).with_name("faulty_engine.py"))]

SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 1.2, "repetition_penalty": 1.2, "logprobs": 1},
    {"temperature": 0.0, "frequency_penalty": 0.7, "prompt_logprobs": 1, "logprobs": 0},
)


@dataclass
class Piece:
    """Tokens are their own text."""

    text: str
    tokens_used: int
    token_offsets: list[int]
    finished: bool = False
    stop_reason: str | int | None = None


class TokenText:
    def push(self, token_ids: list[int]) -> Piece:
        return Piece("".join(f"{one} " for one in token_ids), len(token_ids), [0] * len(token_ids))

    def finish(self) -> Piece:
        return Piece("", 0, [])


@dataclass
class Heard:
    """What came for one request."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None


def choice(
    index: int, *, first: int | None = None, length: int | None = None, max_tokens: int = 60
) -> ChoiceRequest:
    """Prompts of all lengths across pages, all ways of sampling; `first`: first token of it."""
    ids = np.random.default_rng(index).integers(3, 250, length or 5 + 11 * index % 90)
    if first is not None:
        ids[0] = first
    sampling = Sampling(**{"seed": 100 + index, **SAMPLINGS[index % len(SAMPLINGS)]})
    request = EngineRequest(
        id="", prompt_token_ids=ids.astype(np.int32), max_tokens=max_tokens, sampling=sampling
    )
    return ChoiceRequest(request, TokenText())


async def hear(generation: Generation, on_delta: Callable[[], object] = lambda: None) -> Heard:
    heard = Heard()
    async for deltas in generation:
        for delta in deltas:
            heard.text += delta.text
            heard.token_ids += delta.token_ids
            heard.logprobs += delta.logprobs
            heard.prompt_logprobs = delta.prompt_logprobs or heard.prompt_logprobs
            heard.finish_reason, heard.error = delta.finish_reason, delta.error
            on_delta()
    return heard


def with_engine(
    body: Callable[[AsyncEngine, Supervisor], Awaitable[Any]],
    *,
    config: EngineConfig = CONFIG,
    timeout_s: float = 60,
    **options: Any,
) -> Any:
    """Runs a coroutine function beside an engine process that is up."""
    supervisor = Supervisor(config, **options)

    async def main() -> Any:
        engine = AsyncEngine(EngineClient(supervisor.run_folder), Metrics("m"))
        await engine.start()
        while engine.status == "loading":
            await asyncio.sleep(0.002)
        try:
            return await asyncio.wait_for(body(engine, supervisor), timeout_s)
        finally:
            await engine.close()

    try:
        supervisor.wait_ready()
        return asyncio.run(main())
    finally:
        supervisor.close()
        assert not supervisor.run_folder.exists()
