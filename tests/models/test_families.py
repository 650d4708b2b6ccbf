"""Every dense family: logits of `transformers`, the same graph from GGUF, the contract, law 1."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backends.batches import Piece, make_runner, pages_for, poison, run
from golden.families import (
    FAMILIES,
    architecture_of,
    family_config,
    family_directory,
    family_golden,
    write_family_gguf,
)
from golden.tiny_models import TINY_MODELS, Golden, model_path

from invar.backends.cpu.runner import CpuRunner
from invar.graph.graph import Graph
from invar.graph.interpreter import Interpreter
from invar.graph.operations import ApplyRope, Op, RopeStyle
from invar.graph.passes import with_longest
from invar.models.gguf_source import GGUFSource
from invar.models.hf_source import HFSource
from invar.models.metadata import ConfigError
from invar.models.registry import (
    ARCHITECTURES,
    FUSED,
    MODEL_TYPES,
    build,
    family_of,
    fused_of,
    open_directory,
    open_gguf,
)
from invar.models.rope import ROPE_TENSORS
from invar.weights.formats import QuantType, quantize
from invar.weights.gguf import GGUFFile
from invar.weights.gguf_writer import GGUFWriter

# Both sides compute in double precision: 2^-52 times the few thousand additions behind a logit.
DOUBLE_TOLERANCE = 1e-12
PROMPT_TOKENS = 48
F32 = QuantType.F32
# The backend against the contract: fp32 noise of some hundred additions, 6e-8 each, and now and
# then a bf16 of attention that this noise moves by 2^-9 of itself.
FP32_TOLERANCE = 1e-3


@pytest.fixture(params=FAMILIES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@cache
def source_of(name: str) -> HFSource:
    return open_directory(family_directory(name))


def graph_of(source: Any, positions: int = PROMPT_TOKENS) -> Graph:
    """As requests of the golden prompt's length have it."""
    return with_longest(build(source), positions)


def interpreted(graph: Graph, source: Any, golden: Golden) -> np.ndarray:
    interpreter = Interpreter(graph, source)
    logits = interpreter.step(interpreter.new_sequence(), golden.token_ids)
    return np.asarray(logits[golden.rows], np.float64)


def difference(found: np.ndarray, golden: Golden) -> float:
    return float(np.abs(found - golden.logits).max() / np.abs(golden.logits).max())


def test_every_architecture_is_proved() -> None:
    """A family that the registry has is in one of the lists of tiny models."""
    proved = {source_of(name).family.architecture for name in FAMILIES}
    for tiny in TINY_MODELS:
        with GGUFFile(model_path(tiny)) as file:
            proved.add(file.metadata["general.architecture"])
    assert proved == set(ARCHITECTURES)
    families = [family_of({"model_type": name}) for name in MODEL_TYPES]
    assert {family.architecture for family in families} <= set(ARCHITECTURES)


def test_logits_equal_those_of_transformers(name: str) -> None:
    source, golden = source_of(name), family_golden(name)
    assert difference(interpreted(graph_of(source), source, golden), golden) < DOUBLE_TOLERANCE


def test_the_gguf_form_is_the_same_model(name: str, tmp_path: Path) -> None:
    """Graph and stored values are equal, so every backend computes the same bits from both."""
    source = source_of(name)
    with open_gguf(write_family_gguf(name, tmp_path / "x.gguf")) as file:
        assert set(file.tensors) - ROPE_TENSORS == set(source.tensors)
        for tensor in source.tensors:
            np.testing.assert_array_equal(file.dequantize(tensor), source.dequantize(tensor))
        assert build(file) == build(source)
        golden = family_golden(name)
        assert difference(interpreted(graph_of(file), file, golden), golden) < DOUBLE_TOLERANCE


def changed(op: Op) -> list[Op]:
    """The operation with each of its numbers off by a thousandth, and its rope turned."""
    found: list[Op] = []
    for field in fields(op):
        value = getattr(op, field.name)
        if isinstance(value, float) and value:
            factor = 2.0 if field.name == "eps" else 1.001
            found.append(replace(op, **{field.name: value * factor}))
    if isinstance(op, ApplyRope):
        half = op.rope.style is RopeStyle.HALF
        style = RopeStyle.INTERLEAVED if half else RopeStyle.HALF
        faster = tuple(f * 1.001 for f in op.rope.inv_freq)
        found += [replace(op, rope=replace(op.rope, style=style))]
        found += [replace(op, rope=replace(op.rope, inv_freq=faster))]
    return found


def test_a_wrong_number_anywhere_shows(name: str) -> None:
    source, golden = source_of(name), family_golden(name)
    graph = graph_of(source)
    kinds: dict[Any, int] = {}
    for place, op in enumerate(graph.ops):
        kinds.setdefault((type(op), bool(getattr(op, "soft_cap", None))), place)
    for place in kinds.values():
        for wrong in changed(graph.ops[place]):
            ops = (*graph.ops[:place], wrong, *graph.ops[place + 1 :])
            found = interpreted(replace(graph, ops=ops), source, golden)
            assert difference(found, golden) > 10 * DOUBLE_TOLERANCE, wrong


