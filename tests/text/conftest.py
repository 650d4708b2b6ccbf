"""Fixtures of the text tests."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings
from text.llama_cpp_vectors import data_folder

from invar.text.tokenizer import Tokenizer
from invar.weights.gguf import GGUFFile

# A loaded machine is no failure.
settings.register_profile("invar", deadline=None)
settings.load_profile("invar")


@pytest.fixture(scope="session")
def llama_cpp_data() -> Path:
    """The folder with llama.cpp's vocabularies and templates."""
    return data_folder()


@pytest.fixture(scope="session")
def vocabulary_tokenizer(llama_cpp_data: Path) -> Callable[[str], Tokenizer]:
    """Builds the tokenizer of one of llama.cpp's vocabularies by name, once per session."""

    @functools.cache
    def build(name: str) -> Tokenizer:
        return Tokenizer.from_gguf(GGUFFile(llama_cpp_data / f"ggml-vocab-{name}.gguf").metadata)

    return build
