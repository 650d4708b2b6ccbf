"""What `invar pull` shows while it works, with a source that is scripted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from invar.cli.main import main
from invar.weights import sources


def scripted_pull(model: str | None, progress: Any) -> Path:
    for done in (0, 50, 100):
        progress("downloading piece 1", done, 100)
    progress("checking", 0, None)
    return Path("/cache/m.gguf")


def test_one_line_a_file_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sources, "pull", scripted_pull)
    assert main(["pull", "m"]) == 0
    out, err = capsys.readouterr()
    assert out == "/cache/m.gguf\n"
    assert err.splitlines() == ["downloading piece 1 (100 B)", "checking"]


def test_a_bar_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import sys

    monkeypatch.setattr(sources, "pull", scripted_pull)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert main(["pull", "m"]) == 0
    out, err = capsys.readouterr()
    assert out == "/cache/m.gguf\n"
    assert "downloading piece 1" in err
    assert "100/100 bytes" in err


def test_several_models_are_pulled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sources, "pull", lambda model, progress: Path(f"/cache/{model}.gguf"))
    assert main(["pull", "a", "b"]) == 0
    assert capsys.readouterr().out == "/cache/a.gguf\n/cache/b.gguf\n"


def test_what_cannot_be_pulled_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "smolm2"]) == 1
    err = capsys.readouterr().err
    assert "smollm2" in err
    assert len(err.splitlines()) == 1
