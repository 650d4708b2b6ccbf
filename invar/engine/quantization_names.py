"""The names that people give formats of weights, and what each means here.

A name is compared in small letters, with hyphens for underscores or the other way round. Those of
vLLM, SGLang and llama.cpp are here; an unknown one is answered with its nearest.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from invar.weights.formats import QuantType
from invar.weights.mixtures import MIXTURES

MADE_AT_LOAD = {
    "int8": QuantType.INT8,
    "fp8": QuantType.FP8,
    "q8_0": QuantType.Q8_0,
    "q5_1": QuantType.Q5_1,
    "q5_0": QuantType.Q5_0,
    "q4_1": QuantType.Q4_1,
    "q4_0": QuantType.Q4_0,
    **MIXTURES,
}
"""The format of most matrices that each makes."""

# As llama-quantize takes them.
# https://github.com/ggml-org/llama.cpp/blob/569a0092b98e73bd222490441234144e52afd2ef/tools/quantize/quantize.cpp
SHORT_NAMES = {"q3_k": "q3_k_m", "q4_k": "q4_k_m", "q5_k": "q5_k_m"}

AS_IT_IS = ("auto", "none", "unquant")

CALIBRATION = "has to be calibrated with data"
OF_CHECKPOINTS = "is a format of checkpoints, which is not made at load"
NO_KERNEL = "has no kernel here"
NO_QUANTISER = "has no quantiser here (llama-quantize makes files of it, which run as they are)"


@dataclass(frozen=True)
class Meaning:
    """A checkpoint that calls itself one of `methods`, or whose matrices have the format `made` or
    most of them that of `mostly`, is that already. Of plain weights `made` is made; where it is
    None, `reason` says why not."""

    methods: tuple[str, ...] = ()
    made: str | None = None
    reason: str = ""
    mostly: QuantType | None = None


def of_names(names: Iterable[str], meaning: Meaning) -> dict[str, Meaning]:
    return dict.fromkeys(names, meaning)


KNOWN: dict[str, Meaning] = {
    **{name: Meaning(made=name) for name in MADE_AT_LOAD},
    "fp8": Meaning(("fp8", "fbgemm_fp8"), made="fp8"),
    **of_names(
        ("w8a8_fp8", "ptpc_fp8", "fp8_e4m3", "fp8_per_tensor", "fp8_per_channel", "fp8_per_block"),
        Meaning(("fp8", "fbgemm_fp8"), made="fp8"),
    ),
    "fbgemm_fp8": Meaning(("fbgemm_fp8",), made="fp8"),
    **of_names(
        (
            *("w8a8", "w8a8_int8", "int8_w8a8", "int8_sq", "smoothquant", "experts_int8"),
            *("tpu_int8", "int8_per_channel_weight_only"),
        ),
        Meaning(made="int8"),
    ),
    **of_names(
        ("awq", "awq_marlin", "auto_awq", "cpu_awq", "awq_triton"),
        Meaning(("awq",), reason=CALIBRATION),
    ),
    **of_names(
        ("gptq", "gptq_marlin", "auto_gptq", "gptq_bitblas", "exllama", "exllamav2"),
        Meaning(("gptq",), reason=CALIBRATION),
    ),
    **of_names(("marlin", "moe_wna16"), Meaning(("awq", "gptq"), reason=CALIBRATION)),
    **of_names(("auto_round", "inc"), Meaning(("auto-round",), reason=CALIBRATION)),
    "gguf": Meaning(("gguf",), reason=OF_CHECKPOINTS),
    "compressed_tensors": Meaning(("compressed-tensors",), reason=OF_CHECKPOINTS),
    **of_names(
        ("modelopt", "modelopt_fp8", "modelopt_fp4"), Meaning(("modelopt",), reason=OF_CHECKPOINTS)
    ),
    "mxfp4": Meaning(("mxfp4",), reason=OF_CHECKPOINTS),
    "nvfp4": Meaning(reason=OF_CHECKPOINTS),
    **{name: Meaning(made=name, mostly=kind) for name, kind in MIXTURES.items()},
    **{name: Meaning(made=of, mostly=MIXTURES[of]) for name, of in SHORT_NAMES.items()},
    **{
        name: Meaning(reason=NO_QUANTISER, mostly=kind)
        for kind, names in {
            QuantType.IQ1_S: ("iq1_s",),
            QuantType.IQ1_M: ("iq1_m",),
            QuantType.IQ2_XXS: ("iq2_xxs",),
            QuantType.IQ2_XS: ("iq2_xs", "iq2_s"),
            QuantType.IQ2_S: ("iq2_m",),
            QuantType.IQ3_XXS: ("iq3_xxs",),
            QuantType.IQ3_S: ("iq3_xs", "iq3_s", "iq3_m"),
        }.items()
        for name in names
    },
    **{
        name: Meaning(reason=OF_CHECKPOINTS, mostly=kind)
        for name, kind in {"tq1_0": QuantType.TQ1_0, "tq2_0": QuantType.TQ2_0}.items()
    },
    **of_names(
        (
            *("bitsandbytes", "bnb", "nf4", "hqq", "aqlm", "quip", "squeezellm", "eetq", "quanto"),
            *("torchao", "quark", "mxfp8", "fp_quant", "bitblas", "gptq_marlin_24", "qoq"),
            *("deepspeedfp", "w4afp8", "petit_nvfp4", "ipex", "bitnet", "vptq", "higgs", "spqr"),
        ),
        Meaning(reason=NO_KERNEL),
    ),
}


def normalised(name: str) -> str:
    return name.lower().replace("-", "_")


def meaning_of(name: str) -> Meaning:
    """Raises ValueError for a name that nobody knows, with its nearest."""
    found = KNOWN.get(normalised(name))
    if found is not None:
        return found
    near = difflib.get_close_matches(normalised(name), KNOWN, n=1)
    hint = f"; did you mean {near[0]}?" if near else f" (known: {', '.join(KNOWN)})"
    raise ValueError(f"quantization: {name!r} is not known{hint}")
