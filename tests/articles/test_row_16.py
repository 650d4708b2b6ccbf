"""`-ngl 24` on a machine without a GPU: text, and one notice."""

from __future__ import annotations

from cli.commands import invar

from .model import model_file


def test_layers_for_a_gpu_that_is_not_there() -> None:
    result = invar("run", "-m", model_file(), "-ngl", "24", "-p", "Hello", "-n", "32")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
    assert len(result.stderr.splitlines()) == 1
    assert "-ngl 24" in result.stderr
