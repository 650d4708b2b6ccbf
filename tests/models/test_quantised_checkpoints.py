"""Quantised checkpoints in Hugging Face layout: values, logits, and what is wrong with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backends.batches import Piece, make_runner, pages_for, poison, run
from golden.hf_form import hf_tensors, write_hf_directory
from golden.quantised_form import E2M1, E4M3, FORMS, Form, Written
from golden.safetensors_writer import Tensor, stored, write_sharded
from golden.tiny_models import model_path
from models.memory_source import MemorySource

from invar.graph.fused import GatedLinear, HeadsLinear
from invar.graph.interpreter import Interpreter
from invar.graph.operations import Reorder
from invar.graph.passes import optimise
from invar.models.hf_source import HFSource
from invar.models.registry import build, open_directory
from invar.weights.formats import QuantType, dequantize
from invar.weights.gguf import GGUFFile
from invar.weights.quantization_settings import settings_in
from invar.weights.quantized_directory import QuantizedDirectory
from invar.weights.row_formats import E4M3 as OURS
from invar.weights.safetensors import SafetensorsError

NAME = "llama_gqa"
IDS = np.random.default_rng(9).integers(3, 256, 40).tolist()
ONE_CODE = 4e-3  # of the largest logit, as in tests/backends/test_contract.py
UP = "model.layers.0.mlp.up_proj"
KINDS = {
    "awq 32": QuantType.INT4_ZP,
    "gptq 4 64 sym": QuantType.Q4_0,
    "gptq 8 32": QuantType.INT8_ZP,
    "gptq 4 32 act": QuantType.INT4_ZP,
    "gptq 4 32 sym act apart": QuantType.Q4_0,
    "gptq 8 64 sym v2": QuantType.Q8_0,
    "gptq 8 all sym": QuantType.Q8_0,
    "packed 4 32 sym": QuantType.Q4_0,
    "int8": QuantType.INT8,
    "fp8 blocks": QuantType.FP8,
    "nvfp4": QuantType.NVFP4_ROWS,
    "nvfp4 of Model Optimizer": QuantType.NVFP4_ROWS,
}


def write_form(
    folder: Path,
    form: Form,
    change: Callable[[dict[str, Tensor]], None] | None = None,
    shards: int = 1,
) -> dict[str, np.ndarray]:
    """The tiny model with its projections in a form; the values they stand for, by HF name."""
    write_hf_directory(NAME, folder)
    values: dict[str, np.ndarray] = {}
    tensors: dict[str, Tensor] = {}
    with GGUFFile(model_path(NAME)) as source:
        plain = hf_tensors(source)
    for name, array in plain.items():
        if "_proj.weight" not in name:
            tensors[name] = stored(array, "F32")
            continue
        written: Written = form.write(name.removesuffix(".weight"), array)
        tensors |= written.tensors
        values[name] = written.values
    if change is not None:
        change(tensors)
    write_sharded(folder, tensors, shards)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = dict(form.settings)
    (folder / "config.json").write_text(json.dumps(config))
    return values


def as_floats(source: HFSource) -> MemorySource:
    return MemorySource(source.metadata, {name: in_order(source, name) for name in source.tensors})


def in_order(source: HFSource, name: str) -> np.ndarray:
    """The values of a weight, its columns those of its input."""
    stored = source.dequantize(name)
    order = source.column_order(name)
    values = np.full_like(stored, np.nan)
    values[..., slice(None) if order is None else order] = stored
    return values


def logits(source: Any, mode: str) -> np.ndarray:
    interpreter = Interpreter(build(source), source, mode)
    return np.asarray(interpreter.step(interpreter.new_sequence(), IDS)[-1], np.float64)


@pytest.mark.parametrize("name", FORMS)
def test_values_and_logits(name: str, tmp_path: Path) -> None:
    """Values are exactly those that the layout stands for; the CPU's logits are its contract's."""
    values = write_form(tmp_path / "model", FORMS[name])
    with open_directory(tmp_path / "model") as source:
        found = in_order(source, "blk.0.ffn_up.weight")
        np.testing.assert_array_equal(found, values[f"{UP}.weight"])
        down = values["model.layers.1.mlp.down_proj.weight"]
        np.testing.assert_array_equal(in_order(source, "blk.1.ffn_down.weight"), down)
        if name in KINDS:
            assert source.tensors["blk.0.ffn_up.weight"].type == KINDS[name]
        assert source.quantization == FORMS[name].settings["quant_method"]
        runner = make_runner(build(source), source)
        poison(runner)
        run(runner, Piece(IDS, 0, pages_for(len(IDS))))
        found = runner.logits(1)[0].astype(np.float64)
        expected = logits(source, "contract")
        assert np.abs(found - expected).max() < ONE_CODE * np.abs(expected).max()
        # Rows of q and k are put in our order with their codes: the model is the float one.
        plain = logits(as_floats(source), "exact")
        np.testing.assert_allclose(logits(source, "exact"), plain, rtol=0, atol=1e-9)
        for wrong in (0 * found, 2 * found, np.roll(found, 1)):
            assert np.abs(wrong - expected).max() > 5 * ONE_CODE * np.abs(expected).max()


class OneWeight:
    """A directory in memory."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        from invar.weights.safetensors import StoredTensor

        self.data = {name: np.frombuffer(raw, np.uint8) for name, (_, _, raw) in tensors.items()}
        self.tensors = {
            name: StoredTensor(name, dtype, tuple(shape), 0, len(raw))
            for name, (dtype, shape, raw) in tensors.items()
        }

    def raw(self, name: str) -> np.ndarray:
        return self.data[name]


