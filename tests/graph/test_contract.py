"""The roundings of contract mode, one by one against their definition, and all together."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from golden.tiny_models import MIXTURES, TINY_MODELS, load_golden, model_path
from models.memory_source import MemorySource
from models.quantized import KERNEL_FORMATS, OTHER_FORMATS, mixed_formats, one_format

from invar.graph import contract
from invar.graph.contract import ActivationFormat
from invar.graph.interpreter import Interpreter, Mode
from invar.graph.operations import KVFormat
from invar.graph.passes import with_kv_format
from invar.models.registry import build
from invar.weights.formats import QuantType

Array = npt.NDArray[np.floating]


# ---------------------------------------------------------------- bf16


def test_bf16_is_the_nearest_and_ties_go_to_even() -> None:
    x = np.random.default_rng(1).standard_normal(4000).astype(np.float32) * 10
    rounded = contract.round_to_bf16(x)
    assert not (rounded.view(np.uint32) & 0xFFFF).any()
    spacing = np.exp2(np.floor(np.log2(np.abs(x.astype(np.float64)))) - 7)
    assert (np.abs(rounded.astype(np.float64) - x) <= spacing / 2).all()


@pytest.mark.parametrize(
    ("bits", "expected"),
    [
        (0x3F808000, 0x3F800000),  # a tie: down to even
        (0x3F818000, 0x3F820000),  # a tie: up to even
        (0x3F808001, 0x3F810000),
        (0x3F807FFF, 0x3F800000),
        (0x3FFFFFFF, 0x40000000),  # carries into the exponent
        (0x80000000, 0x80000000),
        (0x7F800000, 0x7F800000),
        (0xFF800000, 0xFF800000),
    ],
)
def test_bf16_of_single_values(bits: int, expected: int) -> None:
    x = np.array([bits], np.uint32).view(np.float32)
    assert contract.round_to_bf16(x).view(np.uint32)[0] == expected


# ---------------------------------------------------------------- codes


@pytest.mark.parametrize("block", [32, 256])
def test_codes_are_whole_steps_of_the_largest_over_127(block: int) -> None:
    x = np.random.default_rng(2).standard_normal((5, 512)).astype(np.float32)
    x[1] = 0
    x[2, :block] = 0
    rounded = contract.round_to_codes(x, block).reshape(-1, block)
    blocks = x.reshape(-1, block).astype(np.float64)
    step = np.abs(blocks).max(axis=1, keepdims=True) / 127
    assert (np.abs(rounded - blocks) <= step * (0.5 + 1e-5)).all()
    codes = rounded[step[:, 0] > 0] / step[step[:, 0] > 0]
    np.testing.assert_allclose(codes, np.rint(codes), atol=1e-4)
    assert np.abs(codes).max() == pytest.approx(127, rel=1e-6)
    assert not rounded[step[:, 0] == 0].any()


def test_a_code_halfway_goes_to_even() -> None:
    x = np.zeros((1, 32), np.float32)
    x[0, :5] = [127, 0.5, 1.5, 2.5, -2.5]
    codes = contract.round_to_codes(x, 32)[0, :5]
    np.testing.assert_allclose(codes, [127, 0, 2, 2, -2], rtol=1e-6)


def test_the_weight_decides_the_form_of_the_activation() -> None:
    assert contract.ACTIVATION_FORMATS.keys() == {*KERNEL_FORMATS, *OTHER_FORMATS}
    x = np.random.default_rng(3).standard_normal((2, 512)).astype(np.float32)
    by_type = {form: contract.round_activation(x, form) for form in KERNEL_FORMATS}
    np.testing.assert_array_equal(by_type[QuantType.F16], x)
    np.testing.assert_array_equal(by_type[QuantType.BF16], contract.round_to_bf16(x))
    np.testing.assert_array_equal(by_type[QuantType.Q4_1], contract.round_to_codes(x, 32))
    np.testing.assert_array_equal(by_type[QuantType.Q6_K], contract.round_to_codes(x, 256))


def test_a_format_without_a_kernel_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"Q8_K weights \(known: F32, F16"):
        contract.round_activation(np.zeros((1, 256), np.float32), QuantType.Q8_K)


# ---------------------------------------------------------------- K and V


def test_fp16_is_ieee() -> None:
    x = np.array([[[1 / 3, 65519.99, 65520.0, -1e6, 2.0**-24, 2.0**-26, 1 + 2.0**-11]]])
    expected = [0.333251953125, 65504, np.inf, -np.inf, 2.0**-24, 0, 1]
    assert contract.round_kv(x, KVFormat.FP16).ravel().tolist() == expected


def test_int8_has_a_scale_for_each_token_and_head() -> None:
    x = np.random.default_rng(3).standard_normal((5, 2, 64)) * [[[1], [50]]]
    x[2, 1] = 0
    rounded = contract.round_kv(x, KVFormat.INT8)
    largest = np.abs(x).max(axis=2, keepdims=True)
    assert (np.abs(rounded - x) <= largest / 254 * 1.0001).all()
    np.testing.assert_allclose(np.abs(rounded).max(axis=2, keepdims=True), largest, rtol=1e-6)
    for token in range(5):  # whoever stands beside it
        alone = contract.round_kv(x[token : token + 1, 1:], KVFormat.INT8)
        np.testing.assert_array_equal(alone[0, 0], rounded[token, 1])


def test_operands_are_rounded_beside_bf16_alone() -> None:
    q = np.random.default_rng(4).standard_normal((3, 16)).astype(np.float32)
    scaled = q * (np.float32(0.25) * contract.LOG2_E)
    for kv_format in (KVFormat.FP16, KVFormat.INT8):
        np.testing.assert_array_equal(contract.scaled_query(q, 0.25, None, kv_format), scaled)
    rounded = contract.scaled_query(q, 0.25, None, KVFormat.BF16)
    np.testing.assert_array_equal(rounded, contract.round_to_bf16(scaled))


# ---------------------------------------------------------------- tiles and splits


def softmax_of(scores: Array, visible: npt.NDArray[np.bool_], v: Array) -> Array:
    weights = np.where(visible, np.exp2(scores - scores.max(axis=1, keepdims=True)), 0)
    return np.asarray(weights / weights.sum(axis=1, keepdims=True) @ v)


def attention_case(keys: int, window: int | None) -> tuple[Array, npt.NDArray[np.bool_], Array]:
    random = np.random.default_rng(keys)
    positions = np.array([keys - 1, max(keys - 2, 0), keys // 2, min(64, keys - 1), 0])
    distance = positions[:, None] - np.arange(keys)
    visible = (distance >= 0) & (distance < (window or keys))
    scores = 4 * random.standard_normal((len(positions), keys))
    return scores, visible, contract.round_to_bf16(random.standard_normal((keys, 16)))


@pytest.mark.parametrize("keys", [1, 63, 64, 65, 1023, 1024, 1025, 2500])
@pytest.mark.parametrize("window", [None, 1, 40, 1100])
def test_tiles_and_splits_make_a_softmax(keys: int, window: int | None) -> None:
    """Half a bf16 step of every probability is all that may differ."""
    scores, visible, v = attention_case(keys, window)
    difference = contract.tiled_attention(scores, visible, v) - softmax_of(scores, visible, v)
    assert np.abs(difference).max() <= 2.0**-9 * np.abs(v).max() * 1.01
    finer = contract.tiled_attention(scores, visible, v, KVFormat.INT8)
    assert np.abs(finer - softmax_of(scores, visible, v)).max() <= 2.0**-20 * np.abs(v).max()


def test_a_wholly_masked_tile_changes_no_bit() -> None:
    """Keys that a row does not see do not exist: before the window, after the row."""
    scores, visible, v = attention_case(200, 30)
    whole = contract.tiled_attention(scores, visible, v)
    poisoned = np.where(visible, scores, 1e30)
    np.testing.assert_array_equal(contract.tiled_attention(poisoned, visible, v), whole)
    cut = contract.tiled_attention(scores[2:, :128], visible[2:, :128], v[:128])
    np.testing.assert_array_equal(cut, whole[2:])


def test_the_maximum_advances_once_a_tile() -> None:
    """p is rounded against the maximum so far, so that where tiles lie shows in the last bits."""
    scores, visible, v = attention_case(200, None)
    shifted = np.concatenate([np.zeros((5, 7)), scores], axis=1)
    unseen = np.concatenate([np.zeros((5, 7), np.bool_), visible], axis=1)
    moved = contract.tiled_attention(shifted, unseen, np.concatenate([np.ones((7, 16)), v]))
    whole = contract.tiled_attention(scores, visible, v)
    assert (moved != whole).any()
    np.testing.assert_allclose(moved, whole, atol=2.0**-8 * np.abs(v).max())


# ---------------------------------------------------------------- whole models


def logits_of(
    source: MemorySource, mode: Mode, token_ids: list[int], kv_format: KVFormat = KVFormat.BF16
) -> Array:
    interpreter = Interpreter(with_kv_format(build(source), kv_format), source, mode)
    return interpreter.step(interpreter.new_sequence(), token_ids)


def relative_error(found: Array, expected: Array) -> float:
    """Root mean square of the difference over that of the logits."""
    return float(np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2)))


@pytest.mark.parametrize("name", TINY_MODELS)
def test_without_its_roundings_contract_is_exact(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fp32 between operations alone: the roundings are all that the modes differ in."""

    def unrounded(x: Array) -> Array:
        return x.astype(np.float32)

    monkeypatch.setattr(contract, "round_to_bf16", unrounded)
    golden = load_golden(name)
    source = MemorySource.read(model_path(name))
    logits = logits_of(source, "contract", golden.token_ids)[golden.rows]
    assert relative_error(logits, golden.logits) < 16 * 2.0**-24


