"""The tiny models serve as whole models: text in, text out, and a template for chats."""

from __future__ import annotations

import pytest
from golden import tiny_tokenizer
from golden.tiny_models import TINY_MODELS, model_path

from invar.text.tokenizer import Tokenizer
from invar.weights.gguf import GGUFFile

LARGEST_BYTES = 300_000


@pytest.mark.parametrize("name", TINY_MODELS)
def test_their_tokenizer_reads_and_writes_any_text(name: str) -> None:
    with GGUFFile(model_path(name)) as source:
        tokenizer = Tokenizer.from_gguf(source.metadata)
    text = "the winner on a table: naïve 日本語 \x00 👩‍🚀\n"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) < len(text.encode())  # the merges are used
    assert tokenizer.encode("ABC").tolist() == [65, 66, 67]
    assert tokenizer.is_control(tiny_tokenizer.EOS)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_they_are_small_enough_for_the_repository(name: str) -> None:
    golden = model_path(name).with_suffix(".npz")
    assert model_path(name).stat().st_size + golden.stat().st_size < LARGEST_BYTES + 10_000
