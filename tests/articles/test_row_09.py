"""A file of a hub's repository into a folder of the user's: whole, checked, resumed, with a bar."""

from __future__ import annotations

import hashlib
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from weights.hub_server import LocalHub, environment, invar, local_hub, pulled, refused, repository

from .model import TINY

FILE = "m-Q8_0.gguf"
LARGE = bytes(24 << 20)  # more than the 10 MiB that the library writes at a time
WORDS = ("pull", "org/quants", FILE, "--local-dir", "./models")


@pytest.fixture
def hub() -> Iterator[LocalHub]:
    with local_hub() as hub:
        hub.repositories = {
            "org/quants": repository({FILE: Path(TINY).read_bytes(), "README.md": b"hi"}),
            "org/large": repository({"x.gguf": LARGE}),
        }
        yield hub


def test_the_file_is_there_and_its_checksum_right(hub: LocalHub, tmp_path: Path) -> None:
    path = tmp_path / pulled(invar(hub, tmp_path, *WORDS))
    assert path == tmp_path / "models" / FILE
    expected = hub.repositories["org/quants"].files[FILE]
    assert hashlib.sha256(path.read_bytes()).digest() == hashlib.sha256(expected).digest()
    assert not (path.parent / "README.md").exists()
    run = invar(hub, tmp_path, "run", str(path), "-p", "hello", "-n", "2", "--ignore-eos")
    assert run.returncode == 0, run.stderr


def test_what_the_repository_lacks_is_named(hub: LocalHub, tmp_path: Path) -> None:
    line = refused(invar(hub, tmp_path, "pull", "org/quants", "x.gguf", "--local-dir", "models"))
    assert f"has no x.gguf (there are: {FILE}, README.md)" in line


@pytest.mark.parametrize("name", ["org/quants", "ms:org/quants"])
def test_a_wrong_checksum_is_an_error_and_no_file(name: str, hub: LocalHub, tmp_path: Path) -> None:
    hub.altered = {FILE}  # the content is not the one whose sum is listed
    words = ("pull", name, FILE, "--local-dir", "models")
    line = refused(invar(hub, tmp_path, *words))
    assert f"{FILE} has sha256 " in line
    assert "the hub lists" in line
    assert not (tmp_path / "models" / FILE).exists()
    hub.altered = set()
    path = tmp_path / pulled(invar(hub, tmp_path, *words))
    assert path.read_bytes() == hub.repositories["org/quants"].files[FILE]


@pytest.mark.parametrize("name", ["org/large", "ms:org/large"])
def test_a_broken_download_goes_on_where_it_stopped(
    name: str, hub: LocalHub, tmp_path: Path
) -> None:
    hub.cut_once = {"x.gguf"}
    words = ("pull", name, "x.gguf", "--local-dir", "models")
    first = invar(hub, tmp_path, *words)
    path = tmp_path / pulled(first if first.returncode == 0 else invar(hub, tmp_path, *words))
    assert path.read_bytes() == LARGE
    begun = [
        int(line.split("bytes=")[1].split("-")[0]) for line in hub.requests if "bytes=" in line
    ]
    assert begun
    assert min(begun) > 0


@pytest.mark.parametrize("name", ["org/large", "ms:org/large"])
def test_progress_counts_the_bytes_that_are_there(name: str, hub: LocalHub, tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from invar.weights.sources import pull_to_folder\n"
        "def say(what, done, total):\n"
        "    what == 'downloading' and print(done, total)\n"
        f"pull_to_folder({name!r}, ['x.gguf'], Path('models'), say)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script],
        env=environment(hub, tmp_path),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
    )
    steps = [tuple(map(int, line.split())) for line in result.stdout.splitlines()]
    assert {total for _, total in steps} == {len(LARGE)}
    done = [count for count, _ in steps]
    assert done == sorted(done)
    assert len(set(done)) >= 4  # 0, parts, and the whole
    assert done[-1] == len(LARGE)


def test_a_terminal_gets_one_bar(hub: LocalHub, tmp_path: Path) -> None:
    master, terminal = pty.openpty()
    words = ("pull", "org/large", "x.gguf", "--local-dir", "models")
    process = subprocess.Popen(
        [sys.executable, "-m", "invar.cli.main", *words],
        env=environment(hub, tmp_path, COLUMNS="100", TERM="xterm"),
        stdout=subprocess.PIPE,
        stderr=terminal,
        cwd=tmp_path,
    )
    os.close(terminal)
    shown = b""
    try:
        while part := os.read(master, 65536):
            shown += part
    except OSError:  # its end, on Linux
        pass
    assert process.wait() == 0
    text = shown.decode()
    assert "downloading" in text
    assert "25.2/25.2 MB" in text
    assert "x.gguf:" not in text  # the bar that the library would show beside it
