"""`invar serve` with a KV store: what it says, finds after kill -9, and lets others see."""

from __future__ import annotations

import logging
import re
import signal
import stat
from pathlib import Path
from typing import Any

import httpx
import pytest

from cli.commands import Serving, serving
from invar.cli.engine_options import engine_config
from invar.cli.parser import byte_size
from invar.cli.rewrite import CommandLineError
from invar.cli.serve import parser, store_folder
from invar.config import EngineConfig

TINY = str(Path(__file__).parents[1] / "golden" / "gemma3_pattern6.gguf")
PROMPT = [3 + index * index % 200 for index in range(400)]


def ask(server: Serving, **fields: Any) -> tuple[str, int]:
    """The answer to a prompt of 400 tokens, and how many of them were found computed."""
    body = {"prompt": PROMPT, "max_tokens": 8, "seed": 1, "logprobs": 2, **fields}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
    return answer["choices"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def metric(server: Serving, name: str) -> float:
    found = re.search(rf"^{name}{{.*}} (\S+)$", httpx.get(f"{server.url}/metrics").text, re.M)
    assert found is not None, name
    return float(found[1])


def until(server: Serving, name: str, value: float) -> None:
    """Writing goes on behind the answers; the metrics follow with the next step."""
    for _ in range(200):
        ask(server, prompt=[5])
        if metric(server, name) >= value:
            return
    raise AssertionError(f"{name} is {metric(server, name)}")


def test_prompts_are_found_after_kill_9(tmp_path: Path) -> None:
    words = (TINY, "--kv-store", str(tmp_path / "kv"), "--kv-store-size", "64MiB")
    with serving(*words) as server:
        line = f"KV store: {tmp_path}/kv, up to 64.0 MiB; 0 tokens of earlier prompts are there"
        assert line in server.printed()
        assert "KV store: pages on their way" in server.printed()
        cold, cached = ask(server)
        assert cached == 0
        until(server, "invar:kv_store_pages_written_total", 12)
        assert metric(server, "invar:kv_store_bytes") > 0
        server.end(signal.SIGKILL)
    for path in (tmp_path / "kv").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
    with serving(*words) as server:
        assert "384 tokens of earlier prompts" in server.printed()
        with serving(*words) as second:
            assert "read only" in second.printed()
            assert ask(second) == (cold, 384)
        assert ask(server) == (cold, 384)
        assert metric(server, "vllm:external_prefix_cache_hits_total") == 384
        assert metric(server, "vllm:external_prefix_cache_queries_total") == 400
        for source, tokens in (("disk", 384), ("device", 0)):
            series = f'vllm:prompt_tokens_cached_by_source_total{{engine="0",.*source="{source}"}} '
            (line,) = re.findall(f"^{series}(.*)$", httpx.get(f"{server.url}/metrics").text, re.M)
            assert float(line) == tokens
        assert metric(server, "invar:kv_store_pages_read_total") == 12
        assert httpx.post(f"{server.url}/v1/cache/reset").status_code == 200
        assert ask(server, prompt=[*PROMPT[:40], 7])[1] == 0
        assert server.end() == 0
    with serving(*words) as server:
        assert ask(server) == (cold, 0)


def test_without_a_store(tmp_path: Path) -> None:
    (tmp_path / "letter").touch()
    tmp_path.chmod(0o755)
    with serving(TINY, "--kv-store", str(tmp_path)) as server:
        assert "give it a folder of its own" in server.printed()
        assert "KV store: none" in server.printed()
        first = ask(server)
        assert ask(server) == (first[0], 399)
        assert httpx.post(f"{server.url}/v1/cache/reset").status_code == 200
    with serving(TINY, "--no-enable-prefix-caching", "--kv-store", str(tmp_path / "kv")) as server:
        assert "KV store: none" in server.printed()
    assert not (tmp_path / "kv").exists()


def test_where_it_is_and_how_large(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("INVAR_CACHE", str(tmp_path))
    assert store_folder(None) == str(tmp_path / "kv")
    assert store_folder("off") is None
    assert EngineConfig().kv_store is None
    assert EngineConfig(kv_store="a").kv_store_bytes == 4 << 30
    assert EngineConfig(kv_store="a", swap_space=1.5).kv_store_bytes == 3 << 29
    assert EngineConfig(kv_store="a", swap_space=8, kv_store_size=99).kv_store_bytes == 99
    assert not caplog.messages
    with caplog.at_level(logging.WARNING):
        EngineConfig(swap_space=4)
    assert len(caplog.messages) == 1
    given = engine_config(parser().parse_args(["--kv-store-size=8G"]), kv_store="x")
    assert given.kv_store == "x"


@pytest.mark.parametrize(("text", "size"), [
    ("4GiB", 4 << 30), ("512mib", 512 << 20), ("4G", 4 << 30), ("4GB", 4 * 10**9), ("77", 77),
    ("1.5 KiB", 1536), ("12B", 12),
])  # fmt: skip
def test_sizes(text: str, size: int) -> None:
    assert byte_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "4XB", "-1", "4 GiB of it"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(CommandLineError, match=r"--kv-store-size: .* no size such as 4GiB"):
        parser().parse_args([f"--kv-store-size={text}"])
