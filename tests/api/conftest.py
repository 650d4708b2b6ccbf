"""One quiet server for tests that only look at what is refused or described."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .scripted import RunningServer, running, says


@pytest.fixture(scope="session")
def hello() -> Iterator[RunningServer]:
    """Answers "Hello world!" to everything; context of 256 tokens."""
    with running(says("Hello", " world", "!")) as server:
        yield server
