"""Number formats that the CPU kernels know, by the names of ``native/kernels``."""

from __future__ import annotations

from invar.graph.graph import GraphError, WeightSource
from invar.weights.formats import QuantType

WEIGHT_FORMATS = {
    QuantType.F32: "f32",
    QuantType.F16: "f16",
    QuantType.BF16: "bf16",
    QuantType.Q4_0: "q4_0",
    QuantType.Q4_1: "q4_1",
    QuantType.Q5_0: "q5_0",
    QuantType.Q5_1: "q5_1",
    QuantType.Q8_0: "q8_0",
    QuantType.Q2_K: "q2_k",
    QuantType.Q3_K: "q3_k",
    QuantType.Q4_K: "q4_k",
    QuantType.Q5_K: "q5_k",
    QuantType.Q6_K: "q6_k",
    QuantType.IQ4_NL: "iq4_nl",
    QuantType.IQ4_XS: "iq4_xs",
    QuantType.MXFP4: "mxfp4",
    QuantType.IQ1_S: "iq1_s",
    QuantType.IQ1_M: "iq1_m",
    QuantType.IQ2_XXS: "iq2_xxs",
    QuantType.IQ2_XS: "iq2_xs",
    QuantType.IQ2_S: "iq2_s",
    QuantType.IQ3_XXS: "iq3_xxs",
    QuantType.IQ3_S: "iq3_s",
    QuantType.TQ1_0: "tq1_0",
    QuantType.TQ2_0: "tq2_0",
    QuantType.INT4_ZP: "int4_zp",
    QuantType.INT8_ZP: "int8_zp",
    QuantType.INT8: "int8",
    QuantType.FP8: "fp8",
    QuantType.NVFP4_ROWS: "nvfp4",
}

# Of activations: columns that are quantised as one.
ACT_BLOCKS = {"f32": 1, "bf16": 2, "q8_16": 16, "q8_32": 32, "q8_256": 256, "q8_row": 1}
WHOLE_ROWS = "q8_row"  # a scale per row: not to be had from some of its columns


def weight_format(source: WeightSource, tensor: str) -> str:
    """The kernel format of a tensor. Raises ``GraphError`` naming the known ones."""
    kind = QuantType(source.tensors[tensor].type)
    if kind not in WEIGHT_FORMATS:
        known = ", ".join(known.name for known in WEIGHT_FORMATS)
        raise GraphError(
            f"tensor {tensor}: the CPU backend has no kernels for {kind.name} weights yet "
            f"(it has them for {known}); use the model in one of these formats"
        )
    return WEIGHT_FORMATS[kind]
