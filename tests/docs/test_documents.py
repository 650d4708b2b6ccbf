"""The documents name files, symbols and commands that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIFE = ROOT / "docs" / "life_of_a_request.md"
PATH = re.compile(r"`((?:invar|native|bench|tests|docs)/[\w./-]+\.\w+)(?:::([\w.]+))?`")


def defined_names(path: Path) -> set[str]:
    """Functions, classes and `Class.method`s of a Python file; identifiers of any other file."""
    text = path.read_text()
    if path.suffix != ".py":
        return set(re.findall(r"\w+", text))
    names: set[str] = set()
    for node in ast.parse(text).body:
        names |= {node.name} if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else set()
        if isinstance(node, ast.ClassDef):
            names.add(node.name)
            names |= {f"{node.name}.{n.name}" for n in node.body if hasattr(n, "name")}
    return names


DOCUMENTS = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "bench/README.md"]


def named_places() -> list[tuple[str, str, str]]:
    return [(d.name, *match) for d in DOCUMENTS for match in PATH.findall(d.read_text())]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_no_merge_is_left_half_done(document: Path) -> None:
    assert not re.findall(r"^(?:<{7}|={7}|>{7})(?: .*)?$", document.read_text(), re.MULTILINE)


@pytest.mark.parametrize(("document", "path", "symbol"), named_places())
def test_named_files_and_symbols_exist(document: str, path: str, symbol: str) -> None:
    assert (ROOT / path).is_file(), f"{document} names {path}, which does not exist"
    if symbol:
        assert symbol in defined_names(ROOT / path), f"{document}: {path} defines no {symbol}"


def test_a_request_touches_at_most_ten_files() -> None:
    table = [line for line in LIFE.read_text().splitlines() if re.match(r"\| \d+ \|", line)]
    files = {path for line in table for path, _ in PATH.findall(line)}
    assert 0 < len(files) <= 10, f"{len(files)} files from body to kernel: {sorted(files)}"
