"""A Hugging Face directory is the same model as its GGUF file: names, values, graph and logits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden.hf_form import write_hf_directory
from golden.tiny_models import TINY_MODELS, load_golden, model_path

from invar.graph.graph import GraphError
from invar.graph.interpreter import Interpreter
from invar.models.hf import HFFamily
from invar.models.hf_source import HFSource
from invar.models.metadata import ConfigError
from invar.models.placed import Placed
from invar.models.registry import build, open_directory
from invar.weights.gguf import GGUFFile
from invar.weights.safetensors import SafetensorsError

# Both sides compute in double precision: 2^-52 times the few thousand additions behind a logit.
DOUBLE_TOLERANCE = 1e-12


@pytest.mark.parametrize("name", TINY_MODELS)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    golden = load_golden(name)
    with open_directory(write_hf_directory(name, tmp_path / "model")) as source:
        interpreter = Interpreter(build(source), source)
        logits = interpreter.step(interpreter.new_sequence(), golden.token_ids)[golden.rows]
    tolerance = DOUBLE_TOLERANCE * float(np.abs(golden.logits).max())
    np.testing.assert_allclose(logits, golden.logits, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_tensors_and_graph_are_those_of_the_gguf_file(name: str, tmp_path: Path) -> None:
    directory = write_hf_directory(name, tmp_path / "model", shards=3)
    with open_directory(directory) as source, GGUFFile(model_path(name)) as file:
        names = set(file.tensors) - {"rope_freqs.weight"}
        assert set(source.tensors) == names
        for tensor in names:
            np.testing.assert_array_equal(source.raw(tensor), file.raw(tensor))
            assert source.tensors[tensor] == file.tensors[tensor]
        if name != "llama3_rope":  # whose frequencies GGUF holds in float32
            assert build(source) == build(file)


def test_what_is_only_renamed_is_not_copied(tmp_path: Path) -> None:
    with open_directory(write_hf_directory("llama_gqa", tmp_path / "model", "BF16")) as source:
        views = (source.raw("blk.0.ffn_up.weight"), source.raw("blk.0.ffn_up.weight"))
        assert np.shares_memory(*views)
        assert not views[0].flags.writeable


@pytest.mark.parametrize("name", TINY_MODELS)
def test_what_is_copied_says_what_it_is_made_from(name: str, tmp_path: Path) -> None:
    """So that packing holds one copy at a time, and the fingerprint makes none."""
    with open_directory(write_hf_directory(name, tmp_path / "model")) as source:
        for tensor in source.tensors:
            is_view = np.shares_memory(source.raw(tensor), source.raw(tensor))
            made_from = source.made_from(tensor)
            assert (made_from is None) == is_view, tensor
            if made_from is not None:
                stored = {part.dtype for part in source.stored.tensors.values()}
                assert stored == {"F32"}
                nbytes = source.raw(tensor).nbytes  # some tensors hold two weights
                assert sum(part.nbytes for part in made_from) in (nbytes, 2 * nbytes)


# ---------------------------------------------------------------- what is wrong is named


def changed(folder: Path, **changes: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    config |= changes
    config = {key: value for key, value in config.items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "lama"}, "config.json: model_type 'lama' .*near ones: llama"),
        ({"model_type": None}, "config.json: model_type must be a string"),
        ({"num_hidden_layers": 3}, "config.json: num_hidden_layers is 3, .* 2 blocks"),
        ({"num_hidden_layers": "2"}, "config.json: num_hidden_layers must be an integer"),
        ({"num_hidden_layers": "absent"}, "config.json: num_hidden_layers is missing"),
        ({"hidden_size": 65}, "config.json: hidden_size is 65"),
        ({"num_attention_heads": 3}, "config.json: num_attention_heads|3 heads"),
        ({"rms_norm_eps": [1]}, "config.json: rms_norm_eps must be a number"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope type 'spiral' is not known"),
        ({"rope_parameters": 7}, "config.json: rope_parameters must be an object"),
        (
            {"quantization_config": {"quant_method": "awq"}},
            "quantization_config says awq, but no weight",
        ),
        ({"tie_word_embeddings": False}, "lm_head.weight. is missing"),
    ],
)
def test_a_wrong_configuration_is_named(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = changed(write_hf_directory("llama_gqa", tmp_path / "model"), **changes)
    with pytest.raises((ConfigError, GraphError, SafetensorsError), match=message):
        build(open_directory(folder))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gpt_oss", {"layer_types": -1}, "layer_types must be a list, not int"),
        ("gemma3_pattern6", {"query_pre_attn_scalar": 10**400}, "query_pre_attn_scalar"),
        ("deepseek_v3", {"rope_parameters": {"mscale_all_dim": 10**400}}, "mscale_all_dim"),
    ],
)
def test_values_a_family_computes_with_are_named(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = write_hf_directory(name, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    nested = {key: config[key] | value for key, value in changes.items() if isinstance(value, dict)}
    with pytest.raises(ConfigError, match=message):
        build(open_directory(changed(folder, **changes | nested)))


def test_an_unknown_weight_is_named_as_the_file_has_it(tmp_path: Path) -> None:
    folder = write_hf_directory("llama_plain", tmp_path / "model")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b"model.norm.weight", b"model.nurm.weight"))
    with pytest.raises(GraphError, match=r"output_norm\.weight|model\.nurm\.weight"):
        build(open_directory(folder))


# ---------------------------------------------------------------- what a table can say


def source_of(folder: Path, names: dict[str, str | Placed]) -> HFSource:
    family = HFFamily("toy", {"block_count": "layers"}, names)
    return HFSource(folder, lambda config: family)


@pytest.fixture
def toy(tmp_path: Path) -> Callable[[dict[str, np.ndarray], dict[str, str | Placed]], HFSource]:
    from golden.safetensors_writer import safetensors_bytes, stored

    def make(values: dict[str, np.ndarray], names: dict[str, str | Placed]) -> HFSource:
        (tmp_path / "config.json").write_text(json.dumps({"layers": 2}))
        tensors = {name: stored(array, "F32") for name, array in values.items()}
        (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(tensors))
        return source_of(tmp_path, names)

    return make


def test_experts_are_stacked_in_order(toy: Any) -> None:
    random = np.random.default_rng(0)
    experts = {e: random.standard_normal((3, 5)).astype(np.float32) for e in (10, 2, *range(2))}
    experts |= {e: random.standard_normal((3, 5)).astype(np.float32) for e in range(3, 10)}
    values = {f"m.layers.1.experts.{e}.w1.weight": array for e, array in experts.items()}
    with toy(values, {"m.layers.{}.experts.{}.w1": "blk.{}.ffn_gate_exps"}) as source:
        (name,) = source.tensors
        assert name == "blk.1.ffn_gate_exps.weight"
        assert source.tensors[name].shape == (11, 3, 5)
        expected = np.stack([experts[e] for e in range(11)])
        np.testing.assert_array_equal(source.dequantize(name), expected)


def test_a_missing_expert_is_named(toy: Any) -> None:
    values = {f"m.layers.0.experts.{e}.w1.weight": np.ones((2, 2), np.float32) for e in (0, 2)}
    with pytest.raises(SafetensorsError, match=r"blk\.0\.up_exps\.weight: parts are missing"):
        toy(values, {"m.layers.{}.experts.{}.w1": "blk.{}.up_exps"})


def test_a_transposed_weight(toy: Any) -> None:
    stored = np.arange(6, dtype=np.float32).reshape(2, 3)
    values = {"h.0.c.weight": stored, "h.0.c.bias": np.arange(3, dtype=np.float32)}
    with toy(values, {"h.{}.c": Placed("blk.{}.c", transposed=True)}) as source:
        np.testing.assert_array_equal(source.dequantize("blk.0.c.weight"), stored.T)
        np.testing.assert_array_equal(source.dequantize("blk.0.c.bias"), np.arange(3))
