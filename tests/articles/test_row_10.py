"""llama.cpp's command line: text; one notice without a GPU; `-co` is colour; `-cbs` is unknown."""

from __future__ import annotations

from cli.commands import invar

from .model import model_file

WORDS = ["run", "-m", model_file(), "-n", "512", "-t", "12", "-ngl", "20", "--temp", "0.7"]
PROMPT = ["-p", "You are a helpful assistant."]


def test_text_and_one_notice() -> None:
    result = invar(*WORDS, *PROMPT)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
    assert len(result.stderr.splitlines()) == 1
    assert "-ngl" in result.stderr
    assert "GPU" in result.stderr


def test_co_is_colour() -> None:
    result = invar("run", "-m", model_file(), "-n", "4", "-co", *PROMPT)
    assert result.returncode == 0
    assert result.stdout.strip()
    assert not result.stderr


def test_cbs_is_unknown_and_cb_is_near() -> None:
    result = invar(*WORDS, "-cbs", "256", *PROMPT)
    assert result.returncode == 2
    assert not result.stdout
    assert "-cbs" in result.stderr
    assert "unknown option" in result.stderr
    assert "nearest: -cb " in result.stderr
