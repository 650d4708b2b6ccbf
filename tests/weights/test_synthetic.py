"""Files of random weights for benchmarks: every format that GGUF has makes a model that answers."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest

from invar import LLM, SamplingParams
from invar.cli.inspect import as_text, describe
from invar.config import EngineConfig
from invar.weights.formats import DECODERS, QuantType, dequantize
from invar.weights.gguf import GGUFFile

SYNTHETIC = runpy.run_path(str(Path(__file__).parents[2] / "bench" / "synthetic.py"))
FORMATS = [kind.name for kind in DECODERS if kind.in_gguf]


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_of_every_format(name: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    SYNTHETIC["write"]("tiny", name, path)
    with GGUFFile(path) as file:
        tensor = file.tensors["blk.0.ffn_down.weight"]
        assert tensor.type == QuantType[name]
        assert name in as_text(describe(file, EngineConfig()), all_tensors=False)
        values = dequantize(file.raw("blk.0.ffn_down.weight"), tensor.type, tensor.shape)
    # Outputs as large as inputs; the coarsest formats are off by less than half.
    assert 0.5 < float(np.std(values)) * tensor.shape[-1] ** 0.5 < 1.5
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logprobs=1)
    answer = LLM(model=str(path)).generate("the", params)[0].outputs[0]
    assert len(answer.token_ids) == 4
    assert answer.cumulative_logprob is not None
    assert np.isfinite(answer.cumulative_logprob)
