"""The model's own sampling defaults in `invar run` and `invar serve`, as they are typed."""

from __future__ import annotations

import json

import httpx
import pytest
from golden.hf_form import write_hf_directory

from invar.cli import run
from invar.cli.rewrite import rewrite
from invar.engine.sampling_defaults import SamplingDefaults
from invar.engine.sampling_params import SamplingParams

from .commands import invar, serving


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = write_hf_directory("llama_gqa", tmp_path_factory.mktemp("own") / "model")
    own = {"temperature": 0.0, "max_new_tokens": 5}
    (folder / "generation_config.json").write_text(json.dumps(own))
    return str(folder)


def wanted(*words: str, **own: float) -> SamplingParams:
    parser = run.parser()
    args = parser.parse_args(rewrite("run", words, parser.own).argv)
    return run.wanted_params(args, None, SamplingDefaults(own))


def test_what_is_typed_comes_first_then_the_model_then_llama_cpps() -> None:
    usual = SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, max_tokens=None)
    assert wanted() == usual
    found = wanted("--temp", "0.3", temperature=0.6, top_k=20, max_tokens=7)
    assert (found.temperature, found.top_k, found.top_p, found.max_tokens) == (0.3, 20, 0.95, 7)
    assert wanted("-n", "9", max_tokens=7).max_tokens == 9
    assert wanted("-n", "-1", max_tokens=7).max_tokens is None
    assert wanted("--top-k", "0", top_k=20).top_k == 0


def test_run_says_which_are_the_models(model: str) -> None:
    words = ("run", model, "-p", "the winner", "--threads", "1")
    own = invar(*words)
    assert own.returncode == 0, own.stderr
    said = "invar: sampling, where no option says: temperature 0.0, max_tokens 5"
    assert said in own.stderr
    greedy = invar(*words, "--temp", "0", "-n", "5", "--generation-config", "vllm")
    assert own.stdout == greedy.stdout
    assert "where no option says" not in greedy.stderr


def test_serve_says_so_at_start_and_does_so(model: str) -> None:
    override = '{"max_new_tokens": 3, "top_k": 7}'
    with serving(model, "--threads", "1", "--override-generation-config", override) as server:
        line = (
            "Sampling, where a request does not say: temperature 0.0, top_k 7, at most 3 tokens an "
            "answer (generation_config.json and override_generation_config)"
        )
        assert line in server.printed()
        body = {"prompt": [3, 4, 5], "max_tokens": 9, "ignore_eos": True}
        answers = [
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
            for _ in range(2)
        ]
        assert answers[0]["usage"]["completion_tokens"] == 3
        assert answers[0]["choices"] == answers[1]["choices"]


@pytest.mark.parametrize(("words", "message"), [
    (["--override-generation-config", "{"], "--override-generation-config: '{' is no JSON object"),
    (["--override-generation-config", '{"top": 1}'], "'top' is not a default of sampling"),
    (["--sampling-defaults", "mine"], "--sampling-defaults mine: not supported; one of model, ope"),
    (["--generation-config", "/nowhere"], "there is no file /nowhere"),
])  # fmt: skip
def test_what_is_wrong_is_one_line(model: str, words: list[str], message: str) -> None:
    result = invar("run", model, "-p", "x", *words)
    assert result.returncode in (1, 2)
    assert message in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
