"""SGLang's launcher, with a parser of tool calls."""

from __future__ import annotations

import sys

import httpx
from cli.commands import listening

from .model import TINY
from .modules import module

LAUNCH = "invar.launch_server"


def test_starts() -> None:
    words = ("--model-path", TINY, "--kv-store", "off", "--response-store", "off", "--port", "0")
    words = (*words, "--tool-call-parser", "firefunction")
    with listening(sys.executable, "-m", LAUNCH, *words) as server:
        body = {"prompt": [3, 4, 5], "max_tokens": 3, "ignore_eos": True}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] == 3
        assert server.end() == 0


def test_a_parser_of_tool_calls() -> None:
    result = module(LAUNCH, "--model-path", TINY, "--tool-call-parser", "firefunctoin")
    assert result.returncode == 1
    assert "--tool-call-parser firefunctoin: no such parser" in result.stderr
    assert "Did you mean firefunction?" in result.stderr
    assert "hermes" in result.stderr
    assert not result.stdout


def test_the_port_that_clients_of_sglang_ask() -> None:
    """Where it is in use, which the test sees to."""
    import socket

    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("127.0.0.1", 30000))
            taken.listen()
        except OSError:
            pass  # by somebody else
        result = module(LAUNCH, "--model-path", TINY)
        assert result.returncode == 1
        assert "127.0.0.1:30000 is in use" in result.stderr
