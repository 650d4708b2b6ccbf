"""SGLang's launcher with its flags: two notices; a context beyond the model's own is refused."""

from __future__ import annotations

import sys

from cli.commands import listening

from .model import TINY
from .modules import module

LAUNCH = "invar.launch_server"
FLAGS = ("--model-path", TINY, "--tp", "1", "--enable-radix-cache", "--enable-torch-compile")


def test_two_notices_and_a_context_that_is_too_long() -> None:
    result = module(LAUNCH, *FLAGS, "--context-length", "1048576")
    assert result.returncode == 1
    said = [line for line in result.stderr.splitlines() if line.startswith("invar: ")]
    tree, compiled, refusal = said
    assert "--enable-radix-cache has nothing to do here: the radix tree is on" in tree
    assert "--enable-torch-compile has nothing to do here: there is nothing to compile" in compiled
    assert "1048576 is beyond the 2048 tokens that the model was made for" in refusal


def test_hyphens_and_underscores() -> None:
    words = ("--context_length", "1024", "--kv_store", "off", "--response_store", "off")
    with listening(sys.executable, "-m", LAUNCH, *FLAGS, *words, "--port", "0") as server:
        assert "1024 tokens a request" in server.printed()
