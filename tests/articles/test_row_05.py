"""An AWQ checkpoint that is asked for as AWQ: one notice, and what is left of memory goes to KV."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
from cli.commands import serving
from golden.quantised_form import FORMS
from models.test_quantised_checkpoints import write_form

SIZES = {"B": 0, "KiB": 10, "MiB": 20, "GiB": 30}


def table_bytes(row: str, printed: str) -> float:
    """What the memory table says of a row."""
    found = re.search(rf"{row}\s+([\d.]+) (B|KiB|MiB|GiB)", printed)
    assert found, printed
    return float(found[1]) * (1 << SIZES[found[2]])


def test_it_serves_and_says_what_went_to_kv(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_form(model, FORMS["awq 32"])
    words = (str(model), "--quantization", "awq", "--gpu-memory-utilization", "0.95")
    with serving(*words, "--max-num-seqs", "2") as server:
        body = {"prompt": [3, 4, 5], "max_tokens": 3, "temperature": 0}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
        assert answer["usage"]["completion_tokens"] == 3
        printed = server.printed()
    assert printed.count("model is that already") == 1
    assert table_bytes("KV cache", printed) > table_bytes("weights", printed) > 0