# ---------------------------------------------------------------- several weights in a tensor

FUSED_FAMILIES = [name for name in FAMILIES if architecture_of(name) in FUSED]


@pytest.mark.parametrize("fused", FUSED_FAMILIES)
def test_parts_of_a_stored_matrix_are_views_of_it(fused: str, tmp_path: Path) -> None:
    """Also of a quantised one, whose rows are not decoded for it."""
    source = source_of(fused)
    path = write_family_gguf(fused, tmp_path / "x.gguf", QuantType.Q8_0)
    with open_gguf(path) as file, GGUFFile(path) as plain:
        parts = [name for name in file.tensors if file.tensors[name] != plain.tensors.get(name)]
        assert {name.split(".")[2] for name in parts} >= {"ffn_gate", "ffn_up"}
        for name in parts:
            expected = quantize(source.dequantize(name), QuantType.Q8_0)
            np.testing.assert_array_equal(file.raw(name), expected)
            for model in (file, source):
                assert model.made_from(name) is None
                assert np.shares_memory(model.raw(name), model.raw(name))


def test_biases_come_apart_with_their_matrices(tmp_path: Path) -> None:
    """q, k and v of the GLM models that GGUF stores as one."""
    source, path = source_of("glm4"), tmp_path / "x.gguf"
    with open_gguf(write_family_gguf("glm4", tmp_path / "y.gguf")) as apart:
        metadata = {key: apart.metadata[key] for key in apart.metadata}
        writer = GGUFWriter(path, metadata)
        for name in source.tensors:
            values = apart.dequantize(name)
            if ".attn_q." in name:
                parts = [name.replace("attn_q.", f"attn_{part}.") for part in "qkv"]
                values = np.concatenate([apart.dequantize(part) for part in parts])
                writer.add_tensor(parts[0].replace("_q.", "_qkv."), values.shape, F32, values)
            elif not any(f".attn_{part}." in name for part in "kv"):
                writer.add_tensor(name, values.shape, F32, values)
        writer.write()
    golden = family_golden("glm4")
    with open_gguf(path) as file:
        assert difference(interpreted(build(file), file, golden), golden) < DOUBLE_TOLERANCE


@pytest.mark.parametrize("kind", ["su", "yarn", "longrope"])
def test_the_first_files_of_phi3_call_longrope_otherwise(kind: str, tmp_path: Path) -> None:
    config = family_config("phi3")
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = {**rope, "type": kind}
    del config["rope_scaling"]["rope_type"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = family_directory("phi3") / "model.safetensors"
    (tmp_path / weights.name).write_bytes(weights.read_bytes())
    with open_directory(tmp_path) as source:
        assert build(source) == build(source_of("phi3"))


def test_a_tensor_that_cannot_be_cut_is_named(tmp_path: Path) -> None:
    path = write_family_gguf("phi3", tmp_path / "x.gguf")
    with GGUFFile(path) as file:
        metadata = {key: file.metadata[key] for key in file.metadata}
    metadata["phi3.attention.head_count"] = 7
    writer = GGUFWriter(path, metadata)
    writer.add_tensor("blk.0.attn_qkv.weight", (64, 32), F32, np.zeros((64, 32), np.float32))
    writer.write()
    with pytest.raises(ConfigError, match=r"attn_qkv\.weight: phi3\.attention\.head_count is 7"):
        GGUFSource(path, lambda metadata: fused_of("phi3"))


# ---------------------------------------------------------------- on the CPU


def runner_of(name: str, **options: Any) -> CpuRunner:
    runner = make_runner(graph_of(source_of(name)), source_of(name), **options)
    poison(runner)
    return runner


def in_chunks(name: str, chunk: int, **options: Any) -> np.ndarray:
    ids, runner = family_golden(name).token_ids, runner_of(name, **options)
    for start in range(0, len(ids), chunk):
        run(runner, Piece(ids[start : start + chunk], start, pages_for(len(ids), 2)))
    return runner.logits(1)[0]


def test_the_backend_keeps_the_contract(name: str) -> None:
    ids, source = family_golden(name).token_ids, source_of(name)
    interpreter = Interpreter(graph_of(source), source, "contract")
    expected = np.asarray(interpreter.step(interpreter.new_sequence(), ids)[-1])
    found = in_chunks(name, len(ids))
    assert np.abs(found - expected).max() < FP32_TOLERANCE * np.abs(expected).max()


def test_chunks_decode_threads_and_strangers_change_no_bit(name: str) -> None:
    ids = family_golden(name).token_ids
    expected = in_chunks(name, len(ids), threads=1, isa="portable").tobytes()
    for chunk in (1, 7, 32):
        assert in_chunks(name, chunk, threads=2).tobytes() == expected
    runner = runner_of(name, threads=3)
    stranger, pages = ids[::-1], pages_for(len(ids), 4)
    run(runner, Piece(stranger[:20], 0, pages_for(20)), Piece(ids[:-1], 0, pages))
    last = Piece(ids[-1:], len(ids) - 1, pages)
    run(runner, Piece(stranger[20:33], 20, [0, 1]), last, Piece(stranger[:9], 0, [7]))
    assert runner.logits(3)[1].tobytes() == expected