def presented(settings: dict[str, Any], tensors: dict[str, Tensor]) -> QuantizedDirectory:
    return QuantizedDirectory(OneWeight(tensors), settings_in("config.json", settings))


def test_bytes_of_an_awq_word() -> None:
    """0x76543210: columns 0 2 4 6 1 3 5 7 have the codes 0 to 7."""
    word = np.full((32, 1), 0x76543210, "<u4")
    zeros, scales = np.zeros((1, 1), "<u4"), np.ones((1, 8), "<f2")
    tensors: dict[str, Tensor] = {
        "a.qweight": ("I32", (32, 1), word.tobytes()),
        "a.qzeros": ("I32", (1, 1), zeros.tobytes()),
        "a.scales": ("F16", (1, 8), scales.tobytes()),
    }
    directory = presented({"quant_method": "awq", "bits": 4}, tensors)
    rows = directory.raw("a.weight").reshape(8, 19)
    assert (rows[:, 3] & 15).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


def test_the_zero_point_of_gptq_is_one_more_than_stored() -> None:
    words = np.full((4, 8), 0xFEDCBA98, "<u4")
    tensors: dict[str, Tensor] = {
        "a.qweight": ("I32", (4, 8), words.tobytes()),
        "a.qzeros": ("I32", (1, 1), np.full((1, 1), 0xF7777777, "<u4").tobytes()),
        "a.scales": ("F16", (1, 8), np.full((1, 8), 0.5, "<f2").tobytes()),
    }
    settings = {"quant_method": "gptq", "bits": 4, "sym": True}
    for extra, zero in (({}, [8, 16]), ({"checkpoint_format": "gptq_v2"}, [7, 15])):
        rows = presented(settings | extra, tensors).raw("a.weight").reshape(8, 19)
        assert rows[[0, 7], 2].tolist() == zero
        assert (rows[0, 3:11] & 15).tolist() == list(range(8, 16))


def test_bytes_of_mxfp4() -> None:
    """GPT-OSS: element 2 i in the low nibble of byte i, experts stacked."""
    blocks = np.arange(2 * 3 * 2 * 16, dtype=np.uint8).reshape(2, 3, 2, 16)
    scales = np.full((2, 3, 2), 128, np.uint8)
    tensors: dict[str, Tensor] = {
        "e.gate_up_proj_blocks": ("U8", blocks.shape, blocks.tobytes()),
        "e.gate_up_proj_scales": ("U8", scales.shape, scales.tobytes()),
    }
    directory = presented({"quant_method": "mxfp4"}, tensors)
    tensor = directory.tensors["e.gate_up_proj"]
    assert (tensor.dtype, tensor.shape) == ("MXFP4", (2, 3, 64))
    found = dequantize(directory.raw(tensor.name), QuantType.MXFP4, tensor.shape)
    e2m1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    flat = blocks.reshape(2, 3, 32)
    np.testing.assert_array_equal(found[..., ::2], 2 * e2m1[flat & 15])
    np.testing.assert_array_equal(found[..., 1::2], 2 * e2m1[flat >> 4])


