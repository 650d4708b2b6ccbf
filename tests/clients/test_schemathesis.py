"""Schemathesis reads /openapi.json and sends what it allows and what it forbids."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from .conftest import Tiny
from .environment import clients_python, environment

CHECKS = ",".join(
    (
        "not_a_server_error",
        "status_code_conformance",
        "content_type_conformance",
        "response_schema_conformance",
        "response_headers_conformance",
    )
)


# The other spellings of routes, and what answers no JSON.
LEFT_OUT = ("/v1/tokenize", "/v1/detokenize", "/reset_prefix_cache", "/ping", "/metrics")


def test_the_document_holds(tiny: Tiny, tmp_path: Path) -> None:
    python = clients_python()
    words = ["run", f"{tiny.url}/openapi.json", "--checks", CHECKS, "--mode", "all"]
    words += ["--phases", "coverage,fuzzing", "--max-examples", "5", "--seed", "1"]
    words += ["--generation-database", "none", "--no-color"]
    words += [word for path in LEFT_OUT for word in ("--exclude-path", path)]
    done = subprocess.run(
        [python, python.parent / "schemathesis", *words],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env=environment(tmp_path),
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    tested = re.search(r"Tested: (\d+)", done.stdout)
    assert tested is not None
    assert int(tested[1]) >= 20
