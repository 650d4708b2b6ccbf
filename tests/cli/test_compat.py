"""The peers' spellings: rewritten, noticed or refused, and never dropped."""

from __future__ import annotations

from pathlib import Path

import pytest

from invar.cli import run, serve
from invar.cli.compat import PEERS, Takes
from invar.cli.compat_page import page
from invar.cli.engine_options import engine_config, or_default
from invar.cli.parser import count
from invar.cli.rewrite import CommandLineError, Rewritten, rewrite, rules_of
from invar.config import ABSENT, INERT, EngineConfig

PARSERS = {"run": run.parser(), "serve": serve.parser()}


def typed(command: str, *words: str) -> Rewritten:
    return rewrite(command, words, PARSERS[command].own)


@pytest.mark.parametrize(("command", "words", "argv"), [
    ("serve", ["-c", "8192"], ["--max-model-len=8192"]),
    ("serve", ["--ctx-size", "8192"], ["--max-model-len=8192"]),
    ("serve", ["--context-length=8192"], ["--max-model-len=8192"]),
    ("serve", ["--max_model_len", "8192"], ["--max-model-len=8192"]),
    ("serve", ["--parallel", "4"], ["--max-num-seqs=4"]),
    ("serve", ["--model-path", "m.gguf"], ["--model=m.gguf"]),
    ("serve", ["-m", "m.gguf"], ["--model=m.gguf"]),
    ("serve", ["-hf", "org/m"], ["--model=hf:org/m"]),
    ("serve", ["--mem-fraction-static", "0.8"], ["--gpu-memory-utilization=0.8"]),
    ("serve", ["--tp", "2"], ["--engine-option=tensor_parallel_size=2"]),
    ("serve", ["--kv-offloading-size", "8"], ["--engine-option=swap_space=8"]),
    ("serve", ["--hicache-size", "8"], ["--engine-option=swap_space=8"]),
    ("serve", ["-O3"], ["--engine-option=optimization_level=3"]),
    ("serve", ["--no-enable-dbo"], ["--engine-option=enable_dbo=false"]),
    ("run", ["--color", "./on"], ["--color=on", "./on"]),
    ("run", ["--color", "smollm2"], ["--color=on", "smollm2"]),
    ("serve", ["--quantization", "awq"], ['--engine-option=quantization="awq"']),
    ("serve", ["--enable-prefix-caching"], ["--engine-option=enable_prefix_caching=true"]),
    ("serve", ["--no-enable-prefix-caching"], ["--engine-option=enable_prefix_caching=false"]),
    ("run", ["-p", "-5 is negative"], ["--prompt=-5 is negative"]),
    ("run", ["-p", "--help"], ["--prompt=--help"]),
    ("run", ["-n", "-1", "m.gguf"], ["--max-tokens=-1", "m.gguf"]),
    ("run", ["--temp", "0.7"], ["--temperature=0.7"]),
    ("run", ["-sys", "Be brief"], ["--system=Be brief"]),
    ("run", ["-co"], ["--color=on"]),
    ("run", ["--color", "off"], ["--color=off"]),
    ("run", ["-s", "5"], ["--seed=5"]),
    ("run", ["--predict", "5"], ["--max-tokens=5"]),
    ("run", ["-no-cnv", "-t", "2"], ["--raw", "--threads=2"]),
    ("run", ["-j", "{}"], ["--json-schema={}"]),
    ("run", ["-jf", "s.json"], ["--json-schema-file=s.json"]),
    ("run", ["--", "-m"], ["--", "-m"]),
])  # fmt: skip
def test_spellings_become_ours(command: str, words: list[str], argv: list[str]) -> None:
    rewritten = typed(command, *words)
    assert rewritten.argv == argv
    assert not rewritten.notices
    PARSERS[command].parse_args(rewritten.argv)


@pytest.mark.parametrize(("command", "words"), [
    ("run", ["-ngl", "20"]), ("run", ["-ngl=20"]), ("run", ["--n_gpu_layers", "20"]),
    ("serve", ["-fa"]), ("serve", ["-fa", "on"]), ("serve", ["--flash-attn=auto"]),
    ("serve", ["--enable-hierarchical-cache"]), ("serve", ["--hicache-ratio", "2"]),
    ("run", ["-cb"]), ("serve", ["--mlock"]), ("serve", ["--enable-torch-compile"]),
])  # fmt: skip
def test_one_notice_where_there_is_nothing_to_do(command: str, words: list[str]) -> None:
    rewritten = typed(command, *words, "m.gguf")
    assert rewritten.argv == ["m.gguf"]
    assert len(rewritten.notices) == 1
    assert "\n" not in rewritten.notices[0]


def test_formats_of_k_and_v_are_one_option() -> None:
    words = ["-ctk", "q8_0", "--cache-type-v", "q8_0"]
    rewritten = typed("run", *words)
    assert set(rewritten.argv) == {"--kv-cache-dtype=int8"}
    assert engine_config(PARSERS["run"].parse_args(rewritten.argv)).kv_format == "int8"
    assert typed("serve", "-ctv", "f16").argv == ["--kv-cache-dtype=fp16"]


def test_values_that_ask_for_nothing_are_silent() -> None:
    assert typed("run", "-ngl", "0", "--xtc-probability", "0").notices == []


