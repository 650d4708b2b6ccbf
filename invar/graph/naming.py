"""What an operation is called where people read of it: errors, times, lists of steps."""

from __future__ import annotations

import re
from collections.abc import Iterable

from invar.graph.fused import FusedOp, HeadsLinear, PagedAttention, inputs, outputs
from invar.graph.operations import ApplyRope, Value

LAYER = re.compile(r"^blk\.(\d+)\.")  # of a tensor's name


class OperationNames:
    """Names of a graph's operations: the kind, then the weight, as ``linear blk.3.ffn_up.weight``.

    An operation without a weight stands after the one that made its last input, which on the way
    through a layer is the one just before it: ``gated after blk.3.ffn_up.weight``.
    """

    def __init__(self, ops: Iterable[FusedOp]) -> None:
        self.weights: dict[Value, str] = {}  # that made a value, directly or further back
        self.names: dict[FusedOp, str] = {}
        for op in ops:
            own = weights_of(op)
            before = [self.weights[value] for value in inputs(op) if value in self.weights]
            origin = own[-1] if own else before[-1] if before else ""
            self.weights |= dict.fromkeys(outputs(op), origin)
            after = f" after {origin}" if origin else ""
            self.names[op] = kind_of(op) + (f" {', '.join(own)}" if own else after)

    def __getitem__(self, op: FusedOp) -> str:
        return self.names[op]


def kind_of(op: FusedOp) -> str:
    """The class's name in small letters, as ``rms_norm``; two in the words of the model file."""
    if isinstance(op, PagedAttention | ApplyRope):
        return "attention" if isinstance(op, PagedAttention) else "rope"
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=S)(?=Norm)", "_", type(op).__name__).lower()


def weights_of(op: FusedOp) -> list[str]:
    """The matrices or vectors that an operation is named after, biases apart."""
    if isinstance(op, HeadsLinear):
        return [head.segment.weight for head in (op.query, op.key, op.value)]
    segments = getattr(op, "segments", None) or [
        getattr(op, name) for name in ("segment", "gate", "up", "down") if hasattr(op, name)
    ]
    found = [getattr(segment, "weight", None) for segment in segments]
    return [weight for weight in [getattr(op, "weight", None), *found] if weight is not None]


def layer_of(name: str) -> int | None:
    """The layer of a weight, or of an operation that is named after one."""
    found = LAYER.match(name.split()[-1])
    return None if found is None else int(found[1])
