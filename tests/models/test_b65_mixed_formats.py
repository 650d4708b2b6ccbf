"""Case B65: matrices that are computed as one are stored in several number formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from backends.batches import Piece, make_runner, pages_for, poison, run
from models.memory_source import MemorySource
from models.quantized import float_model
from weights.gguf_bytes import gguf, tensor, write

from invar.graph.interpreter import Interpreter
from invar.models.registry import build
from invar.weights.formats import QuantType
from invar.weights.gguf import GGUFError, GGUFFile

FORMATS = {
    "attn_q": QuantType.Q4_K,
    "attn_k": QuantType.Q6_K,
    "attn_v": QuantType.F16,
    "ffn_gate": QuantType.Q4_1,
    "ffn_up": QuantType.Q8_0,
}
LAYERS = 2
IDS = np.random.default_rng(65).integers(0, 256, 50).tolist()
# Of the largest logit: one activation code of 127 in one of some hundred columns, where fp32 noise
# crosses a rounding boundary (as in tests/backends/test_contract.py).
ONE_CODE = 4e-3
# Of the largest logit: activations of 8 bits in front of every matrix, against none rounded at all.
ROUNDED_ACTIVATIONS = 0.1

Logits = npt.NDArray[np.float64]


@pytest.fixture(scope="module")
def mixed() -> MemorySource:
    source = float_model(layers=LAYERS)
    for layer in range(LAYERS):
        for part, quant_type in FORMATS.items():
            name = f"blk.{layer}.{part}.weight"
            source.put(name, source.dequantize(name), quant_type)
    return source


def dequantized(source: MemorySource) -> MemorySource:
    """The same numbers, every one stored as float32."""
    values = {name: source.dequantize(name) for name in source.tensors}
    return MemorySource(source.metadata, values)


def interpreted(source: Any, mode: str) -> Logits:
    interpreter = Interpreter(build(source), source, mode)
    return np.asarray(interpreter.step(interpreter.new_sequence(), IDS)[-1], np.float64)


def computed(source: Any) -> Logits:
    runner = make_runner(build(source), source)
    poison(runner)
    run(runner, Piece(IDS, 0, pages_for(len(IDS), 1)))
    return runner.logits(1)[0].astype(np.float64)


def difference(found: Logits, expected: Logits) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def test_b65_logits_are_those_of_the_dequantized_model(mixed: MemorySource) -> None:
    plain = interpreted(dequantized(mixed), "exact")
    assert difference(interpreted(mixed, "exact"), plain) < 1e-12
    found = computed(mixed)
    assert difference(found, interpreted(mixed, "contract")) < ONE_CODE
    assert difference(found, plain) < ROUNDED_ACTIVATIONS


@pytest.mark.parametrize("part", FORMATS)
def test_b65_a_part_that_is_taken_for_another_shows(mixed: MemorySource, part: str) -> None:
    wrong = MemorySource(mixed.metadata, {})
    wrong.tensors = dict(mixed.tensors)
    name = f"blk.1.{part}.weight"
    wrong.put(name, np.roll(mixed.dequantize(name), 1, axis=0), FORMATS[part])
    assert difference(computed(wrong), interpreted(mixed, "contract")) > 5 * ONE_CODE


def test_b65_output_is_tied_where_the_file_has_none(mixed: MemorySource, tmp_path: Path) -> None:
    assert "output.weight" not in mixed.tensors
    untied = MemorySource(mixed.metadata, {})
    untied.tensors = mixed.tensors | {"output.weight": mixed.tensors["token_embd.weight"]}
    with GGUFFile(mixed.write(tmp_path / "mixed.gguf")) as source:
        assert (computed(source) == computed(untied)).all()


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (tensor("blk.0.attn_v.weight", (256, 4), kind=42), r"attn_v\.weight: type 42 is not known"),
        (tensor("blk.0.attn_k.weight", (100, 4), kind=14), r"attn_k\.weight: .*100.*256"),
    ],
    ids=["unknown type", "row of no whole blocks"],
)
def test_b65_what_cannot_be_read_names_tensor_and_type(
    record: bytes, message: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "bad.gguf", gguf([], [record], bytes(4096)))
    with pytest.raises(GGUFError, match=message):
        GGUFFile(path)
