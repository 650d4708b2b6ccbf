"""What crosses between processes comes out as it went in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from invar.engine.request import (
    EngineOutput,
    EngineRequest,
    FinishReason,
    Sampling,
    TokenLogprobs,
)
from invar.serving.messages import (
    Abort,
    Add,
    EngineDown,
    EngineFacts,
    EngineUp,
    Hello,
    LoadFailed,
    Ready,
    ResetCache,
    Resume,
    StepReport,
    StoreFacts,
    decode_command,
    decode_for_client,
    decode_for_supervisor,
    decode_report,
    encode,
)
from invar.serving.shared_page import LIST_BYTES, EngineState, SharedPage


def test_a_request_crosses_whole() -> None:
    request = EngineRequest(
        id="a-0",
        prompt_token_ids=np.arange(100_000, dtype=np.int32),
        max_tokens=7,
        sampling=Sampling(
            seed=2**64 - 1,
            temperature=0.1,
            bias=((3, -float("inf")), (9, 0.3)),
            allowed_token_ids=(5, 2**31 - 1),
            bad_sequences=((1, 2), (3,)),
            prompt_logprobs=0,
        ),
        stop_token_ids=frozenset({1, 2}),
        output_token_ids=np.array([4, 5], np.int32),
        cache_salt="ü",
        reads_cache=False,
    )
    for kind in (Add, Resume):
        message = encode(kind((request,)))
        assert len(message) < 4 * 100_000 + 1000  # ids as their bytes
        command = decode_command(message)
        assert isinstance(command, kind)
        (got,) = command.requests
        for name in EngineRequest.__dataclass_fields__:
            expected, value = getattr(request, name), getattr(got, name)
            if isinstance(expected, np.ndarray):
                assert value.dtype == np.int32
                assert (value == expected).all()
            else:
                assert value == expected, name


def test_a_report_crosses_whole() -> None:
    one = TokenLogprobs(3, -0.1, 1, (3, 4), (-0.1, -1e30))
    outputs = [
        EngineOutput("a-0", [3], [one], [None, one], cached_tokens=4, timing={"arrival": 0.25}),
        EngineOutput("b-0", [], finish_reason=FinishReason.ERROR, error="why"),
        EngineOutput("c-0", [9, 8], finish_reason=FinishReason.STOP, stop_reason=8),
    ]
    report = StepReport(outputs, {"d-0": "never fits"}, {"running": 2.0})
    assert decode_report(encode(report)) == report


@pytest.mark.parametrize("message", [Abort(("a", "b")), ResetCache()])
def test_commands_cross(message: Abort | ResetCache) -> None:
    assert decode_command(encode(message)) == message


def test_word_of_the_engine_crosses() -> None:
    facts = EngineFacts(10, 20, 30, 40, "f", (("weights", 5),), StoreFacts("/kv", None, 3))
    for message in (Hello(), Ready(facts), LoadFailed("no such file")):
        assert decode_for_supervisor(encode(message)) == message
    for event in (EngineUp(3), EngineDown({"a": "why"}), EngineDown(fatal="gone")):
        assert decode_for_client(encode(event)) == event


def test_a_page_is_seen_by_others(tmp_path: Path) -> None:
    page = SharedPage.create(tmp_path / "page")
    other = SharedPage.open(tmp_path / "page")
    assert (tmp_path / "page").stat().st_mode & 0o777 == 0o600
    assert (other.state, other.running, other.in_flight) == (EngineState.LOADING, [], 0)
    before = other.advance
    page.begin_round()
    assert other.state is EngineState.WORKING
    assert other.advance != before
    before = other.advance
    page.work_items[0] += np.uint64(1)
    assert other.advance != before
    for ids in (["a-0", "b-1"], ["ü"], []):
        page.set_running(ids)
        assert other.running == ids
    page.set_running(["long"] * LIST_BYTES)
    assert set(other.running[:-1]) == {"long"}
    other.set_in_flight(0, 3)
    other.set_in_flight(5, 4)
    assert page.in_flight == 7
    other.set_in_flight(0, 0)
    assert page.in_flight == 4
