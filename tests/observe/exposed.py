"""Prometheus' text, taken apart."""

from __future__ import annotations


def samples(text: bytes | str) -> dict[str, float]:
    """Series as it is written → value."""
    lines = (text.decode() if isinstance(text, bytes) else text).splitlines()
    return {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in lines
        if line and not line.startswith("#")
    }
