"""Running `invar` as its users do: another process, its output, its exit code."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
INVAR = [sys.executable, "-m", "invar.cli.main"]


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "NO_COLOR": "1"}


def invar(
    *words: str, stdin: str | None = None, timeout_s: float = 120
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*INVAR, *words],
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=environment(),
        check=False,
    )


@dataclass
class Serving:
    url: str
    lines: list[str]  # what was printed
    process: subprocess.Popen[str]

    def printed(self) -> str:
        return "".join(self.lines)

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(30)


@contextmanager
def serving(*words: str) -> Iterator[Serving]:
    """`invar serve` until the end of the block: on a free port and keeping nothing by default."""
    quiet = {"--port": "0", "--kv-store": "off", "--response-store": "off"}
    added = [word for option in quiet.items() if option[0] not in words for word in option]
    with listening(*INVAR, "serve", *words, *added) as server:
        yield server


@contextmanager
def listening(*command: str) -> Iterator[Serving]:
    """A process that says where it listens, until the end of the block."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
    )
    assert process.stdout is not None
    lines = []
    try:
        for line in process.stdout:
            lines.append(line)
            found = re.search(r"Listening on (https?://\S+)", line)
            if found:
                break
        else:
            raise AssertionError("".join(lines))
        # The rest must be read, or the server stops once the pipe is full.
        threading.Thread(target=lines.extend, args=(process.stdout,), daemon=True).start()
        yield Serving(found[1], lines, process)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
