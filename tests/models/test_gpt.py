"""GPT-2 and GPT-NeoX: positions that end, names without a prefix, which activation."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backends.batches import Piece, make_runner, pages_for, run
from golden.families import family_config, family_directory, write_family_gguf
from golden.safetensors_writer import Tensor, safetensors_bytes

from invar.config import EngineConfig
from invar.engine.budget import plan_sizes
from invar.graph.operations import Activate, Activation
from invar.models.hf import activation
from invar.models.metadata import ConfigError
from invar.models.registry import build, open_directory, open_gguf
from invar.weights.formats import QuantType, quantize
from invar.weights.safetensors import SafetensorsFile

POSITIONS = 64  # of the tiny GPT-2


def changed(name: str, folder: Path, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(family_config(name) | changes))
    weights = family_directory(name) / "model.safetensors"
    (folder / weights.name).write_bytes(weights.read_bytes())
    return folder


def stored_tensors(name: str) -> dict[str, Tensor]:
    file = SafetensorsFile(family_directory(name) / "model.safetensors")
    return {
        key: (info.dtype, info.shape, file.raw(key).tobytes()) for key, info in file.tensors.items()
    }


def test_a_position_behind_the_table_is_refused() -> None:
    source = open_directory(family_directory("gpt2"))
    runner = make_runner(build(source), source)
    ids = [n % 90 for n in range(POSITIONS)]
    run(runner, Piece(ids, 0, pages_for(POSITIONS, 0)))
    with pytest.raises(ValueError, match=r"positions\[1\] is 64, the model has 64"):
        run(runner, Piece([1, 2], POSITIONS - 1, pages_for(POSITIONS + 1, 0)))


def test_no_request_may_be_longer_than_the_table() -> None:
    source = open_directory(family_directory("gpt2"))
    graph = build(source)
    config = EngineConfig(model="gpt2", kv_cache_memory_bytes=1 << 26)
    assert plan_sizes(config, graph, source, "gpt2", 96).max_model_len == POSITIONS
    longer = replace(config, max_model_len=POSITIONS + 1)
    with pytest.raises(ValueError, match="65 is beyond the 64 tokens"):
        plan_sizes(longer, graph, source, "gpt2", 96)


def test_a_table_of_another_length_is_refused(tmp_path: Path) -> None:
    with (
        open_directory(changed("gpt2", tmp_path, n_positions=63)) as source,
        pytest.raises(ConfigError, match=r"n_positions is 63, but position_embd.weight has 64"),
    ):
        build(source)


def test_the_first_files_have_no_prefix_but_masks(tmp_path: Path) -> None:
    folder = changed("gpt2", tmp_path)
    tensors = {
        key.removeprefix("transformer."): tensor for key, tensor in stored_tensors("gpt2").items()
    }
    tensors["h.0.attn.bias"] = ("F32", (1, 1, 4, 4), np.tri(4, dtype=np.float32).tobytes())
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    with open_directory(folder) as source, open_directory(family_directory("gpt2")) as usual:
        assert build(source) == build(usual)
        assert source.tensors.keys() == usual.tensors.keys()


@pytest.mark.parametrize(
    ("name", "key", "word", "expected"),
    [
        ("gpt2", "activation_function", "gelu", Activation.GELU),
        ("gpt2", "activation_function", "gelu_pytorch_tanh", Activation.GELU_TANH),
        ("gpt2", "activation_function", "silu", Activation.SILU),
        ("gpt_neox", "hidden_act", "gelu_fast", Activation.GELU_TANH),
        ("gpt_neox", "hidden_act", None, Activation.GELU),
    ],
)
def test_config_says_which_activation(
    name: str, key: str, word: str | None, expected: Activation, tmp_path: Path
) -> None:
    with open_directory(changed(name, tmp_path, **{key: word})) as source:
        found = {op.activation for op in build(source).ops if isinstance(op, Activate)}
    assert found == {expected}


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gpt2", {"activation_function": "relu"}, "activation_function 'relu' is not supported"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gpt2", {"n_head": 5}, r"c_attn\.(weight|bias): .*n_head is 5"),
        ("gpt_neox", {"num_attention_heads": 7}, "num_attention_heads is 7, .* q, k and v"),
    ],
)
def test_what_is_not_built_is_named(
    name: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_directory(changed(name, tmp_path, **change))


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox"])
def test_q_k_and_v_of_gguf_are_views_of_one_matrix(name: str, tmp_path: Path) -> None:
    """Also of a quantised one, whose rows are not decoded for it."""
    path = write_family_gguf(name, tmp_path / "x.gguf", QuantType.Q8_0)
    with open_directory(family_directory(name)) as source, open_gguf(path) as file:
        for part in "qkv":
            tensor = f"blk.1.attn_{part}.weight"
            assert file.made_from(tensor) is None
            assert np.shares_memory(file.raw(tensor), file.raw(tensor))
            expected = quantize(source.dequantize(tensor), QuantType.Q8_0)
            np.testing.assert_array_equal(file.raw(tensor), expected)


@pytest.mark.parametrize("given", [["silu"], {"name": "silu"}, 1, "tanhish"])
def test_an_activation_that_is_none(given: object) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: hidden_act .* is not supported"):
        activation("hidden_act")({"hidden_act": given})
