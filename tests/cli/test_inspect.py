"""`invar inspect` on files that are broken: it shows what they say, which is what it is for."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden.tiny_models import model_path
from models.memory_source import MemorySource

from invar.cli.inspect import as_text, describe
from invar.weights.gguf import GGUFFile

NONSENSE = [0, -1, 1, 2**31 - 1, 2**63, math.nan, math.inf, "x", [0, 0], True, None]


def report_of(tmp_path: Path, **values: Any) -> dict[str, Any]:
    """The report on a tiny model in which keys are changed, or taken out where None."""
    source = MemorySource.read(model_path("llama_gqa"))
    for name, value in values.items():
        source.metadata[f"llama.{name}"] = value
        if value is None:
            del source.metadata[f"llama.{name}"]
    with GGUFFile(source.write(tmp_path / "x.gguf")) as file:
        return describe(file, None)


def test_heads_of_zero_leave_memory_unknown(tmp_path: Path) -> None:
    report = report_of(tmp_path, **{"attention.head_count": 0})
    assert report["metadata"]["llama.attention.head_count"] == 0
    assert report["memory"]["kv_bytes_per_token"] is None
    assert "KV per token: unknown" in as_text(report, all_tensors=False)


def test_heads_by_layer_count_where_they_are(tmp_path: Path) -> None:
    counts = np.array([2, 0], np.int32)  # the second layer has no attention
    report = report_of(tmp_path, **{"attention.head_count_kv": counts})
    assert report["memory"]["kv_bytes_per_token"] == 2 * 2 * 16 * 2


@pytest.mark.parametrize(
    "key",
    [
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "block_count",
        "context_length",
        "embedding_length",
        "rope.freq_base",
    ],
)
def test_any_value_is_shown(tmp_path: Path, key: str) -> None:
    for value in NONSENSE:
        report = report_of(tmp_path, **{key: value})
        json.dumps(report, allow_nan=False)
        assert "token_embd.weight" in as_text(report, all_tensors=True)
