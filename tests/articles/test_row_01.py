"""`pip install .`, then `invar`: the commands are listed."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_installed_command_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """The entry point that pip writes, called as pip calls it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, _, function = project["scripts"]["invar"].partition(":")
    assert getattr(importlib.import_module(module), function)(["--help"]) == 0
    listed = capsys.readouterr().out
    for command in ("run", "serve", "pull", "inspect", "bench"):
        assert f"\n  {command} " in listed
