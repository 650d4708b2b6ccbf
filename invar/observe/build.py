"""Which Invar this is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def version_text() -> str:
    """The installed distribution's version; a working tree that is not installed says so."""
    try:
        return version("invar-llm")
    except PackageNotFoundError:
        return "0.1.0+tree"
