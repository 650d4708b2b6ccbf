"""The cache of pulled models: one directory per model, published whole or not at all.

models/<slug>/manifest.json   what lies here; written last
models/<slug>/<file>.gguf     one file, or all shards; or config.json and what belongs to it
models/.staging/<slug>/       a pull in progress
models/.locks/<slug>.lock     held by the process that pulls

A start compares sizes with the manifest, which costs nothing; `verify` also hashes.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from json import JSONDecodeError, dumps, loads
from pathlib import Path

from invar.weights.hf_directory import CONFIG

Progress = Callable[[str, int, int | None], None]
"""Called with a stage ("downloading", "verifying", …), bytes done, and bytes in total if known."""

COPY_BYTES = 1 << 22
MANIFEST = "manifest.json"


class ModelSourceError(ValueError):
    """A model cannot be found, fetched or verified; the message says what to do."""


def no_progress(stage: str, done_bytes: int, total_bytes: int | None) -> None:
    """The progress callback of a caller that wants none."""


@dataclass(frozen=True)
class CachedFile:
    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What lies in a cache directory. The first file is the one to open."""

    source: str
    files: tuple[CachedFile, ...]


def cache_root() -> Path:
    """`$INVAR_CACHE`, else `$XDG_CACHE_HOME/invar`, else `~/.cache/invar`."""
    own = os.environ.get("INVAR_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared).expanduser() if shared else Path.home() / ".cache") / "invar"


def slug_of(source: str) -> str:
    """A directory name for a source: readable, and distinct for distinct sources."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "--", source).strip(".-")
    if readable == source:
        return readable
    return f"{readable}-{hashlib.sha256(source.encode()).hexdigest()[:8]}"


class CacheSlot:
    """The place of one model in the cache."""

    def __init__(self, source: str) -> None:
        self.source = source
        slug = slug_of(source)
        models = cache_root() / "models"
        self.directory = models / slug
        self.staging = models / ".staging" / slug
        self.lock_path = models / ".locks" / f"{slug}.lock"

    def manifest(self) -> Manifest | None:
        """What is there and has the right size; None if the model must be pulled."""
        try:
            fields = loads((self.directory / MANIFEST).read_text("utf-8"))
            files = tuple(CachedFile(**file) for file in fields["files"])
            manifest = Manifest(fields["source"], files)
            sizes = [(self.directory / file.name).stat().st_size for file in files]
        except (OSError, JSONDecodeError, KeyError, TypeError):
            return None
        right = files and manifest.source == self.source
        return manifest if right and sizes == [file.size_bytes for file in files] else None

    def path(self, manifest: Manifest) -> Path:
        """The file to open, or the directory if what lies there begins with a configuration."""
        first = manifest.files[0].name
        return self.directory if first == CONFIG else self.directory / first

    def verify(self, manifest: Manifest, progress: Progress) -> bool:
        """Hash every file again. Reads all of it: for an explicit pull, not for a start."""
        return all(
            sha256_of(self.directory / file.name, progress) == file.sha256
            for file in manifest.files
        )

    @contextlib.contextmanager
    def locked(self, progress: Progress) -> Iterator[None]:
        """Only one process pulls a model; the others wait, and then find it."""
        self.lock_path.parent.mkdir(parents=True, exist_ok=True)
        with self.lock_path.open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                progress("waiting for another pull of the same model", 0, None)
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def publish(self, staged: list[tuple[Path, str]]) -> Path:
        """Move verified files, given with their sha256, into place; the lock must be held.

        The manifest goes first and comes last: a crash in between leaves a directory without one,
        which counts as empty.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / MANIFEST).unlink(missing_ok=True)
        files = []
        for path, sha256 in staged:
            size_bytes = path.stat().st_size
            os.replace(path, self.directory / path.name)
            files.append(CachedFile(path.name, size_bytes, sha256))
        manifest = Manifest(self.source, tuple(files))
        partial = self.directory / (MANIFEST + ".partial")
        partial.write_text(dumps(asdict(manifest), indent=1), "utf-8")
        os.replace(partial, self.directory / MANIFEST)
        self.discard_staging()
        return self.path(manifest)

    def discard_staging(self) -> None:
        shutil.rmtree(self.staging, ignore_errors=True)

    def require_space(self, needed_bytes: int) -> None:
        self.staging.mkdir(parents=True, exist_ok=True)
        free_bytes = shutil.disk_usage(self.staging).free
        if free_bytes < needed_bytes:
            raise ModelSourceError(
                f"{self.source}: pulling it takes {needed_bytes >> 20} MiB in {self.staging}, only "
                f"{free_bytes >> 20} MiB are free; make room or set INVAR_CACHE to another disk"
            )


def sha256_of(path: Path, progress: Progress) -> str:
    """Hash a file, reporting as it goes."""
    digest = hashlib.sha256()
    done_bytes, total_bytes = 0, path.stat().st_size
    with path.open("rb") as file:
        while chunk := file.read(COPY_BYTES):
            digest.update(chunk)
            done_bytes += len(chunk)
            progress("verifying", done_bytes, total_bytes)
    return digest.hexdigest()
