"""Modules that start a server, run as their users do, where they end by themselves."""

from __future__ import annotations

import subprocess
import sys

from cli.commands import environment


def module(name: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", name, *words],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(),
        stdin=subprocess.DEVNULL,
        check=False,
    )
