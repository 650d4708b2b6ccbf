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
from invar.graph.graph import GraphError
from invar.graph.operations import ApplyRope, Rope, RopeStyle
from invar.graph.passes import with_longest
from invar.models.hf import context_length, rope_scaling
from invar.models.metadata import ArchitectureKeys, ConfigError
from invar.models.phi3 import longrope
from invar.models.registry import build
from invar.models.rope import FACTORS_TENSOR, LONG_TENSOR, SHORT_TENSOR, rope_of
from invar.models.rope_scaling import SCALINGS as KINDS
from invar.models.rope_scaling import Frequencies, ScaledRope, scaled_rope

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
    "llama3_step": {
        **{"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0},
        "original_max_position_embeddings": 8192,
    },
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "max_position_embeddings": 4096},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn_mscale": {
        **{"rope_type": "yarn", "factor": 40.0, "beta_fast": 16, "beta_slow": 2},
        **{"mscale": 1.0, "mscale_all_dim": 0.7, "original_max_position_embeddings": 4096},
    },
    "yarn_given": {
        **{"rope_type": "yarn", "factor": 8.0, "attention_factor": 0.8, "truncate": False},
        "original_max_position_embeddings": 4096,
    },
    "longrope": {
        "rope_type": "longrope",
        "long_factor": [1.0 + pair / 4 for pair in range(32)],
        "short_factor": [1.0 + pair / 64 for pair in range(32)],
        "original_max_position_embeddings": 4096,
        "max_position_embeddings": 131072,
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


def scaled(scaling: Mapping[str, Any] | None) -> ScaledRope:
    return scaled_rope(BASE, DIM, scaling)


def difference(
    kind: str, frequencies: Frequencies, tables: Mapping[str, Any], magnitude: float = 1.0
) -> float:
    angles = tables["positions"][:, None] * np.array(frequencies)
    cos = np.abs(np.cos(angles) * magnitude - tables[f"{kind}_cos"]).max()
    return float(max(cos, np.abs(np.sin(angles) * magnitude - tables[f"{kind}_sin"]).max()))


@pytest.mark.parametrize("kind", SCALINGS)
def test_b57_tables_equal_the_reference(kind: str, tables: Mapping[str, Any]) -> None:
    assert tables["positions"].tolist() == [0, 1000, 9000, 100000]
    found = scaled(SCALINGS[kind])
    assert difference(kind, found.inv_freq, tables, found.magnitude) < TABLE_TOLERANCE


def test_b57_up_to_the_trained_length_rope_is_the_shorter_one(tables: Mapping[str, Any]) -> None:
    """A served length decides, once: a model run within its trained length is the plain one."""
    found = scaled(SCALINGS["longrope"])
    assert found.short_positions == 4096
    short = difference("longrope_short", found.short_inv_freq, tables, found.magnitude)
    assert short < TABLE_TOLERANCE
    dynamic = scaled(SCALINGS["dynamic"])
    assert dynamic.short_inv_freq == scaled(None).inv_freq
    assert dynamic.short_positions == 4096


def test_one_kind_is_not_taken_for_another(tables: Mapping[str, Any]) -> None:
    for kind in SCALINGS:
        for other in SCALINGS.keys() - {kind}:
            found = scaled(SCALINGS[other])
            assert difference(kind, found.inv_freq, tables, found.magnitude) > 0.1


def gguf_source(**metadata: Any) -> MemorySource:
    keys = {f"llama.{key.replace('__', '.')}": value for key, value in metadata.items()}
    return MemorySource({"llama.rope.freq_base": BASE} | keys, {})


def rope_from(source: MemorySource) -> Rope:
    keys = ArchitectureKeys(source.metadata, "llama")
    return rope_of(source, keys, DIM, RopeStyle.INTERLEAVED)


def frequencies_of(source: MemorySource) -> Frequencies:
    return rope_from(source).inv_freq


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
    plain = np.array(scaled(None).inv_freq)
    expected = plain / tables["llama3_factors"].astype(np.float64)
    np.testing.assert_allclose(frequencies, expected, rtol=1e-15)


def test_a_factor_tensor_of_another_length_is_refused(tables: Mapping[str, Any]) -> None:
    source = gguf_source()
    source.put(FACTORS_TENSOR, tables["llama3_factors"][:-1])
    with pytest.raises(ConfigError, match=r"31 factors, expected 32"):
        frequencies_of(source)


@pytest.mark.parametrize("kind", ["spiral", "Linear", "mrope", "longrope2"])
def test_b57_an_unknown_kind_is_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match=kind):
        scaled({"rope_type": kind, "factor": 2.0})
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
    assert frequencies_of(source) == scaled(None).inv_freq


