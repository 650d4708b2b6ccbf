"""Its presence puts this directory on the path: helpers are imported as `golden.tiny_models`."""

from __future__ import annotations

import pytest

# Minutes in a few tests: begun first, so that nobody waits for them at the end.
LONG = ("test_perplexity.py", "test_million_positions.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONG)
