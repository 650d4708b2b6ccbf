"""An engine process that is killed, stopped, or dies by a request: who hears what."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from invar.config import EngineConfig
from invar.engine.request import FinishReason
from invar.serving.async_engine import AsyncEngine, EngineDeadError
from invar.serving.supervisor import EngineStartError, Supervisor, pause_after

from .faulty_engine import HANGS, KILLS, RAISES, SLOW, SLOW_STEP_S, UNSCHEDULABLE
from .served_engine import FAULTY, TINY, Heard, choice, hear, with_engine

STREAMS = 32


@cache
def undisturbed() -> list[Heard]:
    async def body(engine: AsyncEngine, supervisor: Supervisor) -> list[Heard]:
        return await asyncio.gather(
            *(hear(engine.submit([choice(index)])) for index in range(STREAMS))
        )

    heard = with_engine(body, command=FAULTY)
    assert all(one.finish_reason is FinishReason.LENGTH for one in heard)
    assert len({one.text for one in heard}) > STREAMS / 2
    return list(heard)


async def settled(engine: AsyncEngine) -> None:
    """One more request, at whose end the engine process looks at every page."""
    heard = await hear(engine.submit([choice(0, max_tokens=3)]))
    assert heard.finish_reason is FinishReason.LENGTH
    assert engine.unfinished == 0
    await asyncio.sleep(0.1)
    assert engine.status == "ready"


# Before any has begun; early, in the midst, with most of them gone, as far as the engine has not
# run ahead of what is heard here.
@pytest.mark.parametrize(
    ("number", "when"), [(signal.SIGKILL, (0, 20, 700, 1600)), (signal.SIGSTOP, (0, 300))]
)
def test_streams_go_on_byte_for_byte(number: int, when: tuple[int, ...]) -> None:
    async def body(engine: AsyncEngine, supervisor: Supervisor) -> list[Heard]:
        deltas = 0

        def disturb() -> None:
            pid = supervisor.engine_pid
            if deltas in when and pid is not None:
                os.kill(pid, number)

        def on_delta() -> None:
            nonlocal deltas
            deltas += 1
            disturb()

        first = supervisor.engine_pid
        generations = [engine.submit([choice(index)]) for index in range(STREAMS)]
        disturb()
        heard = await asyncio.gather(*(hear(one, on_delta) for one in generations))
        assert supervisor.engine_pid != first
        await settled(engine)
        assert supervisor.dead is None
        return heard

    assert with_engine(body, command=FAULTY) == undisturbed()


def test_a_request_that_kills_is_found_and_no_other_is_refused() -> None:
    async def body(engine: AsyncEngine, supervisor: Supervisor) -> tuple[Heard, list[Heard]]:
        good = [asyncio.create_task(hear(engine.submit([choice(i)]))) for i in range(STREAMS)]
        await asyncio.sleep(0.05)
        poison = engine.submit([choice(99, first=KILLS)])
        late = asyncio.create_task(hear(engine.submit([choice(1)])))
        bad = await hear(poison)
        assert f"Request {poison.id}-0 " in (bad.error or "")
        heard = await asyncio.gather(*good, late)
        await settled(engine)
        assert supervisor.dead is None
        return bad, heard

    bad, heard = with_engine(body, command=FAULTY, timeout_s=90)
    assert bad.finish_reason is FinishReason.ERROR
    assert not bad.token_ids
    assert heard == [*undisturbed(), undisturbed()[1]]


@pytest.mark.parametrize(("fault", "others"), [(HANGS, 0), (RAISES, 2)])
def test_a_request_that_hangs_or_fails_the_engine_is_found(fault: int, others: int) -> None:
    async def body(engine: AsyncEngine, supervisor: Supervisor) -> tuple[Heard, list[Heard]]:
        good = [asyncio.create_task(hear(engine.submit([choice(i)]))) for i in range(others)]
        bad = await hear(engine.submit([choice(99, first=fault)]))
        heard = await asyncio.gather(*good)
        await settled(engine)
        return bad, heard

    bad, heard = with_engine(body, command=FAULTY)
    assert bad.finish_reason is FinishReason.ERROR
    assert "ended the engine twice" in (bad.error or "")
    assert heard == undisturbed()[:others]


@pytest.mark.parametrize("before", [0, 4])
def test_a_request_that_kills_while_it_waits_is_found(before: int) -> None:
    """Alone with those that come in behind it, or beside those of the steps before."""

    async def body(engine: AsyncEngine, supervisor: Supervisor) -> tuple[Heard, list[Heard]]:
        good = [asyncio.create_task(hear(engine.submit([choice(i)]))) for i in range(before)]
        await asyncio.sleep(0.05 if before else 0)
        poison = engine.submit([choice(99, first=UNSCHEDULABLE)])
        good += [asyncio.create_task(hear(engine.submit([choice(i)]))) for i in range(before, 6)]
        bad = await hear(poison)
        heard = await asyncio.gather(*good)
        await settled(engine)
        assert supervisor.dead is None
        return bad, heard

    bad, heard = with_engine(body, command=FAULTY)
    assert bad.finish_reason is FinishReason.ERROR
    assert "ended the engine twice" in (bad.error or "")
    assert heard == undisturbed()[:6]


def test_a_long_step_is_no_hang() -> None:
    async def body(engine: AsyncEngine, supervisor: Supervisor) -> None:
        before, began = supervisor.engine_pid, time.monotonic()
        slow = asyncio.create_task(hear(engine.submit([choice(3, first=SLOW, max_tokens=2)])))
        while not slow.done():
            assert engine.status == "ready"
            await asyncio.sleep(0.02)
        assert time.monotonic() - began >= SLOW_STEP_S
        assert (await slow).finish_reason is FinishReason.LENGTH
        assert supervisor.engine_pid == before

    with_engine(body, command=FAULTY)


def test_an_idle_engine_is_no_hang_and_a_stopped_one_is_noticed_with_the_next_request() -> None:
    async def body(engine: AsyncEngine, supervisor: Supervisor) -> Heard:
        before = supervisor.engine_pid
        assert before is not None
        await asyncio.sleep(2.5)
        assert supervisor.engine_pid == before
        os.kill(before, signal.SIGSTOP)
        heard = await hear(engine.submit([choice(0)]))
        assert supervisor.engine_pid != before
        return heard

    assert with_engine(body) == undisturbed()[0]


def test_an_engine_that_is_stopped_while_it_loads_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("invar.serving.supervisor.LOADING_STILL_S", 1.5)

    async def body(engine: AsyncEngine, supervisor: Supervisor) -> Heard:
        first = supervisor.engine_pid
        hearing = asyncio.create_task(hear(engine.submit([choice(0)])))
        assert first is not None
        os.kill(first, signal.SIGKILL)
        while supervisor.engine_pid in (None, first):
            await asyncio.sleep(0.002)
        second = supervisor.engine_pid
        assert second is not None
        os.kill(second, signal.SIGSTOP)
        heard = await hearing
        assert supervisor.engine_pid not in (first, second)
        return heard

    assert with_engine(body) == undisturbed()[0]


def test_who_leaves_while_the_engine_is_away_is_forgotten() -> None:
    async def body(engine: AsyncEngine, supervisor: Supervisor) -> None:
        leaving = [engine.submit([choice(index)]) for index in range(8)]
        staying = asyncio.create_task(hear(engine.submit([choice(8)])))
        await asyncio.sleep(0.1)
        assert supervisor.engine_pid is not None
        os.kill(supervisor.engine_pid, signal.SIGKILL)
        while engine.status == "ready":
            await asyncio.sleep(0.005)
        for generation in leaving:
            generation.cancel()
        engine.reset_prefix_cache()
        during = asyncio.create_task(hear(engine.submit([choice(9)])))
        assert await staying == undisturbed()[8]
        assert await during == undisturbed()[9]
        await settled(engine)

    with_engine(body, command=FAULTY)


def test_who_hears_late_of_engines_that_came_and_went_finds_the_one_that_is_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("invar.serving.supervisor.pause_after", lambda crashes: 0.0)

    async def body(engine: AsyncEngine, supervisor: Supervisor) -> Heard:
        hearing = asyncio.create_task(hear(engine.submit([choice(0)])))
        await asyncio.sleep(0)
        for _ in range(3):  # while the event loop hears nothing
            before = supervisor.engine_pid
            assert before is not None
            os.kill(before, signal.SIGKILL)
            wait_for_another(supervisor, before)
        return await hearing

    assert with_engine(body) == undisturbed()[0]


def wait_for_another(supervisor: Supervisor, before: int) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        engine = supervisor._engine
        if engine is not None and engine.ready and engine.process.pid != before:
            return
        time.sleep(0.01)
    raise AssertionError("no other engine")


def test_a_crash_loop_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("invar.serving.supervisor.pause_after", lambda crashes: 0.0)
    dead: list[Any] = []

    async def body(engine: AsyncEngine, supervisor: Supervisor) -> None:
        killed: set[int] = set()
        while engine.status != "dead":
            pid = supervisor.engine_pid
            if engine.status == "ready" and pid is not None and pid not in killed:
                killed.add(pid)
                os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.01)
        assert len(killed) == 5
        assert "5 times" in (engine.fatal or "")
        with pytest.raises(EngineDeadError):
            engine.submit([choice(0)])

    with_engine(body, on_dead=lambda: dead.append(True))
    assert dead == [True]


@pytest.mark.parametrize(
    ("other", "said"),
    [("llama_plain.gguf", "another build"), ("tiny_models.py", "could not be loaded")],
)
def test_a_model_that_has_changed_is_not_gone_on_with(
    other: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("invar.serving.supervisor.pause_after", lambda crashes: 0.0)
    model = tmp_path / "model.gguf"
    shutil.copy(TINY, model)

    async def body(engine: AsyncEngine, supervisor: Supervisor) -> Heard:
        shutil.copy(TINY.with_name(other), tmp_path / "other")
        (tmp_path / "other").replace(model)
        assert supervisor.engine_pid is not None
        os.kill(supervisor.engine_pid, signal.SIGKILL)
        return await hear(engine.submit([choice(0)]))

    heard = with_engine(body, config=EngineConfig(model=str(model), num_threads=2))
    assert heard.finish_reason is FinishReason.ERROR
    assert said in (heard.error or "")


def test_a_model_file_that_is_cut_short_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("invar.serving.supervisor.pause_after", lambda crashes: 0.0)
    model = tmp_path / "model.gguf"
    shutil.copy(TINY, model)

    async def body(engine: AsyncEngine, supervisor: Supervisor) -> Heard:
        os.truncate(model, 4096)
        return await hear(engine.submit([choice(0)]))

    heard = with_engine(body, config=EngineConfig(model=str(model), num_threads=2))
    assert heard.finish_reason is FinishReason.ERROR
    assert "could not be loaded: model.gguf: " in (heard.error or "")
    assert "was killed by SIGBUS: a file that it has in memory was cut short" in caplog.text


def test_what_cannot_be_loaded_is_said_at_once() -> None:
    supervisor = Supervisor(EngineConfig(model=str(TINY), max_model_len=10**6))
    with pytest.raises(EngineStartError, match="max_model_len: 1000000 is beyond"):
        supervisor.wait_ready()
    supervisor.close()


def test_pauses_grow() -> None:
    assert [pause_after(n) for n in (1, 2, 3, 4, 9)] == [0, 1, 2, 4, 30]
