"""Where a checkpoint says how it was quantised, and layers that were left alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden.quantised_form import FORMS
from golden.safetensors_writer import Tensor
from models.test_quantised_checkpoints import UP, put, write_form

from invar.models.registry import build, open_directory
from invar.weights.formats import QuantType
from invar.weights.safetensors import SafetensorsError

UP_HERE = "blk.0.ffn_up.weight"


def said(folder: Path, form: str, file: str, content: Any, **change: Any) -> Path:
    """The tiny model in a form, with its settings in a file of their own (none: in none)."""
    write_form(folder, FORMS[form], **change)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    if file:
        before = config if file == "config.json" else {}
        (folder / file).write_text(json.dumps(before | content))
    return folder


PLACES: dict[str, tuple[str, str, Mapping[str, Any], str]] = {
    "AutoGPTQ's file": (
        "gptq 4 32 act",
        "quantize_config.json",
        {"bits": 4, "group_size": 32, "desc_act": True, "sym": False},
        "gptq",
    ),
    "AutoAWQ's file": (
        "awq 32",
        "quant_config.json",
        {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"},
        "awq",
    ),
    "AWQ in the other's file": (
        "awq 32",
        "quantize_config.json",
        {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"},
        "awq",
    ),
    "Model Optimizer's file": (
        "fp8 all",
        "hf_quant_config.json",
        {
            "producer": {"name": "modelopt"},
            "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]},
        },
        "modelopt",
    ),
    "Model Optimizer in config.json": (
        "fp8 rows",
        "config.json",
        {
            "quantization_config": {
                "quant_method": "modelopt",
                "quantization": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
            }
        },
        "modelopt",
    ),
    "the older key of compressed-tensors": (
        "int8",
        "config.json",
        {"compression_config": dict(FORMS["int8"].settings)},
        "compressed-tensors",
    ),
    "auto-round": (
        "gptq 4 32",
        "config.json",
        {
            "quantization_config": {
                "quant_method": "auto-round",
                "packing_format": "auto_round:auto_gptq",
                "bits": 4,
            }
        },
        "auto-round",
    ),
    "FBGEMM": (
        "fp8 rows",
        "config.json",
        {"quantization_config": {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}},
        "fbgemm_fp8",
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_settings_are_read_where_they_stand(place: str, tmp_path: Path) -> None:
    form, file, content, method = PLACES[place]
    folder = said(tmp_path / "model", form, file, content)
    write_form(tmp_path / "same", FORMS[form])
    with open_directory(folder) as source, open_directory(tmp_path / "same") as same:
        assert source.quantization == method
        np.testing.assert_array_equal(source.raw(UP_HERE), same.raw(UP_HERE))
        build(source)


def test_config_json_decides(tmp_path: Path) -> None:
    write_form(tmp_path / "model", FORMS["gptq 4 32"])
    (tmp_path / "model" / "quant_config.json").write_text('{"w_bit": 4}')
    with open_directory(tmp_path / "model") as source:
        assert source.quantization == "gptq"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("", {}, r"qweight is a quantised weight, and neither .* says how"),
        ("quant_config.json", {"w_bit": 3}, r"quant_config\.json: 3 bits of awq, supported: 4"),
        ("quantize_config.json", {"bits": 2}, r"quantize_config\.json: 2 bits of gptq"),
        (
            "hf_quant_config.json",
            {"quantization": {"quant_algo": "W4A8_AWQ"}},
            r"hf_quant_config\.json: quantization: quant_algo W4A8_AWQ of modelopt is not",
        ),
        (
            "config.json",
            {"quantization_config": {"quant_method": "auto-round", "packing_format": "x"}},
            "packing_format x of auto-round is not supported",
        ),
        (
            "config.json",
            {"quantization_config": {"quant_method": ["gptq"]}},
            r"quant_method \['gptq'\] is not known",
        ),
    ],
)
def test_what_is_said_wrongly_is_named_with_its_place(
    file: str, content: Any, message: str, tmp_path: Path
) -> None:
    folder = said(tmp_path / "model", "gptq 4 32", file, content)
    with pytest.raises(ValueError, match=message), open_directory(folder) as source:
        build(source)


@pytest.mark.parametrize("content", ["[1]", "{", '{"bits": 4, "bits": 8}'])
def test_a_file_that_is_no_object(content: str, tmp_path: Path) -> None:
    folder = said(tmp_path / "model", "gptq 4 32", "", {})
    (folder / "quantize_config.json").write_text(content)
    with pytest.raises(SafetensorsError, match=r"quantize_config\.json"):
        open_directory(folder)


def test_layers_that_were_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever the list of them says, a weight is what is stored for it."""

    def plain_up(tensors: dict[str, Tensor]) -> None:
        for part in ("weight", "weight_scale"):
            del tensors[f"{UP}.{part}"]
        values = np.random.default_rng(1).standard_normal((64, 64)).astype("<f4")
        tensors[f"{UP}.weight"] = ("F32", (64, 64), values.tobytes())

    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["re:.*"]}
    folder = said(
        tmp_path / "model",
        "fp8 all",
        "config.json",
        {"quantization_config": settings},
        change=plain_up,
    )
    with open_directory(folder) as source:
        assert source.tensors[UP_HERE].type == QuantType.F32
        assert source.tensors["blk.0.ffn_gate.weight"].type == QuantType.FP8
        build(source)
    assert not caplog.text


def test_static_scales_of_fp8_are_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of activations, K and V, of all writers' names: one notice, and the same weights."""
    names = ["input_scale", "input_scale_ub", "output_scale", "k_scale", "v_scale", "kv_scale"]

    def scales(tensors: dict[str, Tensor]) -> None:
        for name in names:
            put(name, "F32", np.full(1, 0.02, "<f4"))(tensors)

    settings = {"quant_method": "fp8", "activation_scheme": "static", "kv_cache_scheme": {}}
    content = {"quantization_config": settings}
    folder = said(tmp_path / "model", "fp8 all", "config.json", content, change=scales)
    with open_directory(folder) as source:
        build(source)
        assert not [name for name in source.tensors if name.endswith(tuple(names))]
    (line,) = caplog.messages
    assert "6 stored scales of activations and K and V are not used" in line
