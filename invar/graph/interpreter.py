"""The reference meaning of a graph, in numpy. Two modes, two purposes.

*exact* computes in double precision on dequantised weights. It is the meaning of the model file and
is held against logits of `transformers`.

*contract* rounds where the CPU backend rounds (codes of activations, stored K and V, fp32
between operations; see `contract.py`). A backend is held to it within fp32 noise, so that an error
of 1 % cannot hide behind the noise of int8 activations.

    interpreter = Interpreter(graph, source)
    state = interpreter.new_sequence()
    logits = interpreter.step(state, prompt_ids)[-1]
    logits = interpreter.step(state, [int(logits.argmax())])[-1]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, assert_never

import numpy as np
import numpy.typing as npt

from invar.graph import contract
from invar.graph.functions import (
    activate,
    apply_rope,
    attend,
    gated,
    layer_norm,
    rms_norm,
    soft_cap,
    visible_keys,
)
from invar.graph.graph import Graph, GraphError, WeightSource, column_order, raw_rows
from invar.graph.operations import (
    Activate,
    Add,
    ApplyRope,
    Attention,
    CacheGroup,
    Columns,
    Embed,
    Experts,
    ExpertWeight,
    Gated,
    HeadwiseLinear,
    Join,
    LayerNorm,
    Linear,
    Op,
    PositionEmbed,
    Reorder,
    RMSNorm,
    Route,
    Scale,
    ScaleRows,
    Sigmoid,
    SoftCap,
    TakeRows,
    Temperature,
)
from invar.graph.routing import Doubles, route, sigmoid
from invar.weights.formats import QuantType, dequantize

Array = npt.NDArray[np.floating[Any]]  # between operations: fp64 in exact mode, fp32 in contract
Mode = Literal["exact", "contract"]

# Rows of a weight are multiplied this many values at a time and only smaller weights are kept
# dequantised: a vocabulary of 262,144 rows in double precision would take 1.3 GB.
SLICE_VALUES = 1 << 24


@dataclass
class SequenceState:
    """KV of one sequence, unpaged: (group, layer) → arrays `[positions, kv_heads, head_dim]`."""

    length: int = 0  # positions computed so far
    keys: dict[tuple[str, int], Array] = field(default_factory=dict)
    values: dict[tuple[str, int], Array] = field(default_factory=dict)


@dataclass(frozen=True)
class SequenceInput:
    """The next tokens of a sequence; they stand at positions `state.length` and after."""

    state: SequenceState
    token_ids: Sequence[int]


@dataclass(frozen=True)
class _Step:
    """The rows of one run: which sequence, which ids, which positions, which rows want logits."""

    inputs: Sequence[SequenceInput]
    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    logit_rows: npt.NDArray[np.int64]


class Interpreter:
    """Runs a graph over any number of sequences; weights are dequantised when they are used."""

    def __init__(self, graph: Graph, source: WeightSource, mode: Mode = "exact") -> None:
        self.graph = graph
        self.source = source
        self.mode: Mode = mode
        # Operations compute in double precision; this is what their results are rounded to.
        self.dtype = np.float64 if mode == "exact" else np.float32
        self._groups: dict[str, CacheGroup] = {group.name: group for group in graph.groups}
        self._weights: dict[str, npt.NDArray[np.float32]] = {}

    def new_sequence(self) -> SequenceState:
        return SequenceState()

    def step(self, state: SequenceState, token_ids: Sequence[int]) -> Array:
        """Appends tokens to a sequence. Returns the logits of each, `[tokens, vocab]`."""
        return self.run([SequenceInput(state, token_ids)])

    def run(
        self,
        inputs: Sequence[SequenceInput],
        logit_rows: Literal["all"] | Sequence[int] = "all",
    ) -> Array:
        """One step over the tokens of all inputs, one after another as rows.

        Returns the logits of the rows asked for, `[rows, vocab]`.
        """
        for entry in inputs:
            self._check_ids(entry.token_ids)
        step = _Step(
            inputs,
            np.concatenate([np.asarray(entry.token_ids, np.int64) for entry in inputs]),
            np.concatenate([_positions(entry) for entry in inputs]),
            np.arange(sum(len(entry.token_ids) for entry in inputs))
            if logit_rows == "all"
            else np.asarray(logit_rows, np.int64),
        )
        values: dict[str, Array] = {}
        for op in self.graph.ops:
            values[op.out.name] = self._apply(op, values, step).astype(self.dtype)
        for entry in inputs:
            entry.state.length += len(entry.token_ids)
        return values[self.graph.logits.name]

    def _apply(self, op: Op, values: dict[str, Array], step: _Step) -> Array:
        match op:
            case Embed():
                return self._rows(op.weight, step.token_ids)
            case PositionEmbed():
                return self._rows(op.weight, step.positions)
            case Scale():
                return _double(values[op.x.name]) * float(self.dtype(op.factor))
            case RMSNorm():
                weight = 1.0 if op.weight is None else self._vector(op.weight)
                return rms_norm(_double(values[op.x.name]), weight, op.eps, op.heads)
            case LayerNorm():
                scale, shift = self._vector(op.weight), self._vector(op.bias)
                return layer_norm(_double(values[op.x.name]), scale, shift, op.eps)
            case Linear():
                return self._linear(op, values[op.x.name])
            case ApplyRope():
                return apply_rope(_double(values[op.x.name]), step.positions, op.heads, op.rope)
            case Attention():
                return self._attention(op, values, step)
            case Activate():
                return activate(_double(values[op.x.name]), op.activation)
            case Gated():
                gate, up = _double(values[op.gate.name]), _double(values[op.up.name])
                return gated(gate, up, op.activation)
            case Add():
                return _double(values[op.a.name]) + _double(values[op.b.name])
            case Sigmoid():
                return sigmoid(_double(values[op.x.name]))
            case ScaleRows():
                return _double(values[op.x.name]) * _double(values[op.factor.name])
            case Columns():
                heads = values[op.x.name].reshape(len(step.token_ids), op.heads, -1)
                last = op.first + op.out.width // op.heads
                return heads[..., op.first : last].reshape(len(heads), -1)
            case Join():
                parts = [
                    values[value.name].reshape(len(step.token_ids), op.heads, -1)
                    for value in (op.a, op.b)
                ]
                return np.concatenate(parts, axis=2).reshape(len(step.token_ids), -1)
            case Reorder():
                return values[op.x.name][:, column_order(self.source, op.like)]
            case HeadwiseLinear():
                return self._headwise_linear(op, values[op.x.name])
            case Temperature():
                runs = np.floor((step.positions[:, None] + 1) / op.length)
                return 1 + op.scale * np.log1p(runs)
            case Route():
                bias = None if op.bias is None else self._vector(op.bias)
                return route(_double(values[op.logits.name]), bias, op.routing)
            case Experts():
                return self._experts(op, values[op.x.name], _double(values[op.routes.name]))
            case TakeRows():
                return values[op.x.name][step.logit_rows]
            case SoftCap():
                return soft_cap(_double(values[op.x.name]), op.cap)
        assert_never(op)

    def _linear(self, op: Linear, x: Array) -> Array:
        if self.mode == "contract":
            x = contract.round_activation(x, self._type(op.weight))
        parts = [_double(x) @ _double(rows).T for rows in self._slices(op.weight)]
        product = np.concatenate(parts, axis=1)
        if op.bias is None:
            return product
        return _double(product.astype(self.dtype)) + self._vector(op.bias)

    def _headwise_linear(self, op: HeadwiseLinear, x: Array) -> Array:
        columns = self.source.tensors[op.weight].shape[2]
        heads = x.reshape(len(x), op.heads, -1)[..., :columns]
        part = ExpertWeight(op.weight)
        products = [self._matrix_of_stack(part, head, heads[:, head]) for head in range(op.heads)]
        return np.concatenate(products, axis=1)

    def _experts(self, op: Experts, x: Array, routes: Doubles) -> Array:
        """Expert by expert over the rows that use it, then token by token over its slots."""
        chosen = routes[:, : op.used].astype(np.int64)
        weights = routes[:, op.used :] if op.weighted else np.ones_like(routes[:, op.used :])
        results = np.zeros((len(x), op.used, op.out.width), self.dtype)
        for expert in np.unique(chosen):
            rows, slots = np.nonzero(chosen == expert)
            gate, up = (self._matrix_of_stack(part, expert, x[rows]) for part in (op.gate, op.up))
            inner = gated(gate, up, op.activation)
            results[rows, slots] = self._matrix_of_stack(op.down, expert, inner.astype(self.dtype))
        total = np.zeros((len(x), op.out.width))
        for slot in range(op.used):
            total += results[:, slot] * weights[:, slot, None]
        return total

    def _matrix_of_stack(self, part: ExpertWeight, number: int, x: Array) -> Doubles:
        """`x @ weight[number].T (+ bias[number])`, rounded as a linear's result is."""
        kind = self._type(part.weight)
        if self.mode == "contract":
            x = contract.round_activation(x, kind)
        _, rows, columns = self.source.tensors[part.weight].shape
        raw = raw_rows(self.source, part.weight)[number * rows : (number + 1) * rows]
        weight = _double(dequantize(raw, kind, (rows, columns)))
        product = self._rounded(_double(x) @ weight.T)
        if part.bias is None:
            return product
        return self._rounded(product + self._vector(part.bias)[number])

    def _rounded(self, x: Doubles) -> Doubles:
        """To what stands between operations."""
        return _double(x.astype(self.dtype))

    def _attention(self, op: Attention, values: dict[str, Array], step: _Step) -> Array:
        """Each sequence over its own KV; rows of different sequences never meet."""
        head_dim = self._groups[op.group].head_dim
        q, k, v = (values[value.name] for value in (op.q, op.k, op.v))
        parts, start = [], 0
        for entry in step.inputs:
            rows = slice(start, start + len(entry.token_ids))
            start = rows.stop
            keys, cached = self._append(op, entry.state, k[rows], v[rows])
            heads = q[rows].reshape(len(q[rows]), op.heads, head_dim)
            parts.append(self._attend(op, heads, keys, cached, _positions(entry)))
        return np.concatenate(parts)

    def _append(
        self, op: Attention, state: SequenceState, k: Array, v: Array
    ) -> tuple[Array, Array]:
        """Adds rows to the sequence's cache; returns all K and V, `[keys, kv_heads, head_dim]`."""
        place = (op.group, op.layer)
        group = self._groups[op.group]
        for cache, rows in ((state.keys, k), (state.values, v)):
            rows = rows.reshape(len(rows), group.kv_heads, group.head_dim)
            rows = contract.round_kv(rows, group.kv_format) if self.mode == "contract" else rows
            cache[place] = np.concatenate([cache[place], rows]) if place in cache else rows
        return state.keys[place], state.values[place]

    def _attend(
        self, op: Attention, q: Array, k: Array, v: Array, positions: npt.NDArray[np.int64]
    ) -> Array:
        """q `[tokens, heads, head_dim]` → `[tokens, heads * head_dim]`."""
        group = self._groups[op.group]
        visible = visible_keys(positions, len(k), group.window, group.chunked)
        sinks = np.full(op.heads, -np.inf) if op.sinks is None else self._vector(op.sinks)
        heads = []
        for head in range(op.heads):
            shared = head // (op.heads // group.kv_heads)
            rows = q[:, head], k[:, shared], v[:, shared]
            heads.append(self._attend_head(op, *rows, visible, float(sinks[head])))
        return np.concatenate(heads, axis=1)

    def _attend_head(
        self,
        op: Attention,
        q: Array,
        k: Array,
        v: Array,
        visible: npt.NDArray[np.bool_],
        sink: float,
    ) -> Array:
        if self.mode == "exact":
            scores = _double(q) @ _double(k).T * op.scale
            if op.soft_cap is not None:
                scores = soft_cap(scores, op.soft_cap)
            return attend(scores, visible, _double(v), sink)
        kv_format = self._groups[op.group].kv_format
        q = contract.scaled_query(q, op.scale, op.soft_cap, kv_format)
        scores = _double(q) @ _double(k).T
        if op.soft_cap is not None:
            scores = soft_cap(scores, op.soft_cap) * float(contract.LOG2_E)
        return contract.tiled_attention(scores, visible, v, kv_format, sink)

    # ------------------------------------------------------------ weights

    def _type(self, weight: str) -> QuantType:
        return QuantType(self.source.tensors[weight].type)

    def _vector(self, weight: str) -> Doubles:
        return _double(self.source.dequantize(weight))

    def _rows(self, weight: str, ids: npt.NDArray[np.int64]) -> Array:
        """Rows of a matrix by id, without dequantising the others."""
        columns = self.source.tensors[weight].shape[1]
        raw = np.ascontiguousarray(raw_rows(self.source, weight)[ids])
        return dequantize(raw, self._type(weight), (len(ids), columns))

    def _slices(self, weight: str) -> Iterator[npt.NDArray[np.float32]]:
        """A matrix in runs of rows, kept between calls if it is small."""
        raw = raw_rows(self.source, weight)
        rows, columns = len(raw), self.source.tensors[weight].shape[-1]
        if rows * columns <= SLICE_VALUES:
            if weight not in self._weights:
                self._weights[weight] = self.source.dequantize(weight).reshape(rows, columns)
            yield self._weights[weight]
            return
        count = max(1, SLICE_VALUES // columns)
        for start in range(0, rows, count):
            part = raw[start : start + count]
            yield dequantize(part, self._type(weight), (len(part), columns))

    def _check_ids(self, token_ids: Sequence[int]) -> None:
        if not len(token_ids):
            raise GraphError("a sequence was given no tokens; leave it out of the step")
        for token in (min(token_ids), max(token_ids)):
            if not 0 <= token < self.graph.vocab_size:
                raise GraphError(f"token id {token} is not in [0, {self.graph.vocab_size})")


def _double(x: Array) -> npt.NDArray[np.float64]:
    return x.astype(np.float64, copy=False)


def _positions(entry: SequenceInput) -> npt.NDArray[np.int64]:
    return np.arange(entry.state.length, entry.state.length + len(entry.token_ids), dtype=np.int64)
