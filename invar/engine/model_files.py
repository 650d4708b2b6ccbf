"""A model as it lies on the disk, in one of two forms: GGUF, or a Hugging Face directory."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from invar.models import registry
from invar.text import hf_tokenizer
from invar.text.chat_template import ChatTemplate
from invar.text.tokenizer import Tokenizer
from invar.weights.gguf import GGUFFile, Metadata
from invar.weights.hf_directory import TEMPLATE, text_files

if TYPE_CHECKING:
    from invar.models.hf_source import HFSource

ModelFile: TypeAlias = "GGUFFile | HFSource"

TEMPLATE_KEY = "tokenizer.chat_template"
TOKENS_KEY = "tokenizer.ggml.tokens"


class ModelText(Protocol):
    """The text side of a model, which needs no weights."""

    def tokenizer(self) -> Tokenizer: ...

    def template(self, given: str | None) -> ChatTemplate | None:
        """The model's own, or the text that is given in its place."""

    def token_count(self) -> int | None:
        """Ids of the tokenizer; None if the model has none."""


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


class HFText:
    def __init__(self, path: Path) -> None:
        self.files = text_files(path)

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_hf(self.files)

    def template(self, given: str | None) -> ChatTemplate | None:
        return ChatTemplate.from_hf(self.files | ({} if given is None else {TEMPLATE: given}))

    def token_count(self) -> int | None:
        present = hf_tokenizer.FILE in self.files
        return hf_tokenizer.token_count(self.files) if present else None


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
