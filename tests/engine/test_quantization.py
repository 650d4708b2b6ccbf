"""`--quantization` against what the checkpoint is: noticed, made at load, or refused."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from backends.batches import Piece, make_runner, pages_for, poison, run
from models.memory_source import MemorySource
from models.quantized import float_model, one_format

from invar import _native
from invar.backends.cpu.formats import WEIGHT_FORMATS
from invar.config import EngineConfig
from invar.engine.loader import load_engine
from invar.engine.quantization import QuantizedSource, apply_quantization
from invar.engine.quantization_names import CALIBRATION, KNOWN, MADE_AT_LOAD, NO_QUANTISER
from invar.graph.interpreter import Interpreter
from invar.models.registry import build
from invar.weights import mixtures
from invar.weights.formats import QuantType, dequantize, quantize
from invar.weights.gguf import GGUFFile
from invar.weights.mixtures import MIXTURES
from invar.weights.sources import pull

IDS = np.random.default_rng(6).integers(0, 256, 40).tolist()
# Of the largest logit: one activation code, as in tests/backends/test_contract.py.
ONE_CODE = 4e-3
# Of the norm of the logits, what the formats cost on this model of one layer: measured, half as
# much again. A coarser format would not pass for a fine one, nor plain weights for either.
COSTS = {
    "int8": 0.05,
    "fp8": 0.11,
    "q8_0": 0.045,
    "q5_1": 0.17,
    "q5_0": 0.19,
    "q4_1": 0.37,
    "q4_0": 0.4,
    "q2_k": 0.9,
    "q2_k_s": 1.05,
    "q3_k_s": 0.65,
    "q3_k_m": 0.51,
    "q3_k_l": 0.47,
    "q4_k_s": 0.27,
    "q4_k_m": 0.22,
    "q5_k_s": 0.17,
    "q5_k_m": 0.15,
    "q6_k": 0.087,
    "iq4_nl": 0.27,
    "iq4_xs": 0.3,
}

BY_SEARCH = tuple(sorted(set(MIXTURES.values())))
"""Formats whose scales are searched for."""

# What llama.cpp's quantiser (ggml_quantize_chunk, no matrix of importances) leaves as error on the
# rows of the test, of their norm.
GGML_ERRORS = {
    QuantType.Q2_K: 0.29602,
    QuantType.Q3_K: 0.15084,
    QuantType.Q4_K: 0.07134,
    QuantType.Q5_K: 0.03613,
    QuantType.Q6_K: 0.01774,
    QuantType.IQ4_NL: 0.07585,
    QuantType.IQ4_XS: 0.07646,
}


def applied(wanted: str | None, source: MemorySource) -> MemorySource | QuantizedSource:
    return apply_quantization(wanted, build(source), source, "model")


@pytest.mark.parametrize("isa", _native.cpu_info()["available_isas"])
@pytest.mark.parametrize("stored", [QuantType.F32, QuantType.F16, QuantType.BF16])
@pytest.mark.parametrize(
    "kind",
    [kind for kind in MADE_AT_LOAD.values() if kind not in BY_SEARCH],
    ids=lambda kind: kind.name,
)
def test_rows_are_those_of_the_numpy_quantiser(
    kind: QuantType, stored: QuantType, isa: str
) -> None:
    values = np.random.default_rng(kind).standard_normal((37, 288)).astype(np.float32)
    values[0] = 0
    values[1, ::2] = 1.5
    values[2] = np.round(values[2] * 4) / 8  # ties of the rounding
    values[3] = np.abs(values[3])
    raw = quantize(values, stored)
    plain = dequantize(raw, stored, values.shape)
    names = WEIGHT_FORMATS[stored], WEIGHT_FORMATS[kind]
    found = _native.encode_rows(raw, 288, *names, 2, isa)
    np.testing.assert_array_equal(found, quantize(plain, kind))


def encoded(values: np.ndarray, kind: QuantType, isa: str, threads: int = 2) -> np.ndarray:
    raw, names = (
        quantize(values, QuantType.F32),
        (WEIGHT_FORMATS[QuantType.F32], WEIGHT_FORMATS[kind]),
    )
    return _native.encode_rows(raw, values.shape[1], *names, threads, isa)


@pytest.mark.parametrize("kind", BY_SEARCH, ids=lambda kind: kind.name)
def test_searched_scales_leave_no_more_error_than_those_of_llama_cpp(kind: QuantType) -> None:
    values = np.random.default_rng(7).standard_normal((64, 1024)).astype(np.float32)
    values *= np.exp(np.random.default_rng(8).standard_normal((64, 1))).astype(np.float32)
    isas = _native.cpu_info()["available_isas"]
    found = encoded(values, kind, isas[0])
    for isa in isas:
        for threads in (1, 2):
            np.testing.assert_array_equal(encoded(values, kind, isa, threads), found)
    made = dequantize(found, kind, values.shape)
    errors = np.sqrt(((made - values) ** 2).sum(1) / (values**2).sum(1))
    assert errors.mean() < GGML_ERRORS[kind]


@pytest.mark.parametrize("isa", _native.cpu_info()["available_isas"])
@pytest.mark.parametrize("kind", BY_SEARCH, ids=lambda kind: kind.name)
def test_odd_rows_keep_what_the_format_can_hold(kind: QuantType, isa: str) -> None:
    """Zeros, one value alone, one sign, values far apart, the smallest and largest of fp16."""
    values = np.zeros((9, 256), np.float32)
    values[1, 77] = 3.0
    values[2, 77] = -3.0
    values[3] = 0.5
    values[4] = -0.5
    values[5, ::2] = 1000.0
    values[5, 1::2] = -0.001
    values[6] = 6e-8
    values[7] = 6e4
    values[8, 128:] = -6e4
    made = dequantize(encoded(values, kind, isa), kind, values.shape)
    assert np.isfinite(made).all()
    assert not made[0].any()
    coarsest = {QuantType.Q2_K: 0.2, QuantType.Q3_K: 0.13}.get(kind, 0.07)
    for row in (1, 2, 3, 4, 5, 7, 8):
        error = np.abs(made[row] - values[row]).max() / np.abs(values[row]).max()
        assert error < coarsest, (row, error)
    assert np.abs(made[6]).max() < 1e-5


def test_a_mixture_is_that_of_llama_cpp() -> None:
    """Gemma 3 as llama-quantize made it: rows of 640 and 1,024, so that some formats stand in."""
    file = GGUFFile(Path(pull("gemma3-270m")))
    matrices = [name for name, tensor in file.tensors.items() if len(tensor.shape) == 2]
    assert len(matrices) == 127
    for name in matrices:
        tensor = file.tensors[name]
        wanted = mixtures.HEAD
        if name != "token_embd.weight":
            wanted = mixtures.matrix_type("q4_k_m", mixtures.Place.of(name, 18, sharing=4))
        assert mixtures.fitting(wanted, tensor.shape[-1]) == tensor.type, name


@pytest.mark.parametrize("kind", sorted(set(MADE_AT_LOAD.values())), ids=lambda kind: kind.name)
def test_weights_that_scales_cannot_hold_are_refused(kind: QuantType) -> None:
    values = np.ones((2, 512), np.float32)
    values[1, 7] = 1e9
    if kind in (QuantType.INT8, QuantType.FP8):  # whose scales are fp32
        assert np.isfinite(dequantize(encoded(values, kind, ""), kind, values.shape)).all()
    else:
        with pytest.raises(ValueError, match="a weight beyond 65,504, where scales are fp16"):
            encoded(values, kind, "")


def test_a_mixture_says_what_it_makes(caplog: pytest.LogCaptureFixture) -> None:
    made = applied("Q4_K", float_model(layers=1))
    assert caplog.messages == [
        "quantization=Q4_K: 8 matrices of model are quantised to Q4_K as they are loaded, the "
        "output matrix to Q6_K, 2 to Q6_K"
    ]
    finer = [name for name, kind in made.made.items() if kind is QuantType.Q6_K]
    assert sorted(finer) == ["blk.0.attn_v.weight", "blk.0.ffn_down.weight", "token_embd.weight"]


@pytest.mark.parametrize("wanted", MADE_AT_LOAD)
def test_made_at_load(wanted: str, caplog: pytest.LogCaptureFixture) -> None:
    """Logits are those of the formats, and near those of the plain weights."""
    source = float_model(layers=1)
    made = applied(wanted, source)
    kind = MADE_AT_LOAD[wanted].name
    head = QuantType.Q6_K if wanted in MIXTURES else QuantType.Q8_0
    of_head = "" if head.name == kind else f", the output matrix to {head.name}"
    assert f"are quantised to {kind} as they are loaded{of_head}" in caplog.text
    assert made.tensors["blk.0.ffn_up.weight"].type == MADE_AT_LOAD[wanted]
    assert made.tensors["token_embd.weight"].type == head  # tied
    assert made.tensors["output_norm.weight"].type == QuantType.F32
    runner = make_runner(build(made), made)
    poison(runner)
    run(runner, Piece(IDS, 0, pages_for(len(IDS))))
    found = runner.logits(1)[0].astype(np.float64)

    def interpreted(of: MemorySource | QuantizedSource, mode: str) -> np.ndarray:
        interpreter = Interpreter(build(of), of, mode)
        return np.asarray(interpreter.step(interpreter.new_sequence(), IDS)[-1], np.float64)

    expected = interpreted(made, "contract")
    assert np.abs(found - expected).max() < ONE_CODE * np.abs(expected).max()
    plain = interpreted(source, "exact")
    cost = float(np.linalg.norm(found - plain) / np.linalg.norm(plain))
    assert COSTS[wanted] / 3 < cost < COSTS[wanted]


def test_already_that_is_one_notice(caplog: pytest.LogCaptureFixture) -> None:
    source = one_format(QuantType.Q8_0, layers=1)
    assert applied("q8_0", source) is source
    assert [record.getMessage() for record in caplog.records] == [
        "quantization=q8_0: model is that already"
    ]
    assert applied(None, source) is source
    assert len(caplog.records) == 1


def named(**having: object) -> list[str]:
    """The names that have such a meaning."""
    return [
        name
        for name, meaning in KNOWN.items()
        if all(getattr(meaning, key) == value for key, value in having.items())
    ]


@pytest.mark.parametrize("wanted", named(reason=CALIBRATION))
def test_what_needs_calibration_names_the_ways_out(wanted: str) -> None:
    message = rf"plain weights, and {wanted} has to be calibrated.*made with it.*int8, fp8, q8_0"
    with pytest.raises(ValueError, match=message):
        applied(wanted, float_model(layers=1))


@pytest.mark.parametrize("wanted", [name for name in KNOWN if KNOWN[name].made is not None])
def test_names_of_peers_make_what_they_mean(wanted: str) -> None:
    made = applied(wanted.replace("_", "-").upper(), float_model(layers=1))
    found = made.tensors["blk.0.ffn_up.weight"].type
    assert found == MADE_AT_LOAD[KNOWN[wanted].made]


@pytest.mark.parametrize("wanted", KNOWN)
def test_every_name_has_an_answer_on_a_quantised_model(
    wanted: str, caplog: pytest.LogCaptureFixture
) -> None:
    source = one_format(QuantType.INT8, layers=1)
    source.quantization = "compressed-tensors"
    if KNOWN[wanted].made == "int8" or wanted == "compressed_tensors":
        assert applied(wanted, source) is source
        assert caplog.messages == [f"quantization={wanted}: model is that already"]
    else:
        with pytest.raises(ValueError, match=r"quantised already \(compressed-tensors: INT8\)"):
            applied(wanted, source)


@pytest.mark.parametrize(
    ("method", "names"),
    [
        ("awq", "awq awq_marlin AWQ auto-awq moe_wna16 marlin"),
        ("gptq", "gptq gptq_marlin gptq-marlin exllama"),
        ("fp8", "fp8 w8a8_fp8 ptpc_fp8"),
        ("auto-round", "auto-round inc"),
        ("modelopt", "modelopt modelopt_fp8"),
        ("mxfp4", "mxfp4"),
        ("gguf", "gguf"),
    ],
)
def test_a_checkpoint_by_its_method(
    method: str, names: str, caplog: pytest.LogCaptureFixture
) -> None:
    source = one_format(QuantType.Q4_0, layers=1)
    source.quantization = method
    for count, name in enumerate(names.split(), 1):
        assert applied(name, source) is source
        assert len(caplog.messages) == count


def test_a_mixture_is_what_most_of_it_is(caplog: pytest.LogCaptureFixture) -> None:
    """A file of Q4_K_M has other matrices in Q6_K; one of Q6_K is no Q4_K_M."""
    source = one_format(QuantType.Q4_K, layers=2)
    for name in ("blk.0.ffn_down.weight", "blk.0.attn_v.weight"):
        source.put(name, source.dequantize(name), QuantType.Q6_K)
    for name in ("q4_k_m", "Q4_K_M", "q4_k"):
        assert applied(name, source) is source
    assert len(caplog.messages) == 3
    with pytest.raises(ValueError, match=r"quantised already \(Q4_K, Q6_K\)"):
        applied("q6_k", source)


@pytest.mark.parametrize("wanted", named(reason=NO_QUANTISER))
def test_what_has_no_quantiser_says_who_makes_it(wanted: str) -> None:
    message = (
        rf"plain weights, and {wanted} has no quantiser here .*llama-quantize.*int8, fp8, q8_0"
    )
    with pytest.raises(ValueError, match=message):
        applied(wanted, float_model(layers=1))


def test_none_and_auto() -> None:
    plain, quantised = float_model(layers=1), one_format(QuantType.Q4_K, layers=1)
    assert all(applied(name, plain) is plain for name in ("none", "auto", "unquant"))
    assert applied("auto", quantised) is quantised
    with pytest.raises(ValueError, match=r"'none': model is quantised \(Q4_K\)"):
        applied("none", quantised)


def test_quantising_twice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"quantised already \(Q4_K\)"):
        applied("int8", one_format(QuantType.Q4_K, layers=1))


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("q8_1", "not known; did you mean q8_0"),
        ("apq", "not known; did you mean awq"),
        ("zzz", r"not known \(known: int8"),
        ("compressed-tensors", "is a format of checkpoints, which is not made at load; .* int8"),
        ("bitsandbytes", "has plain weights, and bitsandbytes has no kernel here; .* int8, fp8"),
    ],
)
def test_what_cannot_be_made(wanted: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        applied(wanted, float_model(layers=1))


def test_rows_of_no_whole_blocks_stay(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        source = float_model(layers=1)
        name = "blk.0.ffn_down.weight"
        cut = {f"blk.0.ffn_{part}.weight": slice(0, 500) for part in ("gate", "up")}
        for other, rows in cut.items():
            source.put(other, source.dequantize(other)[rows])
        source.put(name, source.dequantize(name)[:, :500].copy())
        source.metadata["llama.feed_forward_length"] = 500
        made = applied("q4_0", source)
        assert made.tensors[name].type == QuantType.F32
        assert f"1 stay as they are, their rows being no whole blocks: {name}" in caplog.text
        # Formats of whole rows take them as they are.
        assert applied("int8", source).tensors[name].type == QuantType.INT8


def test_nan_among_the_weights_is_refused_by_name() -> None:
    source = float_model(layers=1)
    values = source.dequantize("blk.0.attn_q.weight").copy()
    values[3, 5] = np.nan
    source.put("blk.0.attn_q.weight", values)
    with pytest.raises(ValueError, match=r"attn_q\.weight cannot become int8: NaN or infinity"):
        applied("int8", source).raw("blk.0.attn_q.weight")


def test_builds_of_one_file_have_fingerprints_of_their_own(tmp_path: Path) -> None:
    path = str(float_model().write(tmp_path / "plain.gguf"))
    fingerprints = set()
    for wanted in (None, "int8", "fp8"):
        model = load_engine(EngineConfig(model=path, quantization=wanted, num_threads=1))
        fingerprints.add(model.info.fingerprint)
        model.close()
    assert len(fingerprints) == 3
