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
from invar.weights.formats import QuantType, dequantize, quantize

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
}


def applied(wanted: str | None, source: MemorySource) -> MemorySource | QuantizedSource:
    return apply_quantization(wanted, build(source), source, "model")


@pytest.mark.parametrize("isa", _native.cpu_info()["available_isas"])
@pytest.mark.parametrize("stored", [QuantType.F32, QuantType.F16, QuantType.BF16])
@pytest.mark.parametrize("kind", MADE_AT_LOAD.values(), ids=lambda kind: kind.name)
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


@pytest.mark.parametrize("wanted", MADE_AT_LOAD)
def test_made_at_load(wanted: str, caplog: pytest.LogCaptureFixture) -> None:
    """Logits are those of the formats, and near those of the plain weights."""
    source = float_model(layers=1)
    made = applied(wanted, source)
    kind = MADE_AT_LOAD[wanted].name
    head = "" if wanted == "q8_0" else ", the output matrix to Q8_0"
    assert f"are quantised to {kind} as they are loaded{head}" in caplog.text
    assert made.tensors["blk.0.ffn_up.weight"].type == MADE_AT_LOAD[wanted]
    assert made.tensors["token_embd.weight"].type == QuantType.Q8_0  # tied
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
