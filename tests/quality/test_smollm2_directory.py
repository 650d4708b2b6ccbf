"""Real weights in safetensors: SmolLM2 answers from a directory in bf16 as from its GGUF file, and
the same questions from AWQ, GPTQ, FP8 and int8."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from invar import LLM, SamplingParams
from invar.weights.sources import resolve
from quality.convert import convert
from quality.smollm2_directory import write_smollm2_directory

TEXTS = (
    "The capital of France is",
    "def fib(n):\n    return n if n < 2 else fib(n-1)  # 12345",
    "<|im_start|>user\nnaïve 日本語 👩‍🚀<|im_end|>\n",
)
PERPLEXITY_TOLERANCE = 0.01
"""Of some 400 tokens; measured: 0.2 %, the same on every machine (law 1)."""
GREEDY = SamplingParams(temperature=0, max_tokens=8)


OPTIONS = {"max_num_seqs": 4, "max_model_len": 512}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_smollm2_directory(tmp_path_factory.mktemp("smollm2") / "model")


@pytest.fixture(scope="module")
def models(directory: Path) -> Iterator[dict[str, LLM]]:
    with (
        LLM(model="smollm2", **OPTIONS) as gguf,
        LLM(model=str(directory), **OPTIONS) as safetensors,
    ):
        yield {"gguf": gguf, "safetensors": safetensors}


@pytest.mark.parametrize("text", TEXTS)
def test_the_tokenizers_are_one(models: dict[str, LLM], text: str) -> None:
    gguf, safetensors = (models[form].get_tokenizer() for form in ("gguf", "safetensors"))
    assert gguf.encode(text).tolist() == safetensors.encode(text).tolist()
    assert gguf.stop_token_ids == safetensors.stop_token_ids


@pytest.mark.parametrize("form", ["gguf", "safetensors"])
def test_questions_are_answered_sensibly(models: dict[str, LLM], form: str) -> None:
    llm = models[form]
    assert llm.generate(TEXTS[0], GREEDY)[0].outputs[0].text.startswith(" Paris.")
    answers_sensibly(llm)


@pytest.mark.parametrize(
    ("form", "sums"),
    [("awq 32", False), ("gptq 4 32 act", True), ("fp8 rows", True), ("int8", True)],
)
def test_questions_are_answered_sensibly_by_quantised_checkpoints(
    form: str, sums: bool, directory: Path, tmp_path: Path
) -> None:
    """Four bits without calibration, as these are made, may lose a sum and keep a fact."""
    (folder,) = convert(resolve("smollm2"), tmp_path, [form])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(directory / name, folder / name)
    with LLM(model=str(folder), **OPTIONS) as llm:
        knows_paris(llm)
        if sums:
            answers_sensibly(llm)


def knows_paris(llm: LLM) -> None:
    assert llm.generate(TEXTS[0], GREEDY)[0].outputs[0].text.startswith(" Paris")


def answers_sensibly(llm: LLM) -> None:
    knows_paris(llm)
    question = [{"role": "user", "content": "What is 2+2?"}]
    longer = SamplingParams(temperature=0, max_tokens=24)
    assert "4" in llm.chat(question, longer)[0].outputs[0].text


def perplexity(llm: LLM, text: str) -> float:
    (output,) = llm.generate(text, SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert output.prompt_logprobs is not None
    found = [next(iter(entry.values())).logprob for entry in output.prompt_logprobs if entry]
    assert len(found) > 300
    return math.exp(-sum(found) / len(found))


def test_a_page_is_as_probable_from_both(models: dict[str, LLM]) -> None:
    """The same weights but for a rounding to bf16, and s8 against bf16 activations."""
    text = (Path(__file__).parents[2] / "LICENSE").read_text()[:1900]
    gguf, safetensors = (perplexity(models[form], text) for form in ("gguf", "safetensors"))
    assert safetensors == pytest.approx(gguf, rel=PERPLEXITY_TOLERANCE)
