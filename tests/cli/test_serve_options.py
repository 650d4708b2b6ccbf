"""Options of the HTTP side: keys from everywhere, and what is said about an open door."""

from __future__ import annotations

from pathlib import Path

import pytest

from invar.cli import serve
from invar.cli.http_side import HttpOptions, http_options
from invar.cli.listening import is_loopback, listen
from invar.cli.rewrite import rewrite


def options(*words: str) -> HttpOptions:
    parser = serve.parser()
    return http_options(parser.parse_args(rewrite("serve", words, parser.own).argv))


def test_keys_of_the_command_line_a_file_and_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    file.write_text("three\n")
    assert not options().keys
    monkeypatch.setenv("VLLM_API_KEY", "of-vllm")
    assert options().keys.find({b"x-api-key": b"of-vllm"}) is not None
    monkeypatch.setenv("INVAR_API_KEY", "ours")
    assert options().keys.find({b"x-api-key": b"ours"}) is not None
    assert options().keys.find({b"x-api-key": b"of-vllm"}) is None
    ring = options("--api-key", "one", "--api_key=two", "--api-key-file", str(file)).keys
    assert len(ring) == 3
    assert ring.find({b"x-api-key": b"ours"}) is None  # what was typed counts alone
    for key in (b"one", b"two", b"three"):
        assert ring.find({b"x-api-key": key}) is not None


@pytest.mark.parametrize("words", [
    ["--api-key", ""], ["--api-key-file", "/nowhere"], ["--max-num-queued-reqs", "-1"],
    ["--sse-keep-alive-interval", "-1"], ["--stream-stall-timeout", "0"],
    ["--stream-stall-timeout", "nan"], ["--max-num-queued-tokens", "-5"],
])  # fmt: skip
def test_options_that_are_wrong(words: list[str]) -> None:
    with pytest.raises(ValueError, match=words[0]):
        options(*words)


def test_caps_under_every_name() -> None:
    assert options("--max-num-queued-reqs", "5").max_queued_requests == 5
    assert options("--max-queued-requests", "6").max_queued_requests == 6
    assert options("--max-num-queued-tokens", "64k").max_queued_tokens == 64_000
    assert options().max_queued_requests is None


@pytest.mark.parametrize(("host", "inside"), [
    ("127.0.0.1", True), ("::1", True), ("0.0.0.0", False), ("::", False),
])  # fmt: skip
def test_who_can_reach_it(host: str, inside: bool) -> None:
    with listen(host, 0) as listener:
        assert is_loopback(listener) == inside
