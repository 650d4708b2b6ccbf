"""What an eager plan tells: which operation made the first bad value, and what each one costs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from invar.backends.cpu.lowered import Call, Lowered
from invar.backends.runner import Batch
from invar.graph.graph import Graph
from invar.graph.naming import OperationNames, layer_of
from invar.graph.passes import separate

PREPARATIONS = (
    "quantize",
    "quantize_heads",
    "group_experts",
    "gather",
    "quantize_experts",
    "combine",
)
LAYER_PREFIX = re.compile(r"\bblk\.\d+\.")


@dataclass(frozen=True)
class OperationTime:
    """An operation of the graph, or what the plan does for it, over all steps so far."""

    name: str
    layer: int | None
    calls: int
    nanoseconds: int


class EagerPlan:
    """The names of a lowered graph's checks and phases, beside the native plan that runs them."""

    def __init__(self, lowered: Lowered, graph: Graph, max_tokens: int) -> None:
        names = OperationNames(separate(graph).ops)
        self.first_fault = np.zeros(max_tokens, np.int32)  # number of a check; 0: none failed
        self.checks = [names[op] for op in lowered.checked]
        self.phases = [phase_name(calls, names) for calls in lowered.phases]

    def faults(self, batch: Batch) -> dict[int, str]:
        """Sequence of the batch → its first value that is not finite, in words.

        The first in the order of the plan, since what an operation makes of NaN is NaN as well.
        """
        found = {}
        starts = batch.query_start.tolist()
        for sequence, (first, last) in enumerate(pairwise(starts)):
            numbers = self.first_fault[first:last]
            if not numbers.any():
                continue
            number = int(numbers[numbers > 0].min())
            row = int(np.argmax(numbers == number))
            position = int(batch.kv_len[sequence]) - (last - first) + row
            found[sequence] = (
                f"the first value that is NaN or infinite came out of {self.checks[number - 1]}"
                f"{layer_text(layer_of(self.checks[number - 1]))}, at token {position}"
            )
        return found

    def times(self, profile: list[tuple[str, int, int]]) -> list[OperationTime]:
        """The native plan's times under these names, in the order of the plan."""
        return [
            OperationTime(name, layer_of(name), calls, nanoseconds)
            for name, (_, calls, nanoseconds) in zip(self.phases, profile, strict=True)
        ]


def time_lines(times: list[OperationTime]) -> list[str]:
    """One line for all layers of an operation, the longest first."""
    totals: dict[str, list[int]] = {}
    for time in times:
        of_kind = LAYER_PREFIX.sub("", time.name)
        total = totals.setdefault(of_kind, [0, 0])
        total[0] += time.nanoseconds
        total[1] += time.calls
    whole = sum(nanoseconds for nanoseconds, _ in totals.values())
    ranked = sorted(totals.items(), key=lambda item: -item[1][0])
    return [
        f"{nanoseconds / 1e6:10.3f} ms {nanoseconds / whole:6.1%} {calls:8d} calls  {name}"
        for name, (nanoseconds, calls) in ranked
        if calls
    ]


def phase_name(calls: list[Call], names: OperationNames) -> str:
    """A phase of an eager plan is of one operation."""
    call = calls[0]
    if call.op is None or call.method == "check":
        return call.method
    name = names[call.op]
    return f"{call.method} for {name}" if call.method in PREPARATIONS else name


def layer_text(layer: int | None) -> str:
    return "" if layer is None else f" (layer {layer})"
