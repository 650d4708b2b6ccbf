"""The model that the rows are typed with: the default one, as a file."""

from __future__ import annotations

from functools import cache

from invar.weights.sources import resolve


@cache
def model_file() -> str:
    return str(resolve("smollm2"))
