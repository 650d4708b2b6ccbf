"""A model as it lies on the disk, in one of two forms: GGUF, or a Hugging Face directory."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from invar.models import registry
from invar.text import hf_tokenizer
from invar.text.chat_template import ChatTemplate
from invar.text.tokenizer import Tokenizer
from invar.text.tokenizer_entries import FILE as TOKENIZER
from invar.text.tokenizer_files import with_tokenizer
from invar.weights.gguf import GGUFFile, Metadata
from invar.weights.hf_directory import GENERATION, TEMPLATE, text_files

if TYPE_CHECKING:
    from invar.models.hf_source import HFSource

ModelFile: TypeAlias = "GGUFFile | HFSource"

# Names after the prefix; llama.cpp's converter makes them of a generation_config.json, whose names
# those that do not stand here are.
# https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py
SAMPLING_PREFIX = "general.sampling."
SAMPLING_NAMES = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}

TEMPLATE_KEY = "tokenizer.chat_template"
TOKENS_KEY = "tokenizer.ggml.tokens"


class ModelText(Protocol):
    """The text side of a model, which needs no weights."""

    def tokenizer(self) -> Tokenizer: ...

    def template(self, given: str | None) -> ChatTemplate | None:
        """The model's own, or the text that is given in its place."""

    def token_count(self) -> int | None:
        """Ids of the tokenizer; None if the model has none."""

    def generation(self) -> tuple[dict[str, Any], str]:
        """What the model says about sampling, in the words of generation_config.json and as it
        stands there; and where it stands."""


class GGUFText:
    def __init__(self, metadata: Metadata) -> None:
        self.metadata = metadata

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_gguf(self.metadata)

    def template(self, given: str | None) -> ChatTemplate | None:
        metadata: Mapping[str, Any] = self.metadata
        if given is not None:
            metadata = ChainMap({TEMPLATE_KEY: given}, dict(metadata))
        return ChatTemplate.from_gguf(metadata)

    def token_count(self) -> int | None:
        entry = self.metadata.entry(TOKENS_KEY)  # told without reading them
        return None if entry is None else entry.count

    def generation(self) -> tuple[dict[str, Any], str]:
        found = {}
        for key in self.metadata:
            if key.startswith(SAMPLING_PREFIX):
                name = key.removeprefix(SAMPLING_PREFIX)
                found[SAMPLING_NAMES.get(name, name)] = as_written(self.metadata[key])
        return found, f"{self.metadata.file_name}: {SAMPLING_PREFIX}*"


class HFText:
    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def files(self) -> Mapping[str, Any]:
        return text_files(self.path)

    @cached_property
    def complete(self) -> Mapping[str, Any]:
        """With a tokenizer.json among them, whatever the tokenizer is stored as."""
        return with_tokenizer(self.files)

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_hf(self.complete)

    def template(self, given: str | None) -> ChatTemplate | None:
        files = {**self.complete, **({} if given is None else {TEMPLATE: given})}
        return ChatTemplate.from_hf(files)

    def token_count(self) -> int | None:
        present = TOKENIZER in self.complete
        return hf_tokenizer.token_count(self.complete) if present else None

    def generation(self) -> tuple[dict[str, Any], str]:
        return self.files.get(GENERATION, {}), GENERATION


def as_written(value: Any) -> Any:
    """In Python's types; what the file has in float32 as it was typed: 0.95, not 0.949999988."""
    if isinstance(value, float):
        return float(str(np.float32(value)))
    return value.tolist() if isinstance(value, np.ndarray) else value


def open_model(path: Path) -> ModelFile:
    """Weights and metadata; reads headers and no weights. ValueError says what is wrong."""
    return registry.open_directory(path) if path.is_dir() else registry.open_gguf(path)


def text_of(source: ModelFile) -> ModelText:
    return GGUFText(source.metadata) if isinstance(source, GGUFFile) else HFText(source.path)


@contextmanager
def open_text(path: Path) -> Iterator[ModelText]:
    """The text side alone, of a model or of a directory with a tokenizer and no more."""
    if path.is_dir():
        yield HFText(path)
        return
    with GGUFFile(path) as source:
        yield GGUFText(source.metadata)
