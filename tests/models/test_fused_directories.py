"""Directories as the makers of mixtures publish them: formats, names and layers of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backends.batches import Piece, make_runner, pages_for, poison, run
from golden.hf_form import hf_tensors, write_hf_directory
from golden.quantised_form import fp8
from golden.safetensors_writer import Tensor, stored, write_sharded
from golden.tiny_models import load_golden, model_path

from invar.graph.graph import GraphError
from invar.graph.interpreter import Interpreter
from invar.models.metadata import ConfigError
from invar.models.registry import build, open_directory, open_gguf
from invar.weights.formats import QuantType, quantize
from invar.weights.gguf import GGUFFile
from invar.weights.gguf_writer import GGUFWriter
from invar.weights.safetensors import SafetensorsError

Floats = np.ndarray
Tensors = dict[str, Floats]

# Both sides compute in double precision: 2^-52 times the few thousand additions behind a logit.
DOUBLE_TOLERANCE = 1e-12
ONE_CODE = 4e-3  # of the largest logit, as in tests/backends/test_contract.py


def published(name: str) -> Tensors:
    with GGUFFile(model_path(name)) as source:
        return hf_tensors(source)


def write(folder: Path, name: str, tensors: dict[str, Tensor], **changes: Any) -> Path:
    """A directory of these tensors; its configuration has these keys changed."""
    write_hf_directory(name, folder)
    write_sharded(folder, tensors, 1)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def plain(tensors: Tensors) -> dict[str, Tensor]:
    return {name: stored(values, "F32") for name, values in tensors.items()}


def logits(source: Any, name: str, mode: str = "exact") -> Floats:
    interpreter = Interpreter(build(source), source, mode)
    found = interpreter.step(interpreter.new_sequence(), load_golden(name).token_ids)
    return np.asarray(found[load_golden(name).rows], np.float64)


def expect_golden(source: Any, name: str) -> None:
    golden = load_golden(name).logits
    tolerance = DOUBLE_TOLERANCE * float(np.abs(golden).max())
    np.testing.assert_allclose(logits(source, name), golden, rtol=0, atol=tolerance)


def chunked(source: Any, name: str, chunk: int, **options: Any) -> Floats:
    """Logits of the last token on the CPU, behind strangers in every step."""
    ids = load_golden(name).token_ids
    runner = make_runner(build(source), source, **options)
    poison(runner)
    for start in range(0, len(ids), chunk):
        piece = Piece(ids[start : start + chunk], start, pages_for(len(ids), 4))
        run(runner, Piece(ids[::-1][:5], 0, [0]), piece)
    return np.asarray(runner.logits(2)[1])


def expect_law_1(source: Any, name: str) -> None:
    expected = chunked(source, name, 48, threads=1, isa="portable")
    for chunk in (1, 7, 32):
        assert chunked(source, name, chunk, threads=2).tobytes() == expected.tobytes()
    contract = Interpreter(build(source), source, "contract")
    rows = contract.step(contract.new_sequence(), load_golden(name).token_ids)
    last = np.asarray(rows[-1], np.float64)
    assert np.abs(expected - last).max() < ONE_CODE * np.abs(last).max()


# ---------------------------------------------------------------- GPT-OSS


def mxfp4_parts(name: str, values: Floats) -> dict[str, Tensor]:
    """`*_blocks` and `*_scales` of a stack `[experts, rows, columns]`: in a byte two neighbours,
    the first in its low half."""
    rows = quantize(values.reshape(-1, values.shape[-1]), QuantType.MXFP4)
    blocks = rows.reshape(*values.shape[:-1], -1, 17)
    low, high = blocks[..., 1:] & 15, blocks[..., 1:] >> 4
    codes = np.concatenate([low, high], axis=-1)
    pairs = np.ascontiguousarray(codes[..., ::2] | codes[..., 1::2] << 4)
    scales = np.ascontiguousarray(blocks[..., 0])
    return {
        f"{name}_blocks": ("U8", pairs.shape, pairs.tobytes()),
        f"{name}_scales": ("U8", scales.shape, scales.tobytes()),
    }


def write_gguf(name: str, path: Path, kind_of: Callable[[str], QuantType]) -> Path:
    with GGUFFile(model_path(name)) as source:
        writer = GGUFWriter(path, {key: source.metadata[key] for key in source.metadata})
        for tensor, info in source.tensors.items():
            values = source.dequantize(tensor)
            writer.add_tensor(tensor, info.shape, kind_of(tensor), values)
        writer.write()
    return path


def test_gpt_oss_as_it_is_published(tmp_path: Path) -> None:
    """Experts in MXFP4 are stored the other way round than plain ones; bf16 besides."""
    tensors: dict[str, Tensor] = {}
    for name, values in published("gpt_oss").items():
        if name.endswith(("gate_up_proj", "down_proj")) and ".experts." in name:
            tensors |= mxfp4_parts(name, np.ascontiguousarray(values.swapaxes(1, 2)))
        else:
            tensors[name] = stored(values, "F32")
    method = {"quant_method": "mxfp4"}
    folder = write(tmp_path / "model", "gpt_oss", tensors, quantization_config=method)

    def kind(tensor: str) -> QuantType:
        return QuantType.MXFP4 if tensor.endswith("_exps.weight") else QuantType.F32

    gguf = write_gguf("gpt_oss", tmp_path / "x.gguf", kind)
    with open_directory(folder) as source, GGUFFile(gguf) as file:
        assert build(source) == build(file)
        for name, tensor in file.tensors.items():
            assert source.tensors[name] == tensor
            np.testing.assert_array_equal(source.raw(name), file.raw(name))
        assert source.made_from("blk.0.ffn_gate_exps.weight") is not None
        expect_law_1(source, "gpt_oss")


def test_plain_experts_of_gpt_oss_in_bf16(tmp_path: Path) -> None:
    with open_directory(write_hf_directory("gpt_oss", tmp_path / "model", "BF16")) as source:
        assert source.tensors["blk.0.ffn_up_exps.weight"].type is QuantType.BF16
        expect_law_1(source, "gpt_oss")


# ---------------------------------------------------------------- Llama 4

NAMES: dict[str, Callable[[str], str]] = {
    "as published": lambda name: f"language_model.{name}",
    "as saved today": lambda name: name.replace("model.", "model.language_model.", 1),
}


@pytest.mark.parametrize("how", NAMES)
def test_the_language_model_of_llama4_that_sees(how: str, tmp_path: Path) -> None:
    tensors = {NAMES[how](name): values for name, values in published("llama4").items()}
    prefix = "" if how == "as published" else "model."
    for part in ("vision_model.patch_embedding.linear", "multi_modal_projector.linear_1"):
        tensors[f"{prefix}{part}.weight"] = np.ones((3, 4), np.float32)
    folder = write(tmp_path / "model", "llama4", plain(tensors))
    config = json.loads((folder / "config.json").read_text())
    config = {"model_type": "llama4", "text_config": config, "vision_config": {"hidden_size": 4}}
    (folder / "config.json").write_text(json.dumps(config))
    with open_directory(folder) as source, GGUFFile(model_path("llama4")) as file:
        assert build(source) == build(file)
        expect_golden(source, "llama4")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama4", {"no_rope_layers": [0, 1, 1]}, "no_rope_layers are not the last of every 2"),
        ("llama4", {"moe_layers": [0]}, "moe_layers are not the last of every 2"),
        # Numbers of layers of which no list could be made.
        ("llama4", {"num_hidden_layers": 10**12}, "not the last of every 2"),
        ("llama4", {"num_hidden_layers": 10**30}, "not the last of every 2"),
        ("llama4", {"attn_temperature_tuning": False}, "attn_temperature_tuning is off"),
        ("gpt_oss", {"layer_types": ["full_attention"] * 2}, "layer_types do not alternate"),
        ("gpt_oss", {"swiglu_limit": 8.0}, r"swiglu_limit is 8\.0, supported is 7\.0"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq is not 1"),
        ("deepseek_v3", {"scoring_func": "tanh"}, "scoring_func 'tanh' is not known"),
        ("deepseek_v3", {"qk_nope_head_dim": None}, "qk_head_dim is missing"),
        ("deepseek_v3", {"qk_nope_head_dim": 64}, r"kv_b_proj\.weight: 128 rows are not keys of"),
        ("deepseek_v3", {"num_attention_heads": 3}, "3 heads|does not cut"),
    ],
)
def test_what_is_not_built_is_named(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = write(tmp_path / "model", name, plain(published(name)), **changes)
    with pytest.raises((ConfigError, GraphError, SafetensorsError), match=message):
        build(open_directory(folder))


# ---------------------------------------------------------------- DeepSeek


def test_the_layer_that_guesses_is_left_out(tmp_path: Path) -> None:
    tensors = published("deepseek_v3")
    for name in ("eh_proj.weight", "embed_tokens.weight", "self_attn.kv_b_proj.weight"):
        tensors[f"model.layers.2.{name}"] = np.ones((4, 4), np.float32)
    with open_directory(write(tmp_path / "model", "deepseek_v3", plain(tensors))) as source:
        expect_golden(source, "deepseek_v3")


def test_deepseek_in_fp8_blocks(tmp_path: Path) -> None:
    """As V3 and R1 are published: the matrix of keys is turned, so its values are float32."""
    tensors: dict[str, Tensor] = {}
    values: Tensors = {}
    for name, array in published("deepseek_v3").items():
        if "_proj" in name and name.endswith(".weight"):
            written = fp8(name.removesuffix(".weight"), array, (128, 128))
            tensors |= written.tensors
            values[name] = written.values
        else:
            tensors[name] = stored(array, "F32")
            values[name] = array
    method = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    changes = {"quantization_config": method}
    folder = write(tmp_path / "fp8", "deepseek_v3", tensors, **changes)
    decoded = write(tmp_path / "plain", "deepseek_v3", plain(values))
    with open_directory(folder) as source, open_directory(decoded) as floats:
        assert build(source) == build(floats)
        for name in source.tensors:
            np.testing.assert_array_equal(source.dequantize(name), floats.dequantize(name))
        kinds = {
            name.split(".")[2]: info.type
            for name, info in source.tensors.items()
            if name.startswith("blk.1.")
        }
        assert kinds["attn_k_b"] is QuantType.F32
        assert {kinds["attn_v_b"], kinds["ffn_up_exps"]} == {QuantType.FP8}
        wanted = logits(floats, "deepseek_v3")
        tolerance = DOUBLE_TOLERANCE * float(np.abs(wanted).max())
        np.testing.assert_allclose(logits(source, "deepseek_v3"), wanted, rtol=0, atol=tolerance)
        expect_law_1(source, "deepseek_v3")


@pytest.mark.parametrize("kind", [QuantType.F32, QuantType.Q8_0])
@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_older_gguf_files_with_keys_and_values_as_one(
    name: str, kind: QuantType, tmp_path: Path
) -> None:
    """Converted before the two were apart: the head's size has another key then."""
    path = tmp_path / "x.gguf"
    together = published(name)
    with GGUFFile(model_path(name)) as apart:
        metadata = {key: apart.metadata[key] for key in apart.metadata}
        for part in ("key", "value"):
            length = metadata.pop(f"deepseek2.attention.{part}_length_mla")
            metadata[f"deepseek2.attention.{part}_length"] = length
        writer = GGUFWriter(path, metadata)
        for tensor, info in apart.tensors.items():
            if ".attn_k_b." in tensor:
                layer = tensor.split(".")[1]
                values = together[f"model.layers.{layer}.self_attn.kv_b_proj.weight"]
                writer.add_tensor(f"blk.{layer}.attn_kv_b.weight", values.shape, kind, values)
            elif ".attn_v_b." not in tensor:
                writer.add_tensor(tensor, info.shape, info.type, apart.dequantize(tensor))
        writer.write()
    with open_gguf(path) as source, GGUFFile(model_path(name)) as apart:
        assert build(source) == build(apart)
        assert source.tensors["blk.0.attn_v_b.weight"].type is kind
        assert source.tensors["blk.0.attn_k_b.weight"].type is QuantType.F32
        if kind is QuantType.F32:
            expect_golden(source, name)
        expect_law_1(source, name)


