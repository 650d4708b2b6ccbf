"""The process boundary itself: order, coalescing, ids, and an engine that fails."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from invar.engine.request import EngineOutput, EngineRequest, FinishReason, Sampling
from invar.observe.metrics import Metrics
from invar.serving.async_engine import AsyncEngine, ChoiceRequest, EngineDeadError
from invar.serving.choice import ChoiceDelta
from invar.text.output import TextAssembler
from invar.text.tokenizer import Tokenizer

from .in_process import ThreadPort
from .scripted import ScriptedEngine, Step, endless, says, token, vocabulary

TOKENIZER = Tokenizer.from_gguf(vocabulary())


def choice(max_tokens: int = 50, *, stop: tuple[str, ...] = ()) -> ChoiceRequest:
    request = EngineRequest(
        id="caller's",
        prompt_token_ids=np.array([5], np.int32),
        max_tokens=max_tokens,
        sampling=Sampling(seed=1),
        stop_token_ids=TOKENIZER.stop_token_ids,
    )
    assembler = TextAssembler(
        TOKENIZER, stop=stop, stop_token_ids=TOKENIZER.stop_token_ids, at_start=False
    )
    return ChoiceRequest(request, assembler)


def run(engine: Any, body: Any) -> Any:
    """Runs a coroutine function beside a started engine."""

    async def main() -> Any:
        client = AsyncEngine(ThreadPort(engine), Metrics("m"))
        await client.start()
        try:
            return await asyncio.wait_for(body(client), 10)
        finally:
            await client.close()

    return asyncio.run(main())


def test_a_slow_reader_gets_one_frame_for_many_steps() -> None:
    async def body(client: AsyncEngine) -> list[list[str]]:
        generation = client.submit([choice(), choice()])
        await asyncio.sleep(0.2)
        return [[delta.text for delta in deltas] async for deltas in generation]

    assert run(ScriptedEngine(says("Hello", " world", "!")), body) == [["Hello world!"] * 2]


def test_ids_inside_are_our_own() -> None:
    engine = ScriptedEngine(says("Hello"))

    async def body(client: AsyncEngine) -> None:
        assert client.status == "ready"
        first, second = client.submit([choice(), choice()]), client.submit([choice()])
        assert first.id != second.id
        async for _ in first:
            pass
        async for _ in second:
            pass
        assert client.unfinished == 0

    run(engine, body)
    assert len({request.id for request in engine.seen}) == 3


def test_cancelling_reaches_the_engine_within_a_step() -> None:
    engine = ScriptedEngine(endless(pause_s=0.02))

    async def body(client: AsyncEngine) -> None:
        generation = client.submit([choice(1000)])
        async for _ in generation:
            break
        before = engine.steps
        generation.cancel()
        generation.cancel()
        await asyncio.sleep(0.1)
        assert not engine.running
        assert engine.steps - before <= 2

    run(engine, body)


def test_an_answer_that_stops_on_text_is_aborted_in_the_engine() -> None:
    engine = ScriptedEngine(endless("END", pause_s=0.01))

    async def body(client: AsyncEngine) -> Any:
        whole = ChoiceDelta(0)
        async for deltas in client.submit([choice(stop=("DEN",))]):
            whole.extend(deltas[0])
        await asyncio.sleep(0.05)
        return whole

    whole = run(engine, body)
    assert (whole.text, whole.finish_reason, whole.stop_reason) == ("EN", "stop", "DEN")
    assert len(whole.token_ids) == 2
    assert not engine.running


class RefusingEngine(ScriptedEngine):
    def add_request(self, request: EngineRequest) -> None:
        if request.max_tokens == 13:
            raise ValueError("max_tokens: 13 never fits")
        super().add_request(request)


def test_a_refused_request_hurts_no_other() -> None:
    async def body(client: AsyncEngine) -> tuple[Any, str]:
        refused, good = client.submit([choice(13)]), client.submit([choice()])
        (only,) = [d async for deltas in refused for d in deltas]
        text = "".join([d.text async for deltas in good for d in deltas])
        return only, text

    only, text = run(RefusingEngine(says("Hello")), body)
    assert only.refused
    assert "never fits" in only.error
    assert text == "Hello"


class StumblingEngine(ScriptedEngine):
    def add_request(self, request: EngineRequest) -> None:
        super().add_request(request)
        if request.max_tokens == 13:
            raise MemoryError("no room for the request's state")


def test_a_request_that_cannot_be_taken_in_fails_alone() -> None:
    engine = StumblingEngine(says("Hello"))

    async def body(client: AsyncEngine) -> tuple[Any, list[str]]:
        calls = [client.submit([choice(13)]), client.submit([choice()])]
        (only,) = [d async for deltas in calls[0] for d in deltas]
        calls.append(client.submit([choice()]))
        return only, ["".join([d.text async for ds in c for d in ds]) for c in calls[1:]]

    only, texts = run(engine, body)
    assert only.finish_reason is FinishReason.ERROR
    assert not only.refused  # the request was right
    assert "no room" in only.error
    assert texts == ["Hello", "Hello"]
    assert not engine.running


class FailingEngine(ScriptedEngine):
    def step(self) -> list[EngineOutput]:
        if self.steps == 2:
            self.steps += 1
            raise RuntimeError("a kernel gave up")
        return super().step()


def test_a_step_that_raises_ends_the_engine() -> None:
    """Another one is the supervisor's affair."""

    async def body(client: AsyncEngine) -> Any:
        return [d async for ds in client.submit([choice()]) for d in ds][-1]

    last = run(FailingEngine(says("Hello", "one", " two", " three")), body)
    assert last.finish_reason is FinishReason.ERROR
    assert "a kernel gave up" in last.error


