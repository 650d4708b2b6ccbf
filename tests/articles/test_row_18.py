"""A device that is not there: the ones that are, and where a backend's contract stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from .model import TINY
from .modules import module

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("flag", ["--device", "--backend"])
def test_an_unknown_device(flag: str) -> None:
    result = module("invar.launch_server", "--model-path", TINY, flag, "npu9")
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert f"{flag}='npu9' is not supported: the devices here are: cpu" in line
    assert "docs/backends.md" in line
    assert (ROOT / "docs/backends.md").is_file()
