"""Case B10: an output layer with more rows than the tokenizer has entries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden.tiny_models import model_path
from models.memory_source import Floats, MemorySource

from engine.helpers import Client
from engine.scripted_runner import Answer
from invar.backends.cpu.runner import CpuRunner
from invar.config import EngineConfig
from invar.engine.loader import load_engine
from invar.engine.request import EngineRequest, Sampling

TOKENS, PADDING = 272, 64
MATRICES = ("token_embd.weight", "output.weight")
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "logprobs": 5, "prompt_logprobs": 5},
    {"temperature": 1.5, "seed": 3},
    {"temperature": 1.5, "seed": 4, "logprobs": 3, "repetition_penalty": 1.2, "bias": ((7, 2.0),)},
)


@pytest.fixture
def padded(tmp_path: Path) -> Path:
    """Half the padding says the opposite of the other half: whatever comes, one is largest."""
    source = MemorySource.read(model_path("llama_plain"))
    directions = np.random.default_rng(10).standard_normal((PADDING // 2, 32)).astype(np.float32)
    for name in MATRICES:
        real = source.dequantize(name)[:TOKENS]
        source.put(name, np.concatenate((real, 50 * directions, -50 * directions)))
    return source.write(tmp_path / "padded.gguf")


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    source = MemorySource.read(model_path("llama_plain"))
    for name in MATRICES:
        values: Floats = source.dequantize(name)[:TOKENS]
        source.put(name, values)
    return source.write(tmp_path / "plain.gguf")


def requests() -> list[EngineRequest]:
    draw = np.random.default_rng(0)
    return [
        EngineRequest(f"r{i}", draw.integers(0, 256, 20 + i).astype(np.int32), 30, Sampling(**own))
        for i, own in enumerate({"seed": 0, **sampling} for sampling in SAMPLINGS)
    ]


def answers_of(path: Path, rows: int) -> tuple[dict[str, Answer], list[np.ndarray]]:
    """The answers, and the raw logits of the last row of every step."""
    model = load_engine(EngineConfig(model=str(path), num_threads=1, max_num_seqs=4))
    assert model.info.vocab_size == TOKENS
    runner = model.engine.runner
    assert isinstance(runner, CpuRunner)
    client = Client(model.engine)
    client.add(*requests())
    logits = []
    while model.engine.has_unfinished:
        client.step()
        logits.append(runner.logits(1)[0, :rows].copy())
    assert not client.errors
    model.close()
    return client.answers, logits


def test_b10_padded_ids_are_never_drawn_nor_reported(padded: Path, plain: Path) -> None:
    answers, logits = answers_of(padded, TOKENS + PADDING)
    assert len(logits) >= 30
    for row in logits:
        assert row[TOKENS:].max() > row[:TOKENS].max() + 10
    for answer in answers.values():
        assert len(answer.token_ids) == 30
        assert max(answer.token_ids) < TOKENS
        for scored in [*(answer.logprobs or []), *(answer.prompt_logprobs or [])]:
            if scored is not None:
                assert max(scored.top_ids, default=0) < TOKENS
    # To the bit what the model without the padding says.
    assert answers == answers_of(plain, TOKENS)[0]