class DyingEngine(ScriptedEngine):
    def stats(self) -> dict[str, float]:
        if self.steps >= 2:
            raise MemoryError("gone")
        return super().stats()


def test_a_dead_engine_says_so() -> None:
    async def body(client: AsyncEngine) -> Any:
        deltas = [d async for ds in client.submit([choice()]) for d in ds]
        with pytest.raises(EngineDeadError):
            client.submit([choice()])
        assert client.status == "dead"
        return deltas[-1]

    assert "gone" in run(DyingEngine(endless()), body).error


def test_one_wake_up_a_step_however_many_requests() -> None:
    engine = ScriptedEngine(says(*["zz"] * 30))
    reports = []

    async def body(client: AsyncEngine) -> None:
        hear = client._on_report
        client._on_report = lambda report: (reports.append(report), hear(report))[1]  # type: ignore[method-assign, func-returns-value]
        generation = client.submit([choice(20) for _ in range(10)])
        async for _ in generation:
            pass

    run(engine, body)
    assert len([r for r in reports if r.outputs]) == engine.steps
    assert all(len(r.outputs) == 10 for r in reports if r.outputs)


def test_closing_ends_what_is_in_flight() -> None:
    async def body(client: AsyncEngine) -> Any:
        generation = client.submit([choice(10**6)])
        closing = asyncio.create_task(client.close())
        deltas = [d async for ds in generation for d in ds]
        await closing
        return deltas[-1]

    assert "shutting down" in run(ScriptedEngine(endless()), body).error


def test_an_idle_engine_takes_no_steps() -> None:
    engine = ScriptedEngine(says("Hello"))

    async def body(client: AsyncEngine) -> None:
        async for _ in client.submit([choice()]):
            pass
        before = engine.steps
        await asyncio.sleep(0.05)
        assert engine.steps == before

    run(engine, body)


def test_text_that_cannot_be_assembled_fails_that_request_alone() -> None:
    def script(request: EngineRequest) -> Iterator[Step]:
        yield [10**6] if request.max_tokens == 13 else [token("Hello")]

    async def body(client: AsyncEngine) -> tuple[Any, str]:
        bad, good = client.submit([choice(13)]), client.submit([choice()])
        (only,) = [d async for ds in bad for d in ds]
        text = "".join([d.text async for ds in good for d in ds])
        return only, text

    only, text = run(ScriptedEngine(script), body)
    assert only.finish_reason is FinishReason.ERROR
    assert text == "Hello"


def test_delivery_keeps_up() -> None:
    """The event loop's share: 64 choices of 200 tokens within a second or so."""
    engine = ScriptedEngine(says(*["zz"] * 200))

    async def body(client: AsyncEngine) -> float:
        began = time.monotonic()
        async for _ in client.submit([choice(200) for _ in range(64)]):
            pass
        return time.monotonic() - began

    assert run(engine, body) < 10