def test_bytes_of_nvfp4() -> None:
    """Element 2 i in the low nibble of byte i; the scale of all divides."""
    packed = np.arange(64, dtype=np.uint8).reshape(2, 32)
    scales = np.array([[0x38, 0x40, 0x01, 0x7E], [0x38, 0, 0x38, 0x38]], np.uint8)
    tensors: dict[str, Tensor] = {
        "a.weight_packed": ("U8", packed.shape, packed.tobytes()),
        "a.weight_scale": ("F8_E4M3", scales.shape, scales.tobytes()),
        "a.weight_global_scale": ("F32", (1,), np.array([4], "<f4").tobytes()),
    }
    directory = presented({"quant_method": "compressed-tensors"}, tensors)
    tensor = directory.tensors["a.weight"]
    assert (tensor.dtype, tensor.shape) == ("NVFP4_ROWS", (2, 64))
    found = dequantize(directory.raw(tensor.name), QuantType.NVFP4_ROWS, tensor.shape)
    wide = np.repeat([[1, 2, 2.0**-9, 448], [1, 0, 1, 1]], 16, axis=1) / 4
    np.testing.assert_array_equal(found[:, ::2], E2M1[packed & 15] * wide[:, ::2])
    np.testing.assert_array_equal(found[:, 1::2], E2M1[packed >> 4] * wide[:, 1::2])


def test_every_code_of_e4m3() -> None:
    numbers = np.isfinite(E4M3)
    np.testing.assert_array_equal(OURS[numbers], E4M3[numbers].astype(np.float32))
    assert np.isnan(OURS[~numbers]).all()


# ---------------------------------------------------------------- what is wrong is named


