"""What a checkpoint says of its quantisation, in whichever of the known files it says it.

| file                 | written by               | key                                        |
|----------------------|--------------------------|--------------------------------------------|
| config.json          | transformers, most       | quantization_config, or compression_config |
| quantize_config.json | AutoGPTQ                 | the file itself                            |
| quant_config.json    | AutoAWQ                  | the file itself                            |
| hf_quant_config.json | TensorRT Model Optimizer | quantization                               |

The first one that is there decides. How a weight is stored follows from its tensors, so that lists
of layers that were left alone (`ignore`, `modules_to_not_convert`, `exclude_modules`) need not be
read. Sources:
https://github.com/vllm-project/vllm/blob/92d756e9ccd74c7772d5d9936ac5631b811a961f/vllm/model_executor/layers/quantization/awq.py
https://github.com/vllm-project/vllm/blob/00155cdecca722d98e34234c3d172725b7720b7d/vllm/model_executor/layers/quantization/modelopt.py
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from invar.weights.hf_directory import CONFIG, required_json
from invar.weights.safetensors import SafetensorsError, shown

Config = Mapping[str, Any]

KEYS = ("quantization_config", "compression_config")
INNER = "quantization"  # where Model Optimizer keeps its settings

# File → what it means where it names no method.
FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}

PACKED = (".qweight", ".weight_packed")

LAYOUTS = {
    "awq": "awq",
    "gptq": "gptq",
    "compressed-tensors": "compressed-tensors",
    "fp8": "fp8",
    "fbgemm_fp8": "fp8",
    "mxfp4": "mxfp4",
}
"""Method → how its weights are stored, where that is one way."""

CHOSEN = {
    "auto-round": (
        "packing_format",
        {"auto_round:auto_gptq": "gptq", "auto_round:auto_awq": "awq"},
    ),
    "modelopt": (
        "quant_algo",
        {"FP8": "fp8", "FP8_PER_CHANNEL_PER_TOKEN": "fp8", "NVFP4": "nvfp4"},
    ),
}
"""Method → the key that says how its weights are stored, and what it may say."""

METHODS = (*LAYOUTS, *CHOSEN)

REFUSED = {
    "bitsandbytes": "NF4 has no kernel; use the plain checkpoint with --quantization",
    "aqlm": "its codebooks have no kernel; use an AWQ or GPTQ checkpoint",
    "quip": "its codebooks have no kernel; use an AWQ or GPTQ checkpoint",
}


@dataclass(frozen=True)
class QuantizationSettings:
    where: str  # file and key, for messages
    method: str  # as the checkpoint calls it
    layout: str  # of its tensors
    values: Config

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, default)


def quantization_settings(
    folder: Path, config: Config, tensors: Iterable[str]
) -> QuantizationSettings | None:
    """None: the weights are plain. Raises `SafetensorsError`, also where tensors have names of
    quantised ones and nothing says how."""
    for key in KEYS:
        if config.get(key) is not None:
            return settings_in(f"{CONFIG}: {key}", config[key])
    for name, method in FILES.items():
        if (folder / name).is_file():
            return settings_in(name, required_json(folder / name), method)
    packed = next((name for name in tensors if name.endswith(PACKED)), None)
    if packed is not None:
        raise SafetensorsError(
            f"{folder}: {packed} is a quantised weight, and neither {CONFIG} ({KEYS[0]}) nor "
            f"{', '.join(FILES)} says how; download the file that does"
        )
    return None


def settings_in(where: str, values: Any, unnamed: str | None = None) -> QuantizationSettings:
    """unnamed: the method where none is named."""
    if not isinstance(values, Mapping):
        raise SafetensorsError(f"{where} must be an object, found {shown(values)}")
    if unnamed == "gptq" and "w_bit" in values:
        unnamed = "awq"  # its key, in the other's file
    method = values.get("quant_method", unnamed)
    if isinstance(values.get(INNER), Mapping):
        where, values = f"{where}: {INNER}", values[INNER]
    if isinstance(method, str) and method in REFUSED:
        raise SafetensorsError(f"{where}: {method} is not supported: {REFUSED[method]}")
    if not isinstance(method, str) or method not in METHODS:
        raise SafetensorsError(
            f"{where}: quant_method {shown(method)} is not known (known: {', '.join(METHODS)})"
        )
    return QuantizationSettings(where, method, layout_of(where, method, values), values)


def layout_of(where: str, method: str, values: Config) -> str:
    if method in LAYOUTS:
        return LAYOUTS[method]
    key, known = CHOSEN[method]
    found = values.get(key)
    if not isinstance(found, str) or found not in known:
        raise SafetensorsError(
            f"{where}: {key} {shown(found)} of {method} is not supported "
            f"(supported: {', '.join(known)})"
        )
    return known[found]
