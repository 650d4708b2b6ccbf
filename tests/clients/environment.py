"""The environment of the large clients: made on first use, kept beside the models."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from invar.weights.model_cache import cache_root

HERE = Path(__file__).parent
REQUIREMENTS = HERE / "requirements.txt"
UNUSED_S = 7 * 24 * 3600


def clients_python() -> Path:
    """The interpreter that has them. Making the environment takes a minute, once a list of
    requirements; what other lists made goes once nobody has used it for a week."""
    folder = cache_root() / "clients"
    folder.mkdir(parents=True, exist_ok=True)
    made_of = REQUIREMENTS.read_bytes() + sys.version.encode()
    home = folder / hashlib.sha256(made_of).hexdigest()[:16]
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (home / "complete").exists():
            for mark in folder.glob("*/complete"):
                if time.time() - mark.stat().st_mtime > UNUSED_S:
                    shutil.rmtree(mark.parent)
            shutil.rmtree(home, ignore_errors=True)  # one that was begun
            subprocess.run([sys.executable, "-m", "venv", home], check=True)
            # Every version is named, so nothing is resolved; nothing is built either.
            install = [home / "bin/python", "-m", "pip", "install", "--quiet", "--no-deps"]
            install += ["--only-binary", ":all:", "--no-compile", "-r", REQUIREMENTS]
            subprocess.run(install, check=True)
        (home / "complete").touch()
    return home / "bin" / "python"


def environment(home: Path) -> dict[str, str]:
    """Variables for a client: no proxy, no keys, nothing fetched from outside."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "OTEL_SDK_DISABLED": "true",
        "LANGSMITH_TRACING": "false",
        "NO_PROXY": "127.0.0.1",
    }


def answers_of(script: str, url: str, home: Path) -> dict[str, Any]:
    """What a script beside this file prints: a JSON object of its answers."""
    done = subprocess.run(
        [clients_python(), HERE / script, url],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=home,
        env=environment(home),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
