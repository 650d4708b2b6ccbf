"""llama.cpp's command line: text; one notice without a GPU; `-co` is colour; `-cbs` is unknown."""

from __future__ import annotations

from cli.commands import invar

from invar import _native

from .model import model_file

WORDS = ["run", "-m", model_file(), "-n", "512", "-t", "12", "-ngl", "20", "--temp", "0.7"]
PROMPT = ["-p", "You are a helpful assistant."]


def test_text_and_one_notice() -> None:
    result = invar(*WORDS, *PROMPT)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
    layers, *threads = result.stderr.splitlines()
    assert "-ngl" in layers
    assert "GPU" in layers
    # Fewer cores than -t names have a notice of their own.
    assert len(threads) == (_native.cpu_info()["usable_cores"] < 12)
    assert all("12 threads are more than" in line for line in threads)


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
