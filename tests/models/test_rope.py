"""Frequencies against tables of `transformers` in double precision (cases B57 and B58)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from golden.tiny_models import HERE, model_path
from models.memory_source import MemorySource

from invar import _native
from invar.graph.graph import GraphError, RopeStyle
from invar.models.metadata import ArchitectureKeys, ConfigError
from invar.models.registry import build
from invar.models.rope import FACTORS_TENSOR, Frequencies, rope_from_gguf, scaled_frequencies

BASE, DIM = 500000.0, 64
SCALINGS: dict[str, dict[str, Any] | None] = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 8.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
# Largest difference of a cosine or sine at position 100,000 (case B57).
TABLE_TOLERANCE = 1e-6
# A factor in float32 is off by up to 2^-24; the fastest frequency that is scaled turns 100,000 * 2
# pi / 2048 radians.
FACTOR_TOLERANCE = 100_000 * 2 * np.pi / 2048 * 2.0**-24


@pytest.fixture(scope="module")
def tables() -> Mapping[str, npt.NDArray[Any]]:
    with np.load(HERE / "rope_tables.npz") as arrays:
        return dict(arrays)


def difference(kind: str, frequencies: Frequencies, tables: Mapping[str, Any]) -> float:
    angles = tables["positions"][:, None] * np.array(frequencies)
    cos = np.abs(np.cos(angles) - tables[f"{kind}_cos"]).max()
    return float(max(cos, np.abs(np.sin(angles) - tables[f"{kind}_sin"]).max()))


@pytest.mark.parametrize("kind", SCALINGS)
def test_b57_tables_equal_the_reference(kind: str, tables: Mapping[str, Any]) -> None:
    assert tables["positions"].tolist() == [0, 1000, 9000, 100000]
    frequencies = scaled_frequencies(BASE, DIM, SCALINGS[kind])
    assert difference(kind, frequencies, tables) < TABLE_TOLERANCE


def test_one_kind_is_not_taken_for_another(tables: Mapping[str, Any]) -> None:
    for kind in SCALINGS:
        for other in SCALINGS.keys() - {kind}:
            frequencies = scaled_frequencies(BASE, DIM, SCALINGS[other])
            assert difference(kind, frequencies, tables) > 0.1


def gguf_source(**metadata: Any) -> MemorySource:
    keys = {f"llama.{key.replace('__', '.')}": value for key, value in metadata.items()}
    return MemorySource({"llama.rope.freq_base": BASE} | keys, {})


def frequencies_of(source: MemorySource) -> Frequencies:
    keys = ArchitectureKeys(source.metadata, "llama")
    return rope_from_gguf(source, keys, DIM, RopeStyle.INTERLEAVED).inv_freq


def test_b57_gguf_without_scaling(tables: Mapping[str, Any]) -> None:
    for source in (gguf_source(), gguf_source(rope__scaling__type="none")):
        assert difference("default", frequencies_of(source), tables) < TABLE_TOLERANCE


@pytest.mark.parametrize(
    "metadata",
    [
        {"rope__scaling__type": "linear", "rope__scaling__factor": 8.0},
        {"rope__scaling__factor": 8.0},
        {"rope__scale_linear": 8.0},
    ],
)
def test_b57_gguf_with_a_linear_factor(metadata: dict[str, Any], tables: Mapping[str, Any]) -> None:
    frequencies = frequencies_of(gguf_source(**metadata))
    assert difference("linear", frequencies, tables) < TABLE_TOLERANCE


def test_b57_gguf_with_the_factor_tensor(tables: Mapping[str, Any]) -> None:
    source = gguf_source()
    source.put(FACTORS_TENSOR, tables["llama3_factors"])
    frequencies = frequencies_of(source)
    assert difference("llama3", frequencies, tables) < FACTOR_TOLERANCE
    # The factors as stored, to the last bit of what double precision makes of them.
    plain = np.array(scaled_frequencies(BASE, DIM, None))
    expected = plain / tables["llama3_factors"].astype(np.float64)
    np.testing.assert_allclose(frequencies, expected, rtol=1e-15)


def test_a_factor_tensor_of_another_length_is_refused(tables: Mapping[str, Any]) -> None:
    source = gguf_source()
    source.put(FACTORS_TENSOR, tables["llama3_factors"][:-1])
    with pytest.raises(ConfigError, match=r"31 factors, expected 32"):
        frequencies_of(source)


@pytest.mark.parametrize("kind", ["dynamic", "yarn", "longrope", "Linear", "su"])
def test_b57_an_unknown_kind_is_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match=kind):
        scaled_frequencies(BASE, DIM, {"rope_type": kind, "factor": 2.0})
    with pytest.raises(ConfigError, match=kind):
        frequencies_of(gguf_source(rope__scaling__type=kind))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("alpha", 1000.0),
        ("yarn_ext_factor", 1.0),
        ("yarn_log_multiplier", 0.1),
        ("attn_factor", 1.19),
    ],
)
@pytest.mark.parametrize("kind", ["none", "linear"])
def test_b57_no_scaling_is_left_out(kind: str, key: str, value: float) -> None:
    """Keys that change rope under a kind that knows nothing of them."""
    scaling = {"rope__scaling__type": kind, f"rope__scaling__{key}": value}
    with pytest.raises(ConfigError, match=rf"llama\.rope\.scaling\.{key} is "):
        frequencies_of(gguf_source(**scaling))


def test_b57_what_scales_nothing_is_taken() -> None:
    harmless = {"finetuned": True, "original_context_length": 4096, "attn_factor": 1.0}
    source = gguf_source(**{f"rope__scaling__{key}": value for key, value in harmless.items()})
    assert frequencies_of(source) == scaled_frequencies(BASE, DIM, None)


@pytest.mark.parametrize("name", ["rope_factors_long.weight", "rope_factors_short.weight"])
def test_b57_factors_of_longrope_are_refused(name: str) -> None:
    source = MemorySource.read(model_path("llama_gqa"))
    source.put(name, np.ones(8, np.float32))
    with pytest.raises(GraphError, match=name):
        build(source)


@pytest.mark.parametrize("isa", _native.cpu_info()["available_isas"])
@pytest.mark.parametrize("kind", SCALINGS)
def test_b57_kernels_turn_by_the_tables(kind: str, isa: str, tables: Mapping[str, Any]) -> None:
    """What the model is run with, at every position of the reference."""
    frequencies = np.array(scaled_frequencies(BASE, DIM, SCALINGS[kind]))
    head = np.repeat(np.array([1, 0], np.float32), DIM // 2)
    for row, position in enumerate(tables["positions"].tolist()):
        turned = _native.kernels.rope(head, frequencies, position, 1.0, "half", isa)
        expected = np.concatenate([tables[f"{kind}_{part}"][row] for part in ("cos", "sin")])
        assert np.abs(turned - expected).max() < TABLE_TOLERANCE


def test_b58_both_spellings_of_the_kind() -> None:
    expected = scaled_frequencies(BASE, DIM, {"rope_type": "linear", "factor": 4.0})
    assert scaled_frequencies(BASE, DIM, {"type": "linear", "factor": 4.0}) == expected
    both = {"type": "linear", "rope_type": "linear", "factor": 4.0}
    assert scaled_frequencies(BASE, DIM, both) == expected
    with pytest.raises(ConfigError, match="linear and llama3"):
        scaled_frequencies(BASE, DIM, both | {"rope_type": "llama3"})
    with pytest.raises(ConfigError, match="found none"):
        scaled_frequencies(BASE, DIM, {"factor": 4.0})


@pytest.mark.parametrize("alias", ["yarn", "deepseek_yarn"])
@pytest.mark.parametrize("keys", [("type",), ("rope_type",), ("type", "rope_type")])
def test_b58_yarn_is_refused_under_every_spelling(keys: tuple[str, ...], alias: str) -> None:
    """With it, no maximum length is derived from a factor: there is none to apply twice."""
    scaling = dict.fromkeys(keys, alias) | {"original_max_position_embeddings": 4096}
    for factor in ({}, {"factor": 4.0}):
        with pytest.raises(ConfigError, match=f"rope type '{alias}' is not known"):
            scaled_frequencies(BASE, DIM, scaling | factor)


@pytest.mark.parametrize("factor", [{}, {"rope__scaling__factor": 4.0}])
def test_b58_positions_end_at_the_context_length_of_the_file(factor: dict[str, Any]) -> None:
    """GGUF's context_length is the scaled one; a linear factor does not lengthen it again."""
    source = MemorySource.read(model_path("llama_gqa"))
    source.metadata |= {f"llama.{key.replace('__', '.')}": value for key, value in factor.items()}
    source.metadata["llama.rope.scaling.original_context_length"] = 512
    assert build(source).max_positions == source.metadata["llama.context_length"] == 2048


def test_b58_two_factors_that_differ_are_refused() -> None:
    both = {"rope__scaling__factor": 8.0, "rope__scale_linear": 8.0}
    expected = scaled_frequencies(BASE, DIM, SCALINGS["linear"])
    assert frequencies_of(gguf_source(**both)) == expected
    with pytest.raises(ConfigError, match=r"factor is 8\.0 and llama\.rope\.scale_linear is 4\.0"):
        frequencies_of(gguf_source(**both | {"rope__scale_linear": 4.0}))


def test_missing_parameters_are_named() -> None:
    with pytest.raises(ConfigError, match="high_freq_factor, low_freq_factor, original_max"):
        scaled_frequencies(BASE, DIM, {"rope_type": "llama3", "factor": 8.0})