@pytest.mark.parametrize(("command", "words", "hint"), [
    ("run", ["-cbs", "256"], "nearest: -cb"),
    ("serve", ["--max-model-length", "5"], "nearest: --max-model-len"),
    ("serve", ["--hots", "x"], "nearest: --host"),
    ("run", ["--rope-freq-base", "5"], "rope is what the model file states"),
    ("run", ["--mirostat", "2"], "sampler"),
    ("run", ["--tool-call-parser", "hermes"], "whole texts"),
    ("serve", ["-j", "{}"], "each request asks for it itself"),
    ("serve", ["--parallel"], "a value must follow"),
    ("run", ["-p"], "a value must follow"),
    ("run", ["--raw=yes"], "takes no value"),
    ("run", ["--color", "maybe"], "--color maybe: not one of auto, on, off"),
    ("run", ["-ctk", "q4_0"], "-ctk q4_0: not supported; one of bf16, f16, q8_0"),
    ("run", ["-ctk", "q8_0", "-ctk", "f16"], "-ctk: asks for .*fp16, after .*int8"),
])  # fmt: skip
def test_errors_name_what_is_near(command: str, words: list[str], hint: str) -> None:
    with pytest.raises(CommandLineError, match=hint) as error:
        typed(command, *words)
    assert words[0].partition("=")[0] in str(error.value)


@pytest.mark.parametrize("command", ["run", "serve"])
def test_no_spelling_means_two_things(command: str) -> None:
    seen: dict[str, str] = {}
    for peer, rules in PEERS.items():
        for rule in rules:
            if command not in rule.commands:
                continue
            for spelling in rule.spellings:
                assert spelling not in seen, f"{spelling} in {peer} and {seen[spelling]}"
                seen[spelling] = peer
    # Our own spellings come with a value of their own, but for the switch without one.
    assert seen.keys() & PARSERS[command].own.keys() <= {"--color"}


@pytest.mark.parametrize("command", ["run", "serve"])
def test_every_rule_leads_somewhere(command: str) -> None:
    from dataclasses import fields

    known = {field.name for field in fields(EngineConfig)} | INERT.keys() | ABSENT.keys()
    for spelling, rule in rules_of(command).items():
        outcomes = [rule.option, rule.engine, rule.notice, rule.refusal]
        assert sum(outcome is not None for outcome in outcomes) == 1, spelling
        if rule.option is not None:
            own = PARSERS[command].own[rule.option]
            assert own.takes_value == (rule.takes is not Takes.NOTHING), spelling
        assert rule.engine is None or rule.engine in known, spelling


def test_engine_options_arrive_with_their_type() -> None:
    words = ["-m", "x.gguf", "--swap-space", "4", "--dtype", "bfloat16", "--max-num-seqs", "7"]
    rewritten = typed("serve", *words)
    config = engine_config(PARSERS["serve"].parse_args(rewritten.argv), max_num_seqs=7)
    assert (config.swap_space, config.dtype, config.max_num_seqs) == (4, "bfloat16", 7)
    assert config.model == "x.gguf"


@pytest.mark.parametrize(("text", "number"), [
    ("8192", 8192), ("8k", 8000), ("8K", 8192), ("25.6k", 25600), ("4G", 4 << 30), ("-1", -1),
])  # fmt: skip
def test_counts_as_vllm_reads_them(text: str, number: int) -> None:
    assert count(text) == number


@pytest.mark.parametrize("text", ["", "k", "8x", "1.5"])
def test_counts_that_are_none(text: str) -> None:
    with pytest.raises(CommandLineError, match="--max-model-len"):
        PARSERS["serve"].parse_args([f"--max-model-len={text}"])


@pytest.mark.parametrize("option", [
    "--threads", "--max-model-len", "--max-num-batched-tokens",
])  # fmt: skip
def test_negative_numbers_are_errors_unless_llama_cpp_documents_them(option: str) -> None:
    for mark in ("0", "-1"):
        parsed = PARSERS["serve"].parse_args([f"{option}={mark}"])
        assert engine_config(parsed) == EngineConfig()
    with pytest.raises(ValueError, match=f"{option}: -4 is negative; 0 or -1 leaves it"):
        engine_config(PARSERS["serve"].parse_args([f"{option}=-4"]))


def test_the_longest_answer_has_one_mark_of_its_own() -> None:
    assert or_default("--max-tokens", -1, marks=(-1,)) is None
    with pytest.raises(ValueError, match="-2 is negative"):
        or_default("--max-tokens", -2, marks=(-1,))


@pytest.mark.parametrize(("words", "said"), [
    (["--dtype", "float16"], "--dtype float16 has nothing to do here: number formats"),
    (["--trust-remote-code"], "--trust-remote-code has nothing to do here: no code"),
    (["--no-enable-chunked-prefill"], "--no-enable-chunked-prefill has nothing to do here: long"),
    (["--max-lora-rank", "8"], "--max-lora-rank 8 has nothing to do here: adapters"),
])  # fmt: skip
@pytest.mark.parametrize("command", ["run", "serve"])
def test_notices_of_engine_options_are_as_those_of_other_flags(
    command: str,
    words: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    args = PARSERS[command].parse_args(typed(command, *words).argv)
    args.typed = typed(command, *words).typed
    engine_config(args)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"invar: {said}")
    assert not caplog.records


def test_errors_of_engine_options_name_the_flag() -> None:
    rewritten = typed("serve", "--device", "cuda")
    args = PARSERS["serve"].parse_args(rewritten.argv)
    args.typed = rewritten.typed
    with pytest.raises(
        ValueError, match=r"^--device='cuda' is not supported: .*: cpu; docs/backends.md"
    ):
        engine_config(args)


def test_more_devices_than_there_are_is_refused_with_the_count() -> None:
    rewritten = typed("serve", "m", "--tensor-parallel-size", "2")
    with pytest.raises(ValueError, match="found 1"):
        engine_config(PARSERS["serve"].parse_args(rewritten.argv))


def test_the_page_is_up_to_date() -> None:
    path = Path(__file__).parents[2] / "docs" / "cli_compat.md"
    assert path.read_text(encoding="utf-8") == page(), (
        "run: python -m invar.cli.compat_page > docs/cli_compat.md"
    )