def yarn_source(**metadata: Any) -> MemorySource:
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 32768} | metadata
    return gguf_source(**{f"rope__scaling__{key}": value for key, value in scaling.items()})


def test_b57_gguf_with_yarn(tables: Mapping[str, Any]) -> None:
    rope = rope_from(yarn_source())
    assert difference("yarn", rope.inv_freq, tables, rope.magnitude) < TABLE_TOLERANCE
    halved = rope_from(yarn_source(attn_factor=0.5))
    assert halved.inv_freq == rope.inv_freq
    assert halved.magnitude == pytest.approx(rope.magnitude / 2, rel=1e-12)
    assert rope_from(yarn_source(yarn_beta_fast=16.0)).inv_freq != rope.inv_freq
    with pytest.raises(ConfigError, match=r"yarn_ext_factor is 0\.5, must be 1"):
        rope_from(yarn_source(yarn_ext_factor=0.5))
    with pytest.raises(ConfigError, match=r"scaling\.factor is missing, which yarn needs"):
        rope_from(yarn_source(factor=None))


def longrope_source() -> MemorySource:
    source = gguf_source(rope__scaling__original_context_length=4096, context_length=131072)
    for name, which in ((LONG_TENSOR, "long"), (SHORT_TENSOR, "short")):
        scaling = SCALINGS["longrope"]
        assert scaling is not None
        source.put(name, np.array(scaling[f"{which}_factor"], np.float32))
    return source


def test_b57_gguf_with_longrope(tables: Mapping[str, Any]) -> None:
    rope = rope_from(longrope_source())
    assert difference("longrope", rope.inv_freq, tables, rope.magnitude) < TABLE_TOLERANCE
    assert rope.shorter is not None
    short = difference("longrope_short", rope.shorter.inv_freq, tables, rope.magnitude)
    assert short < TABLE_TOLERANCE


@pytest.mark.parametrize("name", [LONG_TENSOR, SHORT_TENSOR])
def test_b57_half_of_the_factors_of_longrope_are_refused(name: str) -> None:
    source = MemorySource.read(model_path("llama_gqa"))
    source.put(name, np.ones(8, np.float32))
    with pytest.raises((ConfigError, GraphError), match="longrope needs both"):
        build(source)


