"""vLLM's `enforce_eager`: operation by operation, with checks; the same answers."""

from __future__ import annotations

import logging

import pytest

from invar import LLM, SamplingParams

PARAMS = SamplingParams(max_tokens=12, temperature=1.0, seed=5, logprobs=2, prompt_logprobs=0)


def test_the_plan_runs_operation_by_operation(caplog: pytest.LogCaptureFixture) -> None:
    answers, lines = [], []
    for eager in (False, True):
        caplog.clear()
        with (
            caplog.at_level(logging.INFO, "invar"),
            LLM(model="smollm2", enforce_eager=eager, max_num_seqs=2) as llm,
        ):
            outputs = llm.generate(["Hello", "The sky is"], PARAMS, use_tqdm=False)
        lines.append(next(line for line in caplog.messages if line.startswith("plan: ")))
        answers.append([(o.outputs, o.prompt_logprobs) for o in outputs])
    assert answers[0] == answers[1]
    assert "replayed every step" in lines[0]
    assert "operation by operation, each timed and checked for NaN" in lines[1]
    assert any("calls  attention after attn_q.weight" in line for line in caplog.messages)
