"""`--quantization`: what a checkpoint is, what can be made of it at load, and what cannot."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from invar import _native
from invar.backends.cpu.formats import WEIGHT_FORMATS, weight_format
from invar.backends.cpu.memory import usable_threads
from invar.backends.cpu.packing import made_from
from invar.engine.quantization_names import AS_IT_IS, MADE_AT_LOAD, meaning_of, normalised
from invar.graph.graph import Graph, raw_rows
from invar.graph.operations import Attention, Experts, Linear, Route
from invar.models.metadata import ModelSource
from invar.weights import mixtures
from invar.weights.formats import PLAIN_TYPES, QuantType, dequantize

logger = logging.getLogger("invar")

HEAD = QuantType.Q8_0
"""Of the output matrix, whatever the others become: its errors go into the logits as they are. The
peers leave it in 16 bits or, as llama.cpp does, in a finer format than the rest (`mixtures.HEAD`
where a mixture is asked for)."""


@dataclass(frozen=True)
class MadeTensor:
    shape: tuple[int, ...]
    type: QuantType


class QuantizedSource:
    """A model whose matrices are quantised as they are read; all else is as it was."""

    def __init__(self, source: ModelSource, made: Mapping[str, QuantType]) -> None:
        self.source = source
        self.metadata = source.metadata
        self.made = made
        self.tensors: Mapping[str, Any] = dict(source.tensors) | {
            name: MadeTensor(tuple(source.tensors[name].shape), kind) for name, kind in made.items()
        }

    def made_from(self, name: str) -> Sequence[npt.NDArray[np.uint8]] | None:
        """The stored bytes behind `raw(name)`, if that makes others of them at every call."""
        stored = made_from(self.source, name)
        return [self.source.raw(name)] if stored is None and name in self.made else stored

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """`[rows, row_bytes]`; made anew at every call, on all threads."""
        if name not in self.made:
            return self.source.raw(name)
        raw = raw_rows(self.source, name)
        columns = int(self.tensors[name].shape[-1])
        stored = weight_format(self.source, name)
        target, threads = WEIGHT_FORMATS[self.made[name]], usable_threads()
        try:
            return _native.encode_rows(np.ascontiguousarray(raw), columns, stored, target, threads)
        except ValueError as error:
            raise ValueError(f"tensor {name} cannot become {target}: {error}") from None

    def dequantize(self, name: str) -> npt.NDArray[np.float32]:
        if name not in self.made:
            return self.source.dequantize(name)
        return dequantize(self.raw(name), self.made[name], self.tensors[name].shape)


def apply_quantization(
    wanted: str | None, graph: Graph, source: ModelSource, name: str
) -> ModelSource:
    """The source in the format that `quantization` asks for, where that can be had.

    | checkpoint  | asked for                | what happens                                  |
    |-------------|--------------------------|-----------------------------------------------|
    | X already   | X (of GGUF also `gguf`)  | one notice                                    |
    | plain       | one of `MADE_AT_LOAD`    | made, with a line                             |
    | plain       | one that is calibrated   | ValueError that names the ways out            |
    | quantised   | another one, or none     | ValueError: quantising twice loses twice      |

    name: of the model, for messages.
    """
    if wanted is None or normalised(wanted) == "auto":
        return source
    has = formats_of(graph, source)
    stored = checkpoint_method(source)
    quantised = ", ".join(sorted(kind.name for kind in has if kind not in PLAIN_TYPES))
    if normalised(wanted) in AS_IT_IS:
        if quantised:
            raise ValueError(
                f"quantization={wanted!r}: {name} is quantised ({quantised}); leave it out"
            )
        return source
    meaning = meaning_of(wanted)
    is_made = meaning.made is not None and has == {MADE_AT_LOAD[meaning.made]}
    is_mostly = meaning.mostly is not None and meaning.mostly is most_of(graph, source)
    if stored in meaning.methods or is_made or is_mostly:
        logger.warning("quantization=%s: %s is that already", wanted, name)
        return source
    ways = f"{', '.join(MADE_AT_LOAD)} can be made of plain weights at load"
    if quantised:
        how = "" if stored in (None, "gguf") else f"{stored}: "
        raise ValueError(
            f"quantization={wanted!r}: {name} is quantised already ({how}{quantised}), and "
            f"quantising again would lose twice; leave the option out, or use a checkpoint with "
            f"plain weights ({ways})"
        )
    if meaning.made is None:
        raise ValueError(
            f"quantization={wanted!r}: {name} has plain weights, and {wanted} {meaning.reason}; "
            f"use a checkpoint that was made with it, or another format: {ways}"
        )
    return quantized(wanted, meaning.made, graph, source, name)


def quantized(
    wanted: str, made_as: str, graph: Graph, source: ModelSource, model: str
) -> ModelSource:
    """made_as: one of `MADE_AT_LOAD`."""
    kind, type_of = MADE_AT_LOAD[made_as], body_types(made_as, graph, source)
    head = mixtures.HEAD if made_as in mixtures.MIXTURES else HEAD
    # A matrix that gives the logits too, such as a tied embedding, is the head: it comes last.
    found = sorted(matrices(graph), key=lambda one: one[1])
    made: dict[str, QuantType] = {}
    left: list[str] = []
    for name, is_head in found:
        target = mixtures.fitting(
            head if is_head else type_of(name), source.tensors[name].shape[-1]
        )
        if target is None:
            left.append(name)
        else:
            made[name] = target
    other = [(made[name], is_head) for name, is_head in found if made.get(name, kind) is not kind]
    body = Counter(one for one, is_head in other if not is_head)
    said = [f", the output matrix to {one.name}" for one, is_head in other if is_head]
    said += [f", {count} to {one.name}" for one, count in sorted(body.items())]
    logger.warning(
        "quantization=%s: %d matrices of %s are quantised to %s as they are loaded%s%s",
        wanted,
        len(made),
        model,
        kind.name,
        "".join(said),
        f"; {len(left)} stay as they are, their rows being no whole blocks: {left[0]} …"
        if left
        else "",
    )
    return QuantizedSource(source, made)


def body_types(made_as: str, graph: Graph, source: ModelSource) -> Callable[[str], QuantType]:
    """What each matrix but the output becomes, rows of whole blocks given."""
    if made_as not in mixtures.MIXTURES:
        return lambda name: MADE_AT_LOAD[made_as]
    attention = next((op for op in graph.ops if isinstance(op, Attention)), None)
    place_of = partial(
        mixtures.Place.of,
        layers=len({name.split(".")[1] for name in source.tensors if name.startswith("blk.")}),
        sharing=attention.q.width // attention.k.width if attention else 1,
        experts=next((op.logits.width for op in graph.ops if isinstance(op, Route)), 0),
    )
    return lambda name: mixtures.matrix_type(made_as, place_of(name))


def matrices(graph: Graph) -> list[tuple[str, bool]]:
    """Weights that are multiplied, and whether that gives the logits. Routers stay as they are:
    they are small, and a choice that tips over costs more than a rounding."""
    choices = {op.logits for op in graph.ops if isinstance(op, Route)}
    found: list[tuple[str, bool]] = []
    for op in graph.ops:
        if isinstance(op, Linear) and op.out not in choices:
            found.append((op.weight, op.out == graph.logits))
        elif isinstance(op, Experts):
            found += [(part.weight, False) for part in (op.gate, op.up, op.down)]
    return found


def formats_of(graph: Graph, source: ModelSource) -> set[QuantType]:
    """Of the matrices that are multiplied, the output matrix apart where there are others."""
    body = [name for name, is_head in matrices(graph) if not is_head]
    return {QuantType(source.tensors[name].type) for name in body}


def most_of(graph: Graph, source: ModelSource) -> QuantType | None:
    """The format of most weights that are multiplied, the output matrix apart."""
    sizes: Counter[QuantType] = Counter()
    for name, is_head in matrices(graph):
        if not is_head:
            tensor = source.tensors[name]
            sizes[QuantType(tensor.type)] += math.prod(tensor.shape)
    return max(sizes, key=lambda kind: sizes[kind], default=None)


def checkpoint_method(source: ModelSource) -> str | None:
    """How the checkpoint calls what was done to it: `gguf`, or `quant_method` of its config."""
    return getattr(source, "quantization", None)