@pytest.mark.parametrize("isa", _native.cpu_info()["available_isas"])
@pytest.mark.parametrize("kind", SCALINGS)
def test_b57_kernels_turn_by_the_tables(kind: str, isa: str, tables: Mapping[str, Any]) -> None:
    """What the model is run with, at every position of the reference."""
    rope = scaled(SCALINGS[kind])
    frequencies = np.array(rope.inv_freq)
    head = np.repeat(np.array([1, 0], np.float32), DIM // 2)
    for row, position in enumerate(tables["positions"].tolist()):
        turned = _native.kernels.rope(head, frequencies, position, rope.magnitude, "half", isa)
        expected = np.concatenate([tables[f"{kind}_{part}"][row] for part in ("cos", "sin")])
        assert np.abs(turned - expected).max() < TABLE_TOLERANCE


@pytest.mark.parametrize("isa", _native.cpu_info()["available_isas"])
@pytest.mark.parametrize("kind", SCALINGS)
def test_b57_kernels_turn_exactly_up_to_a_million_positions(kind: str, isa: str) -> None:
    """Angles in double precision: in single they are off by 0.03 there."""
    rope = scaled(SCALINGS[kind])
    frequencies = np.array(rope.inv_freq)
    head = np.repeat(np.array([1, 0], np.float32), DIM // 2)
    for position in (131_071, 131_072, 999_999, 2**20 - 1, 2**24 + 1, 2**31 - 1):
        turned = _native.kernels.rope(head, frequencies, position, rope.magnitude, "half", isa)
        angles = position * frequencies
        exact = np.concatenate([np.cos(angles), np.sin(angles)]) * rope.magnitude
        assert np.abs(turned - exact).max() < TABLE_TOLERANCE
    single = np.float32(2**20 - 1) * frequencies.astype(np.float32)
    assert np.abs(np.cos(single) - np.cos((2**20 - 1) * frequencies)).max() > 1e-3


def test_b58_both_spellings_of_the_kind() -> None:
    expected = scaled({"rope_type": "linear", "factor": 4.0}).inv_freq
    assert scaled({"type": "linear", "factor": 4.0}).inv_freq == expected
    both = {"type": "linear", "rope_type": "linear", "factor": 4.0}
    assert scaled(both).inv_freq == expected
    with pytest.raises(ConfigError, match="linear and llama3"):
        scaled(both | {"rope_type": "llama3"})
    with pytest.raises(ConfigError, match="found none"):
        scaled({"factor": 4.0})


def config(scaling: dict[str, Any] | None, **changes: Any) -> dict[str, Any]:
    return {"max_position_embeddings": 4096, "rope_scaling": scaling, "rope_theta": BASE} | changes


@pytest.mark.parametrize("alias", ["yarn", "deepseek_yarn"])
@pytest.mark.parametrize("keys", [("type",), ("rope_type",), ("type", "rope_type")])
def test_b58_yarn_under_every_spelling(keys: tuple[str, ...], alias: str) -> None:
    scaling = {"factor": 4.0, "original_max_position_embeddings": 1024}
    expected = scaled(scaling | {"rope_type": "yarn"})
    given = config(scaling | dict.fromkeys(keys, alias))
    assert scaled(rope_scaling(given)) == expected
    assert context_length(given) == 4096


@pytest.mark.parametrize(
    ("scaling", "longest", "expected"),
    [
        (None, 4096, 4096),
        ({"rope_type": "default"}, 4096, 4096),
        ({"type": "linear", "factor": 8.0}, 4096, 32768),
        ({"rope_type": "dynamic", "factor": 2.5}, 4096, 10240),
        # Scaled already, with the trained length beside it: DeepSeek V3. Never 40 times 163840.
        (
            {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
            163840,
            163840,
        ),
        # The trained length twice: Qwen 2.5.
        (
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            32768,
            131072,
        ),
        ({"type": "yarn", "factor": 4.0}, 4096, 16384),
        ({"type": "yarn", "original_max_position_embeddings": 1024}, 4096, 4096),
        ({"rope_type": "llama3", "factor": 8.0}, 131072, 131072),
        ({"type": "su", "factor": 32.0}, 131072, 131072),
        ({"type": "longrope"}, 131072, 131072),
    ],
)
def test_b58_the_longest_is_derived_as_the_reference_does(
    scaling: dict[str, Any] | None, longest: int, expected: int
) -> None:
    assert context_length(config(scaling, max_position_embeddings=longest)) == expected


def test_b58_without_a_factor_yarn_stretches_to_the_longest() -> None:
    scaling = {"rope_type": "yarn", "original_max_position_embeddings": 1024}
    expected = scaled(scaling | {"factor": 4.0})
    assert scaled(rope_scaling(config(scaling))) == expected


def test_b58_a_trained_length_beside_the_scaling_counts_more() -> None:
    """Phi-3 has it there."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1}
    given = config(scaling, original_max_position_embeddings=1024)
    assert scaled(rope_scaling(given)) == scaled(
        scaling | {"original_max_position_embeddings": 1024}
    )


@pytest.mark.parametrize(("positions", "shorter"), [(4096, True), (4097, False)])
def test_the_served_length_chooses_the_rope(positions: int, shorter: bool) -> None:
    source = MemorySource.read(model_path("llama_gqa"))
    factors = {LONG_TENSOR: 4.0, SHORT_TENSOR: 2.0}
    for name, factor in factors.items():
        source.put(name, np.full(8, factor, np.float32))
    source.metadata |= {
        "llama.rope.scaling.original_context_length": 4096,
        "llama.context_length": 131072,
    }
    graph = with_longest(build(source), positions)
    plain = scaled_rope(10000.0, 16, None).inv_freq
    divided = tuple(f / (2.0 if shorter else 4.0) for f in plain)
    ropes = {op.rope for op in graph.ops if isinstance(op, ApplyRope)}
    assert {rope.inv_freq for rope in ropes} == {divided}
    assert all(rope.shorter is None for rope in ropes)


WRONG: list[Any] = [0, -1.0, float("nan"), float("inf"), "2", True, [2.0], {}]


@pytest.mark.parametrize("value", WRONG)
def test_a_factor_that_is_none_is_refused(value: Any) -> None:
    for kind in ("linear", "dynamic", "yarn", "llama3"):
        scaling = {"rope_type": kind, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        scaling |= {"original_max_position_embeddings": 64, "max_position_embeddings": 64}
        with pytest.raises(ConfigError, match="factor must be a positive number"):
            scaled(scaling | {"factor": value})


@pytest.mark.parametrize("kind", KINDS)
def test_any_nonsense_gives_a_rope_or_one_kind_of_error(kind: str) -> None:
    names = ["factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"]
    names += ["long_factor", "short_factor", "low_freq_factor", "high_freq_factor", "truncate"]
    names += ["original_max_position_embeddings", "max_position_embeddings"]
    sound: list[Any] = [1.0, 2.0, 64, 4096, 1e-30, 1e30, [1.0] * 32, None]
    random = np.random.default_rng(1)
    for _ in range(200):
        values = {name: (WRONG + sound)[random.integers(len(WRONG + sound))] for name in names}
        try:
            found = scaled(values | {"rope_type": kind})
        except ConfigError:
            continue
        assert np.isfinite(found.inv_freq).all()
        assert np.isfinite(found.magnitude)


@pytest.mark.parametrize("factor", [{}, {"rope__scaling__factor": 4.0}])
def test_b58_positions_end_at_the_context_length_of_the_file(factor: dict[str, Any]) -> None:
    """GGUF's context_length is the scaled one; a linear factor does not lengthen it again."""
    source = MemorySource.read(model_path("llama_gqa"))
    source.metadata |= {f"llama.{key.replace('__', '.')}": value for key, value in factor.items()}
    source.metadata["llama.rope.scaling.original_context_length"] = 512
    assert build(source).max_positions == source.metadata["llama.context_length"] == 2048


def test_b58_two_factors_that_differ_are_refused() -> None:
    both = {"rope__scaling__factor": 8.0, "rope__scale_linear": 8.0}
    expected = scaled(SCALINGS["linear"]).inv_freq
    assert frequencies_of(gguf_source(**both)) == expected
    with pytest.raises(ConfigError, match=r"factor is 8\.0 and llama\.rope\.scale_linear is 4\.0"):
        frequencies_of(gguf_source(**both | {"rope__scale_linear": 4.0}))


def test_missing_parameters_are_named() -> None:
    with pytest.raises(ConfigError, match="high_freq_factor, low_freq_factor, original_max"):
        scaled({"rope_type": "llama3", "factor": 8.0})


@pytest.mark.parametrize("kind", ["x" * 1000, {"x" * 1000: 1}, [["x" * 1000]], 10**1000])
def test_a_kind_that_is_none_is_named_in_brief(kind: Any) -> None:
    with pytest.raises(ConfigError) as raised:
        scaled(longrope({"rope_scaling": {"rope_type": kind, "long_factor": [1.0]}}))
    assert len(str(raised.value)) < 300
    with pytest.raises(ConfigError, match="must name one kind") as raised:
        scaled({"rope_type": kind, "type": "linear", "factor": 2.0})
    assert len(str(raised.value)) < 300
