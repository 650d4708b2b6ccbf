"""The models that the rows are typed with: the default one, as a file, and a tiny one."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from invar.weights.sources import resolve

TINY = str(Path(__file__).parents[1] / "golden" / "llama_gqa.gguf")  # 2,048 tokens, no template


@cache
def model_file() -> str:
    return str(resolve("smollm2"))
