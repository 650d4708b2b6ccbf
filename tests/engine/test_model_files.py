"""A Hugging Face directory through the engine: in one process and as `invar serve` splits it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from golden.hf_form import write_hf_directory
from golden.tiny_models import TINY_MODELS, model_path

from invar import LLM, SamplingParams
from invar.config import EngineConfig
from invar.engine.loader import load_engine_alone, load_text_alone
from invar.graph.graph import GraphError
from invar.text.errors import TokenizerError
from invar.weights.sources import ModelSourceError, resolve

GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=3, ignore_eos=True)


def answers(model: Path) -> list[Any]:
    with LLM(model=str(model), num_threads=1, max_num_seqs=2) as llm:
        outputs = llm.generate(["the winner", "on a table"], GREEDY)
        return [(c.text, c.token_ids, c.logprobs) for o in outputs for c in o.outputs]


@pytest.mark.parametrize("name", [name for name in TINY_MODELS if name != "llama3_rope"])
def test_a_directory_answers_as_its_gguf_file_to_the_bit(name: str, tmp_path: Path) -> None:
    directory = write_hf_directory(name, tmp_path / "model", shards=2)
    assert answers(directory) == answers(model_path(name))


def config(path: Path, **options: Any) -> EngineConfig:
    sizes = {"num_threads": 1, "max_num_seqs": 2, "kv_cache_memory_bytes": 4 << 20}
    return EngineConfig(model=str(path), **sizes, **options)


def fingerprint(path: Path) -> str:
    computing = load_engine_alone(config(path))
    computing.close()
    return computing.info.fingerprint


def test_the_fingerprint_follows_weights_and_configuration(tmp_path: Path) -> None:
    plain = write_hf_directory("llama_gqa", tmp_path / "plain")
    sharded = write_hf_directory("llama_gqa", tmp_path / "sharded", shards=3)
    rounded = write_hf_directory("llama_gqa", tmp_path / "rounded", "BF16")
    moved = write_hf_directory("llama_gqa", tmp_path / "moved")
    text = (moved / "config.json").read_text()
    (moved / "config.json").write_text(text.replace("10000.0", "20000.0"))
    prints = [fingerprint(path) for path in (plain, sharded, rounded, moved)]
    assert prints[0] == prints[1]  # the same model, cut elsewhere
    assert len(set(prints[1:])) == 3


def test_text_and_engine_are_loaded_apart(tmp_path: Path) -> None:
    directory = write_hf_directory("llama_plain", tmp_path / "model")
    tokenizer, template, _ = load_text_alone(config(directory))
    assert template is not None
    computing = load_engine_alone(config(directory))
    computing.close()
    assert computing.info.vocab_size == tokenizer.vocab_size  # the padding has no ids
    _, other, _ = load_text_alone(config(directory, chat_template="{{ messages[0].content }}!"))
    assert other is not None
    assert other.render([{"role": "user", "content": "hi"}]) == "hi!"


def test_a_tokenizer_of_another_place(tmp_path: Path) -> None:
    directory = write_hf_directory("llama_plain", tmp_path / "model")
    alone = tmp_path / "tokenizer"
    alone.mkdir()
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (directory / file).rename(alone / file)
    (directory / "config.json").write_bytes((alone / "config.json").read_bytes())
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json.*--tokenizer"):
        load_text_alone(config(directory))
    tokenizer, _, _ = load_text_alone(config(directory, tokenizer=str(alone)))
    assert tokenizer.encode("ABC").tolist() == [65, 66, 67]


def test_tokens_without_rows_are_refused(tmp_path: Path) -> None:
    directory = write_hf_directory("llama_gqa", tmp_path / "model")
    file = directory / "tokenizer.json"
    file.write_text(file.read_text().replace('"id": 271', '"id": 272'))
    with pytest.raises(GraphError, match=r"tokenizer\.json has 273 tokens.* only 272 rows"):
        load_engine_alone(config(directory))


def test_plain_weights_are_not_taken_for_a_gguf_file(tmp_path: Path) -> None:
    directory = write_hf_directory("llama_gqa", tmp_path / "model")
    with pytest.raises(ValueError, match=r"model has plain weights, .* int8, fp8, .* can be made"):
        load_engine_alone(config(directory, quantization="gguf"))


def test_a_directory_is_a_model_if_it_has_a_configuration(tmp_path: Path) -> None:
    directory = write_hf_directory("llama_gqa", tmp_path / "model")
    assert resolve(str(directory)) == directory
    (directory / "config.json").unlink()
    with pytest.raises(ModelSourceError, match=r"directory with a config\.json"):
        resolve(str(directory))
