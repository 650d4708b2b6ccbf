"""Metadata that cannot be true ends in one error that names the key, before anything is made of it.

Cases B60, B62 and B64: a damaged number may be anything, and tables of 2^31 entries, layers without
tensors or a division by zero are no way to say so.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden.tiny_models import model_path
from models.memory_source import MemorySource

from invar.backends.cpu.lower import lower
from invar.config import EngineConfig
from invar.engine.loader import load_engine
from invar.graph.graph import GraphError
from invar.graph.passes import optimise
from invar.models.metadata import ConfigError
from invar.models.registry import build
from invar.models.rope import FACTORS_TENSOR
from invar.text.chat_template import ChatTemplate, ChatTemplateError
from invar.text.tokenizer import Tokenizer, TokenizerError

NAN, INF = math.nan, math.inf
LARGEST = 2**31 - 1
FILES = {"llama": "llama_gqa", "gemma3": "gemma3_pattern6"}


def source_of(architecture: str) -> MemorySource:
    return MemorySource.read(model_path(FILES[architecture]))


@pytest.fixture
def llama() -> MemorySource:
    return source_of("llama")


def changed(architecture: str, **values: Any) -> MemorySource:
    source = source_of(architecture)
    for name, value in values.items():
        source.metadata[f"{architecture}.{name.replace('__', '.')}"] = value
    return source


# ---------------------------------------------------------------- sizes and counts

COUNTS = [
    "block_count",
    "context_length",
    "embedding_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.sliding_window",
    "rope.dimension_count",
]


@pytest.mark.parametrize("architecture", FILES)
@pytest.mark.parametrize("key", COUNTS)
@pytest.mark.parametrize("value", [0, -5, 2**31, 2**63, 1.5, NAN])
def test_counts_outside_int32_are_refused(architecture: str, key: str, value: Any) -> None:
    source = source_of(architecture)
    source.metadata[f"{architecture}.{key}"] = value
    expected = rf"{architecture}\.{key} must be an integer from 1 to {LARGEST}, found \w+ {value}"
    with pytest.raises(ConfigError, match=expected):
        build(source)


@pytest.mark.parametrize("value", [0, -6, 2**63])
def test_the_pattern_of_windows_is_a_count(value: int) -> None:
    with pytest.raises(ConfigError, match="sliding_window_pattern must be an integer from 1"):
        build(changed("gemma3", attention__sliding_window_pattern=value))


@pytest.mark.parametrize("architecture", FILES)
@pytest.mark.parametrize("value", [1, 8, LARGEST])
def test_block_count_is_that_of_the_tensors(architecture: str, value: int) -> None:
    with pytest.raises(ConfigError, match=rf"block_count is {value}, but the file has tensors of"):
        build(changed(architecture, block_count=value))


@pytest.mark.parametrize("value", [1, 63, LARGEST])
def test_embedding_length_is_that_of_the_embedding(value: int) -> None:
    expected = rf"llama\.embedding_length is {value}, but token_embd\.weight has 64 columns"
    with pytest.raises(ConfigError, match=expected):
        build(changed("llama", embedding_length=value))


@pytest.mark.parametrize("architecture", FILES)
@pytest.mark.parametrize("size", [1, 15, 32, LARGEST])
def test_head_sizes_are_those_of_the_weights(architecture: str, size: int) -> None:
    source = changed(
        architecture,
        attention__key_length=size,
        attention__value_length=size,
        rope__dimension_count=LARGEST,
    )
    expected = rf"blk\.0\.attn_q\.weight has .* of {size} dimensions \({architecture}\.attention"
    with pytest.raises(ConfigError, match=expected):
        build(source)


@pytest.mark.parametrize("heads", [1, 2, 8, LARGEST - 1])
def test_head_counts_are_those_of_the_weights(heads: int) -> None:
    expected = rf"blk\.0\.attn_q\.weight has 64 rows, which are not {heads} heads"
    with pytest.raises(ConfigError, match=expected):
        build(changed("llama", attention__head_count=heads, attention__head_count_kv=heads))


def test_more_heads_than_columns_and_no_head_size() -> None:
    source = changed("llama", attention__head_count=128, attention__head_count_kv=128)
    del source.metadata["llama.attention.key_length"]
    del source.metadata["llama.attention.value_length"]
    with pytest.raises(ConfigError, match=r"not 128 heads .* of 0 dimensions"):
        build(source)


@pytest.mark.parametrize("architecture", FILES)
@pytest.mark.parametrize("value", [1, 3, 15, 18, LARGEST - 1])
def test_rotated_dimensions_are_pairs_of_a_head(architecture: str, value: int) -> None:
    expected = rf"rope\.dimension_count is {value} .* even number up to the head size of 16"
    with pytest.raises(ConfigError, match=expected):
        build(changed(architecture, rope__dimension_count=value))


@pytest.mark.parametrize("size", [24, 592])
def test_the_backend_names_the_weights_of_head_sizes_it_lacks(size: int) -> None:
    source = changed("llama", attention__key_length=size, attention__value_length=size)
    for layer in range(2):
        for name, rows in (("attn_q", 4 * size), ("attn_k", 2 * size), ("attn_v", 2 * size)):
            source.put(f"blk.{layer}.{name}.weight", np.zeros((rows, 64), np.float32))
        source.put(f"blk.{layer}.attn_output.weight", np.zeros((64, 4 * size), np.float32))
    expected = rf"blk\.0\.attn_k\.weight: .* heads of {size} dimensions, only .* 16 up to 576"
    with pytest.raises(GraphError, match=expected):
        lower(optimise(build(source)), source, 16, 1)


# ---------------------------------------------------------------- scales


@pytest.mark.parametrize(
    "key",
    [
        "attention.layer_norm_rms_epsilon",
        "attention.scale",
        "final_logit_softcapping",
        "rope.freq_base",
        "rope.freq_base_swa",
        "rope.scale_linear",
        "rope.scaling.factor",
    ],
)
@pytest.mark.parametrize("value", [0.0, -1.0, 1e-50, NAN, INF, -INF, 1e300])
def test_scales_are_positive_and_finite(key: str, value: float) -> None:
    source = source_of("gemma3")
    source.metadata[f"gemma3.{key}"] = value
    with pytest.raises(ConfigError, match=rf"gemma3\.{key} must be a number from .*, found float"):
        build(source)


@pytest.mark.parametrize("value", [0.0, -1.0, NAN, INF])
def test_rope_factors_are_positive_and_finite(llama: MemorySource, value: float) -> None:
    llama.put(FACTORS_TENSOR, np.array([1, 1, 1, 1, value, 1, 1, 1], np.float32))
    with pytest.raises(ConfigError, match=rf"rope_freqs\.weight holds {value}"):
        build(llama)


# ---------------------------------------------------------------- tokenizer and vocabulary


def test_output_and_embedding_have_as_many_rows(llama: MemorySource) -> None:
    llama.put("output.weight", np.zeros((271, 64), np.float32))
    with pytest.raises(GraphError, match=r"output\.weight has 271 rows and token_embd\.weight 272"):
        build(llama)


def test_every_token_has_a_row(llama: MemorySource, tmp_path: Path) -> None:
    for rows in (272, 300):  # more rows are padding
        llama.put("token_embd.weight", np.zeros((rows, 64), np.float32))
        path = llama.write(tmp_path / f"{rows}.gguf")
        load_engine(EngineConfig(str(path), kv_cache_memory_bytes=1 << 24)).close()
    llama.put("token_embd.weight", np.zeros((271, 64), np.float32))
    path = llama.write(tmp_path / "cut.gguf")
    expected = r"tokenizer\.ggml\.tokens has 272 tokens, but token_embd\.weight only 271 rows"
    with pytest.raises(GraphError, match=expected):
        load_engine(EngineConfig(str(path)))


@pytest.mark.parametrize("key", ["bos_token_id", "eos_token_id", "eot_token_id"])
@pytest.mark.parametrize("value", [272, LARGEST, 2**63, -2])
def test_special_ids_lie_in_the_vocabulary(llama: MemorySource, key: str, value: int) -> None:
    llama.metadata[f"tokenizer.ggml.{key}"] = value
    expected = rf"tokenizer\.ggml\.{key}: id {value} is outside the vocabulary of 272 tokens"
    with pytest.raises(TokenizerError, match=expected):
        Tokenizer.from_gguf(llama.metadata)


@pytest.mark.parametrize("name", ["bos", "eos"])
def test_a_token_that_is_to_be_added_must_be_named(llama: MemorySource, name: str) -> None:
    del llama.metadata[f"tokenizer.ggml.{name}_token_id"]
    Tokenizer.from_gguf(llama.metadata)
    llama.metadata[f"tokenizer.ggml.add_{name}_token"] = True
    expected = rf"add_{name}_token is true, but the file has no tokenizer\.ggml\.{name}_token_id"
    with pytest.raises(TokenizerError, match=expected):
        Tokenizer.from_gguf(llama.metadata)


@pytest.mark.parametrize("value", [99, 7, -1])
def test_unknown_token_types_are_refused(llama: MemorySource, value: int) -> None:
    types = np.array(llama.metadata["tokenizer.ggml.token_type"])
    types[5] = value
    llama.metadata["tokenizer.ggml.token_type"] = types
    expected = rf"token_type: token 5 has type {value} \(known: 1 normal"
    with pytest.raises(TokenizerError, match=expected):
        Tokenizer.from_gguf(llama.metadata)


def test_scores_are_numbers(llama: MemorySource) -> None:
    scores = np.zeros(272, np.float32)
    scores[7] = NAN
    llama.metadata["tokenizer.ggml.model"] = "llama"
    llama.metadata["tokenizer.ggml.scores"] = scores
    with pytest.raises(TokenizerError, match=r"tokenizer\.ggml\.scores: entry 7 is nan"):
        Tokenizer.from_gguf(llama.metadata)


@pytest.mark.parametrize("key", ["tokenizer.chat_template", "tokenizer.chat_template.tool_use"])
@pytest.mark.parametrize("value", [0, 7, NAN, True, []])
def test_b60_a_template_is_a_string(llama: MemorySource, key: str, value: Any) -> None:
    llama.metadata[key] = value
    expected = re.escape(f"{key}: expected a jinja2 template as a string, found ")
    with pytest.raises(ChatTemplateError, match=expected):
        ChatTemplate.from_gguf(llama.metadata)


# ---------------------------------------------------------------- every key, every kind of nonsense

MISSING = object()
NONSENSE = [0, -1, 1, LARGEST, 2**63, NAN, INF, "x", [], True, MISSING]
OPTIONAL = [
    "attention.scale",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "expert_count",
    "final_logit_softcapping",
    "rope.dimension_count",
    "rope.freq_base_swa",
    "rope.scale_linear",
    "rope.scaling.factor",
    "rope.scaling.type",
]
TOKENIZER_OPTIONAL = ["add_eos_token", "eot_token_id", "scores", "unknown_token_id"]


Reader = Callable[[MemorySource], object]
READERS: tuple[Reader, ...] = (
    build,
    lambda source: Tokenizer.from_gguf(source.metadata),
    lambda source: ChatTemplate.from_gguf(source.metadata),
)


def accepted(reader: Reader, source: MemorySource) -> bool:
    """Or refused with a ValueError, whose kinds are the only ones that callers know."""
    try:
        reader(source)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("architecture", FILES)
def test_any_value_of_any_key_works_or_is_refused(architecture: str) -> None:
    source = source_of(architecture)
    healthy = dict(source.metadata)
    outcomes: dict[Reader, set[bool]] = {reader: set() for reader in READERS}
    keys = {
        *healthy,
        *(f"{architecture}.{name}" for name in OPTIONAL),
        *(f"tokenizer.ggml.{name}" for name in TOKENIZER_OPTIONAL),
    }
    for key in sorted(keys):
        for value in NONSENSE:
            source.metadata = healthy | {key: value}
            if value is MISSING:
                del source.metadata[key]
            for reader, accepts in outcomes.items():
                accepts.add(accepted(reader, source))
    source.metadata = healthy
    for reader, accepts in outcomes.items():
        assert accepted(reader, source)
        assert accepts == {True, False}