# ---------------------------------------------------------------- GGUF files of any family

MERGED = {
    "attn_qkv": ("attn_q", "attn_k", "attn_v"),
    "ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps"),
}


def write_merged(name: str, path: Path, kind: QuantType) -> set[str]:
    """The tiny model with what may be merged stored as one; returns the parts of that."""
    taken: set[str] = set()
    with GGUFFile(model_path(name)) as apart:
        writer = GGUFWriter(path, {key: apart.metadata[key] for key in apart.metadata})
        for tensor, (whole, parts) in product(apart.tensors, MERGED.items()):
            names = [tensor.replace(f".{parts[0]}.", f".{part}.") for part in parts]
            if f".{parts[0]}." not in tensor or not apart.tensors.keys() >= set(names):
                continue
            values = [apart.dequantize(part) for part in names]
            together = np.concatenate(values, axis=int(parts[0].endswith("_exps")))
            matrices = kind if tensor.endswith("weight") else QuantType.F32
            merged = tensor.replace(parts[0], whole)
            writer.add_tensor(merged, together.shape, matrices, together)
            taken |= set(names)
        for tensor in apart.tensors.keys() - taken:
            info = apart.tensors[tensor]
            writer.add_tensor(tensor, info.shape, info.type, apart.dequantize(tensor))
        writer.write()
    return taken


@pytest.mark.parametrize("kind", [QuantType.F32, QuantType.Q8_0])
@pytest.mark.parametrize("name", ["llama_gqa", "qwen2_moe", "gpt_oss", "deepseek_v2"])
def test_what_a_converter_merged_comes_apart(name: str, kind: QuantType, tmp_path: Path) -> None:
    """q, k and v, gate and up of experts, with their biases."""
    parts = write_merged(name, tmp_path / "x.gguf", kind)
    assert parts
    with open_gguf(tmp_path / "x.gguf") as source, GGUFFile(model_path(name)) as apart:
        assert build(source) == build(apart)
        for tensor in apart.tensors:
            values = apart.dequantize(tensor)
            if tensor in parts and tensor.endswith("weight") and kind is not QuantType.F32:
                rows = quantize(values.reshape(-1, values.shape[-1]), kind)
                assert source.raw(tensor).tobytes() == rows.tobytes()
            else:
                np.testing.assert_array_equal(source.dequantize(tensor), values)
        if kind is QuantType.F32:
            expect_golden(source, name)
