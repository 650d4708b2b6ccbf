"""What a lowered plan does for a row, and which of the machine's peaks bounds it."""

from __future__ import annotations

from collections import Counter

from invar import _native
from invar.backends.cpu.lowered import Call, Lowered, SegmentUse
from invar.backends.runner import ModelWork
from invar.graph.operations import CacheGroup

# Kind of activations that weights meet → what the machine multiplies at most of it.
PEAKS = {
    "q8_16": "int8",
    "q8_32": "int8",
    "q8_256": "int8",
    "q8_row": "int8",
    "bf16": "bf16",
    "f32": "fp32",
}


def peak_name(weight_format: str) -> str:
    return PEAKS[_native.act_format_of(weight_format)]


def machine_peak(name: str, threads: int, seconds: float) -> float:
    """Operations per second; 0 where the machine has no such instructions."""
    measured = {
        "int8": _native.int8_peak_gops,
        "bf16": _native.bf16_peak_gflops,
        "fp32": _native.fp32_peak_gflops,
    }
    return float(measured[name](threads, seconds)) * 1e9


def model_work(lowered: Lowered, groups: tuple[CacheGroup, ...]) -> ModelWork:
    body: Counter[str] = Counter()
    head: Counter[str] = Counter()
    attention = [0] * len(groups)
    counted, expert_bytes, share = body, 0, 1.0
    for call in lowered.calls:
        if call.method == "begin_head":
            counted = head
        if call.method == "attention":
            # q times K and weights times V, of every head of q.
            group = call.arguments["group"]
            attention[group] += 4 * call.arguments["heads"] * groups[group].head_dim
        for use in segments_of(call):
            weight = use.weight
            operations = round(2 * weight.rows * weight.columns * use.share)
            counted[peak_name(weight.weight_format)] += operations
            if use.share < 1:
                expert_bytes, share = expert_bytes + use.all_bytes, use.share
    size = lowered.weights.size
    return ModelWork(dict(body), dict(head), tuple(attention), size, expert_bytes, share)


def segments_of(call: Call) -> list[SegmentUse]:
    return [value for value in call.arguments.values() if isinstance(value, SegmentUse)]