def without(part: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors[f"{UP}.{part}"]

    return change


def put(part: str, dtype: str, array: np.ndarray) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{UP}.{part}"] = (dtype, array.shape, array.tobytes())

    return change


UNEVEN = np.repeat(np.array([1, 0], "<i4"), [31, 33])
WRONG = {
    "no scales": ("awq 32", without("scales"), "up_proj: scales is missing.*awq layout"),
    "no zeros": ("gptq 4 32", without("qzeros"), "up_proj: qzeros is missing"),
    "no scale of bytes": ("int8", without("weight_scale"), "up_proj: weight_scale is missing"),
    "groups that do not divide": (
        "gptq 4 32",
        put("scales", "F16", np.ones((3, 64), "<f2")),
        "up_proj: 3 groups of 64 weights are no multiples of 32",
    ),
    "scales of another shape": (
        "awq 32",
        put("scales", "F16", np.ones((2, 60), "<f2")),
        r"up_proj\.scales: F16 of shape \(2, 60\), expected .* \(2, 64\)",
    ),
    "groups of unequal size": (
        "gptq 4 32",
        put("g_idx", "I32", UNEVEN),
        "up_proj.g_idx: does not put 32 columns in each of 2 groups",
    ),
    "groups that are not there": (
        "packed 4 32 act",
        put("weight_g_idx", "I32", UNEVEN + 1),
        "weight_g_idx: does not put 32 columns in each of 2 groups",
    ),
    "groups below the first": (
        "gptq 4 32",
        put("g_idx", "I32", UNEVEN - 2),
        "g_idx: does not put 32 columns in each of 2 groups",
    ),
    "scale blocks": (
        "fp8 blocks",
        put("weight_scale_inv", "F32", np.ones((2, 2), "<f4")),
        r"weight_scale_inv: shape \(2, 2\), expected one scale, 64, or one for each block",
    ),
    "words of another length": (
        "packed 4 64",
        put("weight_packed", "I32", np.zeros((64, 9), "<i4")),
        r"weight_packed: \(64, 9\) words are no \(64, 64\) codes",
    ),
    "scales of half as many": (
        "nvfp4",
        put("weight_scale", "F8_E4M3", np.full((64, 2), 0x38, np.uint8)),
        r"weight_scale: F8_E4M3 of shape \(64, 2\), expected F8_E4M3 of shape \(64, 4\)",
    ),
    "no scale of all": (
        "nvfp4",
        without("weight_global_scale"),
        "up_proj: weight_global_scale is missing",
    ),
    "a scale of all for every row": (
        "nvfp4 of Model Optimizer",
        put("weight_scale_2", "F32", np.ones(64, "<f4")),
        r"weight_scale_2: shape \(64,\), expected one scale",
    ),
    "blocks that are not whole": (
        "nvfp4",
        put("weight_packed", "U8", np.zeros((64, 20), np.uint8)),
        "weight_scale: F8_E4M3 of shape",
    ),
    "zero points of int8": (
        "int8",
        put("weight_zero_point", "I8", np.ones((64, 1), np.int8)),
        "weight_zero_point: zero points of int8 rows",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_one_error(case: str, tmp_path: Path) -> None:
    name, change, message = WRONG[case]
    write_form(tmp_path / "model", FORMS[name], change)
    with pytest.raises(SafetensorsError, match=message):
        open_directory(tmp_path / "model")


@pytest.mark.parametrize(
    ("part", "dtype", "array", "message"),
    [
        ("scales", "F32", np.full((2, 64), 1e6, "<f4"), "beyond 65,504"),
        ("scales", "F16", np.full((2, 64), np.nan, "<f2"), "NaN, infinite"),
    ],
)
def test_scales_that_cannot_be(
    part: str, dtype: str, array: np.ndarray, message: str, tmp_path: Path
) -> None:
    write_form(tmp_path / "model", FORMS["awq 32"], put(part, dtype, array))
    with (
        open_directory(tmp_path / "model") as source,
        pytest.raises(SafetensorsError, match=f"up_proj.*{message}"),
    ):
        source.raw("blk.0.ffn_up.weight")


@pytest.mark.parametrize(
    ("part", "dtype", "array", "message"),
    [
        ("weight_scale", "F8_E4M3", np.full((64, 4), 0x7F, np.uint8), "a scale is NaN or below"),
        ("weight_scale", "F8_E4M3", np.full((64, 4), 0xB8, np.uint8), "a scale is NaN or below"),
        ("weight_global_scale", "F32", np.zeros(1, "<f4"), "0.0 is no scale"),
        ("weight_global_scale", "F32", np.full(1, np.inf, "<f4"), "NaN or infinity among the sc"),
    ],
)
def test_scales_of_nvfp4_that_cannot_be(
    part: str, dtype: str, array: np.ndarray, message: str, tmp_path: Path
) -> None:
    write_form(tmp_path / "model", FORMS["nvfp4"], put(part, dtype, array))
    with (
        open_directory(tmp_path / "model") as source,
        pytest.raises(SafetensorsError, match=f"up_proj.*{message}"),
    ):
        source.raw("blk.0.ffn_up.weight")


def test_nan_among_fp8_codes(tmp_path: Path) -> None:
    codes = np.full((64, 64), 0xFF, np.uint8)
    write_form(tmp_path / "model", FORMS["fp8 rows"], put("weight", "F8_E4M3", codes))
    with (
        open_directory(tmp_path / "model") as source,
        pytest.raises(SafetensorsError, match=r"up_proj\.weight: NaN among the weights"),
    ):
        source.raw("blk.0.ffn_up.weight")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "bitsandbytes is not supported: .*--quantization"),
        ({"quant_method": "hqq"}, r"quant_method hqq is not known \(known: awq, gptq"),
        ({}, "quant_method None is not known"),
        (["awq"], "quantization_config must be an object"),
        ({"quant_method": "gptq", "bits": 3}, "3 bits of gptq, supported: 4 and 8"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version gemv of AWQ"),
        (
            {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
            "checkpoint_format marlin of GPTQ .* supported: gptq and gptq_v2",
        ),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "kernel of its own"),
        ({"quant_method": "fp8"}, "says fp8, but no weight is stored that way"),
    ],
)
def test_methods_that_are_not_known(settings: Any, message: str, tmp_path: Path) -> None:
    write_form(tmp_path / "model", FORMS["gptq 4 32"])
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["quantization_config"] = settings
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(SafetensorsError, match=message):
        open_directory(tmp_path / "model")


def test_scales_of_bf16_are_rounded_with_a_notice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scales = np.full((2, 64), 1e-7, "<f4")
    write_form(tmp_path / "model", FORMS["awq 32"], put("scales", "F32", scales))
    with open_directory(tmp_path / "model") as source:
        source.raw("blk.0.ffn_up.weight")
        source.raw("blk.0.ffn_up.weight")
    assert caplog.text.count("scales that are no fp16 numbers are rounded") == 1


def test_static_scales_of_activations_have_a_notice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_form(tmp_path / "model", FORMS["int8"], put("input_scale", "F32", np.ones(1, "<f4")))
    with open_directory(tmp_path / "model") as source:
        assert not [name for name in source.tensors if "input_scale" in name]
    assert "1 stored scales of activations and K and V are not used" in caplog.text


# ---------------------------------------------------------------- act-order


def reorders(source: HFSource) -> list[Reorder]:
    return [op for op in build(source).ops if isinstance(op, Reorder)]


def test_one_order_of_an_input_is_gathered_once(tmp_path: Path) -> None:
    """q, k and v, and gate and up, have the order of their input: four gathers a layer."""
    write_form(tmp_path / "one", FORMS["gptq 4 32 act"])
    with open_directory(tmp_path / "one") as source:
        layers = source.metadata["llama.block_count"]
        assert len(reorders(source)) == 4 * layers
        kinds = {type(op) for op in optimise(build(source)).ops}
        assert {HeadsLinear, GatedLinear} <= kinds  # fused as without it
    write_form(tmp_path / "apart", FORMS["gptq 4 32 sym act apart"])
    with open_directory(tmp_path / "apart") as source:
        assert len(reorders(source)) == 7 * layers


@pytest.mark.parametrize("index", [np.zeros(64, "<i4"), np.full(64, -1, "<i4")])
def test_an_index_that_nobody_filled_orders_nothing(index: np.ndarray, tmp_path: Path) -> None:
    write_form(tmp_path / "model", FORMS["packed 4 32 act"], put("weight_g_idx", "I32", index))
    with open_directory(tmp_path / "model") as source:
        assert source.column_order("blk.0.ffn_up.weight") is None
        assert source.column_order("blk.0.ffn_gate.weight") is not None


def test_the_answer_of_an_ordered_checkpoint_is_the_same_however_it_is_computed(
    tmp_path: Path,
) -> None:
    """Law 1: in one chunk, in many, and operation by operation."""
    write_form(tmp_path / "model", FORMS["gptq 4 32 act"])
    with open_directory(tmp_path / "model") as source:
        graph = build(source)
        found = []
        for eager, sizes in ((False, (40,)), (False, (7, 1, 32)), (True, (40,))):
            runner = make_runner(graph, source, eager=eager)
            poison(runner)
            start, pages = 0, pages_for(len(IDS))
            for size in sizes:
                run(runner, Piece(IDS[start : start + size], start, pages))
                start += size
            found.append(runner.logits(1)[0].copy())
        np.testing.assert_array_equal(found[0], found[1])
        np.testing.assert_array_equal(found[0], found[2])


def test_experts_in_the_order_of_their_activations_are_refused(tmp_path: Path) -> None:
    """Each of them has its own input order, and one copy of the input is made for all."""
    folder = tmp_path / "model"
    write_hf_directory("mixtral", folder)
    with GGUFFile(model_path("mixtral")) as source:
        plain = hf_tensors(source)
    tensors: dict[str, Tensor] = {}
    for name, array in plain.items():
        if ".experts." in name:
            stem, wide = name.removesuffix(".weight"), np.tile(array, 2)  # of two groups
            tensors |= FORMS["gptq 4 32 act"].write(stem, wide).tensors
        else:
            tensors[name] = stored(array, "F32")
    write_sharded(folder, tensors, 1)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = dict(FORMS["gptq 4 32 act"].settings)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(SafetensorsError, match=r"experts.*act-order.*not supported"):
        open_directory(folder)
