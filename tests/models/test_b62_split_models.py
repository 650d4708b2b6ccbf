"""A split model is the whole one: its output matrix is looked for in all shards."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from golden.tiny_models import model_path
from models.memory_source import MemorySource

from invar.graph.interpreter import Interpreter
from invar.models import registry
from invar.weights.gguf import GGUFFile
from invar.weights.gguf_writer import GGUFWriter

IDS = [3, 4, 5, 6]


def logits(source: MemorySource | GGUFFile) -> np.ndarray:
    interpreter = Interpreter(registry.build(source), source)
    return np.asarray(interpreter.step(interpreter.new_sequence(), IDS))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("output_last", [True, False])
def test_b62_ties_are_told_from_all_shards(tied: bool, output_last: bool, tmp_path: Path) -> None:
    source = MemorySource.read(model_path("llama_gqa"))
    embedding = source.dequantize("token_embd.weight")
    source.tensors.pop("output.weight", None)
    if not tied:
        source.put("output.weight", embedding[::-1].copy())
    order = sorted(source.tensors, key=lambda name: (name == "output.weight") == output_last)
    writer = GGUFWriter(tmp_path / "m.gguf", source.metadata, shards=3)
    for name in order:
        tensor = source.tensors[name]
        writer.add_tensor(name, tensor.shape, tensor.type, tensor.data)
    shards = writer.write()
    expected = logits(source)
    if not tied:
        source.tensors.pop("output.weight")
        assert not np.allclose(logits(source), expected)
    for path in shards:  # opened from any of them
        with GGUFFile(path) as split:
            assert ("output.weight" in split.tensors) != tied
            assert (logits(split) == expected).all()
