"""Every vocabulary of llama.cpp: the ids of all its test texts, and back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from text.llama_cpp_vectors import VOCABULARIES, read_vectors

from invar.text.tokenizer import Tokenizer

TokenizerByName = Callable[[str], Tokenizer]


@pytest.mark.parametrize("name", VOCABULARIES)
def test_ids_equal_the_models_own(
    name: str, llama_cpp_data: Path, vocabulary_tokenizer: TokenizerByName
) -> None:
    tokenizer = vocabulary_tokenizer(name)
    vectors = read_vectors(llama_cpp_data / f"ggml-vocab-{name}.gguf")
    assert len(vectors) >= 46
    for vector in vectors:
        ids = tokenizer.encode(vector.text, add_special_tokens=False, parse_special=False)
        assert ids.dtype == "int32"
        assert ids.tolist() == vector.ids, vector.text


@pytest.mark.parametrize("name", [name for name in VOCABULARIES if name != "bert-bge"])
def test_decoding_gives_the_text_back(
    name: str, llama_cpp_data: Path, vocabulary_tokenizer: TokenizerByName
) -> None:
    tokenizer = vocabulary_tokenizer(name)
    for vector in read_vectors(llama_cpp_data / f"ggml-vocab-{name}.gguf"):
        assert tokenizer.decode(vector.ids) == vector.text


def test_all_vectors_are_there(llama_cpp_data: Path) -> None:
    counts = [len(read_vectors(llama_cpp_data / f"ggml-vocab-{n}.gguf")) for n in VOCABULARIES]
    assert sum(counts) == 708


def test_stop_tokens_are_found_by_text(vocabulary_tokenizer: TokenizerByName) -> None:
    def stops(name: str) -> set[str]:
        tokenizer = vocabulary_tokenizer(name)
        return {tokenizer.token_text(token_id) for token_id in tokenizer.stop_token_ids}

    assert stops("llama-bpe") == {"<|end_of_text|>", "<|eot_id|>"}
    assert stops("qwen2") == {"<|endoftext|>", "<|im_end|>"}
    assert stops("phi-3") == {"<|endoftext|>", "<|end|>"}
    # A normal token </s> (HTML) ends nothing.
    assert stops("gemma-4") == {"<eos>", "<turn|>", "<|tool_response>"}
