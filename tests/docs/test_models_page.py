"""docs/models.md says what the tests prove, and no more."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def test_the_page_is_what_the_tests_make_of_it() -> None:
    path = Path(__file__).with_name("models_page.py")
    spec = importlib.util.spec_from_file_location("models_page", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text() == module.page(), f"run python {path.name}"
    assert all(module.tiny_models().values())