# bf16 in attention moves the logits of these models by about 2^-8; s8 codes of activations by about
# 1 / 127 of the largest of a block, a percent or two after three layers.
BF16_TOLERANCE = 0.02
CODE_TOLERANCE = 0.05


@pytest.mark.parametrize("name", TINY_MODELS)
def test_contract_is_close_to_exact_on_tiny_models(name: str) -> None:
    golden = load_golden(name)
    source = MemorySource.read(model_path(name))
    logits = logits_of(source, "contract", golden.token_ids)[golden.rows]
    assert 1e-5 < relative_error(logits, golden.logits) < BF16_TOLERANCE


# A mixture is left out: what int8 loses may send a token to another expert.
@pytest.mark.parametrize("name", [name for name in TINY_MODELS if name not in MIXTURES])
def test_kv_formats_by_what_they_lose(name: str) -> None:
    """fp16 keeps three bits more than bf16; int8 loses half a code of 127 of a head's largest."""
    golden = load_golden(name)
    source = MemorySource.read(model_path(name))
    errors = {}
    for kv_format in KVFormat:
        logits = logits_of(source, "contract", golden.token_ids, kv_format)[golden.rows]
        errors[kv_format] = relative_error(logits, golden.logits)
        exact = logits_of(source, "exact", golden.token_ids, kv_format)[golden.rows]
        assert relative_error(exact, golden.logits) < 16 * 2.0**-24
    assert errors[KVFormat.BF16] < BF16_TOLERANCE
    assert 1e-5 < errors[KVFormat.FP16] < errors[KVFormat.BF16] / 4
    assert errors[KVFormat.BF16] < errors[KVFormat.INT8] < CODE_TOLERANCE


def source_of(what: str) -> MemorySource:
    if what.startswith("mixed "):
        return mixed_formats(what.removeprefix("mixed "))
    return one_format(QuantType[what], layers=1)


@pytest.mark.parametrize(
    "what",
    ["mixed llama", "mixed gemma3", *(form.name for form in (*KERNEL_FORMATS, *OTHER_FORMATS))],
)
def test_contract_is_close_to_exact_in_every_format(what: str) -> None:
    source = source_of(what)
    ids = np.random.default_rng(5).integers(0, 256, 70).tolist()
    exact, rounded = (logits_of(source, mode, ids) for mode in ("exact", "contract"))
    error = relative_error(rounded, exact)
    coded = "mixed" in what or contract.ACTIVATION_FORMATS[QuantType[what]] in (
        ActivationFormat.Q8_32,
        ActivationFormat.Q8_256,
        ActivationFormat.Q8_ROW,
    )
    assert 1e-5 < error < (CODE_TOLERANCE if coded else BF16_TOLERANCE)
    for wrong in (0 * rounded, 2 * rounded, np.roll(rounded, 1, axis=1), np.roll(rounded, 1, 0)):
        assert relative_error(wrong, exact) > 10 * CODE_TOLERANCE
