"""What a model's own files say about sampling, and what the options put in its place."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden.hf_form import write_hf_directory
from golden.tiny_models import model_path
from models.memory_source import MemorySource

from invar import LLM, SamplingParams, StructuredOutputs
from invar.config import EngineConfig
from invar.engine.loader import load_text_alone
from invar.engine.sampling_defaults import SamplingDefaults

OWN = {
    **{"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05},
    **{"do_sample": True, "max_new_tokens": 7, "eos_token_id": [1, 4], "pad_token_id": 0},
    "transformers_version": "4.51.0",
}
IN_GGUF = {"temp": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "penalty_repeat": 1.05}
TAKEN = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf_directory("llama_gqa", tmp_path_factory.mktemp("defaults") / "model")


def says(directory: Path, **own: Any) -> None:
    (directory / "generation_config.json").write_text(json.dumps(own))


def gguf(path: Path, values: Mapping[str, Any]) -> Path:
    source = MemorySource.read(model_path("llama_gqa"))
    source.metadata |= {f"general.sampling.{name}": value for name, value in values.items()}
    return source.write(path)


def defaults(model: Path, **options: Any) -> SamplingDefaults:
    return load_text_alone(EngineConfig(model=str(model), **options)).defaults


def test_of_a_directory(directory: Path) -> None:
    says(directory, **OWN)
    found = defaults(directory)
    assert found.values == {**TAKEN, "max_tokens": 7}
    assert found.max_tokens is None  # a request may ask for more
    assert found.params() == SamplingParams(**TAKEN, max_tokens=7)
    assert found.line == (
        "temperature 0.6, top_p 0.95, top_k 20, min_p 0.05, repetition_penalty 1.05, max_tokens 7 "
        "(generation_config.json)"
    )


def test_of_gguf_they_are_those_it_was_made_from(tmp_path: Path) -> None:
    """The file has 0.95 as 0.949999988."""
    found = defaults(gguf(tmp_path / "m.gguf", IN_GGUF))
    assert found.values == TAKEN
    assert found.source == "m.gguf: general.sampling.*"


def test_none_are_none(directory: Path) -> None:
    says(directory, eos_token_id=[1, 4], temperature=None, do_sample=False)
    for model in (directory, model_path("llama_gqa")):
        found = defaults(model)
        assert found.values == {}
        assert found.line is None
        assert found.params() == SamplingParams()


def test_options_come_before_the_file(directory: Path, tmp_path: Path) -> None:
    says(directory, **OWN)
    assert defaults(directory, generation_config="vllm").values == {}
    overriding = defaults(
        directory, override_generation_config={"top_k": 5, "max_new_tokens": 3, "top_p": None}
    )
    assert overriding.values == {**TAKEN, "top_k": 5, "max_tokens": 3}
    assert overriding.max_tokens == 3  # whoever runs the server says it of every answer
    line = overriding.line or ""
    assert line.endswith(
        "at most 3 tokens an answer (generation_config.json and override_generation_config)"
    )
    other = tmp_path / "generation_config.json"
    other.write_text(json.dumps({"temperature": 0.1, "max_new_tokens": 9, "num_beams": 4}))
    for given in (other, tmp_path):
        found = defaults(directory, generation_config=str(given))
        assert found.values == {"temperature": 0.1, "max_tokens": 9}
        assert found.max_tokens == 9
        assert found.source == str(other)


def test_whoever_asks_for_more_than_the_limit_gets_the_limit() -> None:
    free = SamplingDefaults({"max_tokens": 7})
    assert [free.within_limit(n) for n in (None, 3, 20)] == [7, 3, 20]
    bounded = SamplingDefaults({"max_tokens": 7}, max_tokens=7)
    assert [bounded.within_limit(n) for n in (None, 3, 20)] == [7, 3, 7]
    assert SamplingDefaults().within_limit(None) is None


@pytest.mark.parametrize(("own", "left_out"), [
    ({"temperature": "hot"}, "temperature: expected a number, got 'hot'"),
    ({"temperature": True}, "temperature: expected a number, got True"),
    ({"temperature": -1}, "temperature: -1.0 is outside"),
    ({"top_p": 0}, "top_p: 0.0 is outside"),
    ({"top_p": [0.5]}, "top_p: expected a number"),
    ({"top_k": 1e300}, "top_k: expected an integer"),
    ({"top_k": 10**50}, "top_k: a number of more than 40 digits"),
    ({"min_p": 2}, "min_p: 2.0 is outside"),
    ({"max_new_tokens": 0}, "max_tokens: 0 is outside"),
    ({"repetition_penalty": 0}, "repetition_penalty: 0.0 is outside"),
    ({"temperature": float("nan")}, "temperature: must be finite"),
    ({"num_beams": 4}, "num_beams is 4, which is not built"),
])  # fmt: skip
def test_what_a_model_has_wrong_is_left_out_with_a_line(
    own: dict[str, Any], left_out: str, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    says(directory, **own, **({"top_k": 9} if "top_k" not in own else {}))
    with caplog.at_level(logging.WARNING, "invar"):
        found = defaults(directory)
    assert found.values == ({"top_k": 9} if "top_k" not in own else {})
    (line,) = caplog.messages
    assert line.startswith(f"generation_config.json: left out: {left_out}")
    assert len(line) < 200


def test_samplers_of_gguf_that_are_not_built_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    odd = {"mirostat": np.int32(2), "xtc_probability": 0.0, "temp": np.ones(3, np.float32)}
    with caplog.at_level(logging.WARNING, "invar"):
        assert defaults(gguf(tmp_path / "m.gguf", odd)).values == {}
    assert [line.partition(" left out: ")[2] for line in caplog.messages] == [
        "mirostat is 2, which is not built",
        "temperature: expected a number, got [1.0, 1.0, 1.0]",
    ]


@pytest.mark.parametrize(("given", "message"), [
    ({"temprature": 1}, "'temprature' is not a default of sampling; nearest: temperature"),
    ({"temperature": "hot"}, "temperature: expected a number, got 'hot'"),
    ({"eos_token_id": [-1]}, "eos_token_id: -1 is not a token id"),
    ({"eos_token_id": "x"}, "eos_token_id: x is not a token id"),
])  # fmt: skip
def test_what_the_user_has_wrong_is_an_error(given: dict[str, Any], message: str) -> None:
    """Before a model is looked for."""
    with pytest.raises(ValueError, match="override_generation_config: ") as raised:
        LLM(model="/no/such/model", override_generation_config=given)
    assert message in str(raised.value)


def test_a_file_that_is_not_there_or_wrong(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no file .*generation_config"):
        defaults(directory, generation_config=str(tmp_path))
    (tmp_path / "generation_config.json").write_text('{"top_p": 7}')
    with pytest.raises(ValueError, match=r"generation_config.json: top_p: 7.0 is outside"):
        defaults(directory, generation_config=str(tmp_path))
    for wrong in (7, ""):
        with pytest.raises(ValueError, match="generation_config: expected auto, vllm or a path"):
            EngineConfig(generation_config=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="override_generation_config: expected an object"):
        EngineConfig(override_generation_config=[1])  # type: ignore[arg-type]


def test_offline_they_hold_where_no_params_are_given(directory: Path) -> None:
    says(directory, temperature=0, max_new_tokens=5)
    sizes = {"num_threads": 1, "max_num_seqs": 2, "max_model_len": 256}
    with LLM(model=str(directory), **sizes) as llm:
        own = llm.get_default_sampling_params()
        assert own == SamplingParams(temperature=0, max_tokens=5)
        silent = llm.generate([5, 6, 7])[0].outputs[0].token_ids
        assert silent == llm.generate([5, 6, 7], own)[0].outputs[0].token_ids
        assert len(silent) == 5
        assert (
            len(llm.generate([5, 6, 7], SamplingParams(max_tokens=9))[0].outputs[0].token_ids) == 9
        )
        assert own is not llm.get_default_sampling_params()
        second = silent[1]
    with LLM(
        model=str(directory), override_generation_config={"eos_token_id": [second, 3]}, **sizes
    ) as llm:
        (ended,) = llm.generate([5, 6, 7])[0].outputs
        assert list(ended.token_ids) == list(silent[:2])
        assert ended.finish_reason == "stop"
        # It ends an answer with a grammar as well.
        shaped = SamplingParams(
            allowed_token_ids=[3], structured_outputs=StructuredOutputs(regex="a*")
        )
        (ended,) = llm.generate([5, 6, 7], shaped)[0].outputs
        assert (list(ended.token_ids), ended.finish_reason) == ([3], "stop")
