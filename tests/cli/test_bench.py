"""`invar bench`: what its reports hold, and that fractions are fractions of something."""

from __future__ import annotations

import json
from typing import Any

import pytest
from golden.tiny_models import model_path

from invar.backends.cpu.work import peak_name
from invar.measure.engine import OUTPUT_TOKENS, Line, fitted, lines_of, output_tokens
from invar.measure.kernels import FORMATS, ROWS
from invar.measure.limits import PEAK_KEYS

from .commands import invar


def report_of(*words: str) -> dict[str, Any]:
    result = invar("bench", *words, "--json")
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == 1
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def assert_spread(spread: dict[str, float], low: float, high: float = float("inf")) -> None:
    assert set(spread) == {"median", "low", "high"}
    assert low <= spread["low"] <= spread["median"] <= spread["high"] <= high


def assert_limits(report: dict[str, Any], *peaks: str) -> None:
    assert set(report["limits"]) == {*peaks, "dram_read_gbs"}
    for spread in report["limits"].values():
        assert_spread(spread, 0.1)


def test_kernels() -> None:
    report = report_of("kernels", "--formats", "q4_0,BF16", "--rows", "1,64", "--runs", "2")
    assert (report["runs"], report["threads"]) == (2, 1)
    assert_limits(report, "int8_peak_gops", "bf16_peak_gflops")
    assert list(report["formats"]) == ["q4_0", "bf16"]
    for found in report["formats"].values():
        assert list(found["rows"]) == ["1", "64"]
        for of_rows in found["rows"].values():
            assert_spread(of_rows["gops"], 0.1)
            # A disturbed machine may halve a limit while the kernel runs undisturbed.
            assert_spread(of_rows["of_peak"], 0.001, 4)
        for rate in ("stream_gbs", "stream_of_dram", "quantize_gbs", "pack_gbs"):
            assert_spread(found[rate], 0.001)
    assert report["formats"]["q4_0"]["limit"] == "int8_peak_gops"
    assert report["formats"]["bf16"]["limit"] == "bf16_peak_gflops"


def test_every_format_has_a_limit() -> None:
    assert {peak_name(name) for name in FORMATS} == PEAK_KEYS.keys()
    assert ROWS == (1, 2, 4, 6, 16, 64, 512)


def test_engine() -> None:
    model = str(model_path("llama_gqa"))
    words = [
        "--runs",
        "2",
        "--batches",
        "1,3",
        "--context",
        "300",
        "--max-num-batched-tokens",
        "64",
    ]
    report = report_of("engine", model, *words)
    assert report["model"] == "llama_gqa.gguf"
    assert_limits(report, *set(PEAK_KEYS.values()) & set(report["limits"]))
    lines = [(line["streams"], line["prompt_tokens"]) for line in report["decode"]]
    assert len(lines) == len(set(lines))
    assert {streams for streams, _ in lines} == {1, 3}
    for line in report["decode"]:
        assert_spread(line["tokens_per_s"], 1)
        assert_spread(line["of_dram"], 0)
        assert_spread(line["step_overhead"], 0, 1)
    for line in report["prefill"]:
        assert_spread(line["tokens_per_s"], 1)
        assert_spread(line["of_peak"], 0, 2)
        assert_spread(line["of_first"], 0)
    assert report["prefill"][0]["of_first"]["median"] == 1
    text = invar("bench", "engine", model, "--runs", "1", "--batches", "1").stdout
    assert "of the DRAM rate, overhead" in text
    assert "DRAM read, GB/s" in text


def test_lines_of_the_engine() -> None:
    assert lines_of([1, 8], None) == [Line(1, 512), Line(1, 128), Line(8, 128)]
    assert lines_of([1], 8192)[-1] == Line(1, 8192)
    line = fitted(Line(1, 8192), 8192, 512)
    assert line.prompt_tokens == 8192 - output_tokens(Line(1, 8192), 512)
    assert fitted(Line(8, 128), 8192, 512) == Line(8, 128)
    with pytest.raises(ValueError, match="leaves no room"):
        fitted(Line(1, 128), OUTPUT_TOKENS, 512)


@pytest.mark.parametrize(("words", "said"), [
    (["smollm2"], "invar bench engine smollm2"),
    (["kernel"], "'kernel' cannot be measured; nearest: kernels"),
    (["engine", "--runs", "0"], "--runs: 0 is less than 1"),
    (["engine", "--batches", "1,x"], "--batches: 'x' is not a whole number"),
    (["engine", "--formats", "q4_0"], "--formats: is for `invar bench kernels`"),
    (["kernels", "--context", "8k"], "--context: is for `invar bench engine`"),
    (["kernels", "smollm2"], "smollm2: is for `invar bench engine`"),
    (["kernels", "--threads", "2"], "--threads: is for `invar bench engine`"),
    (["kernels", "--formats", "q44_0"], "'q44_0' is not a format of weights; nearest: q4_0"),
    (["kernels", "--rows", "0"], "--rows: 0 is less than 1"),
    (["kernels", "--rows", "99999"], "--rows: 99999 is more than 4096"),
    (["kernels", "--row", "4"], "nearest: --rows"),
])  # fmt: skip
def test_errors(words: list[str], said: str) -> None:
    result = invar("bench", *words)
    assert result.returncode == 2
    assert said in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not result.stdout
