"""Plain weights asked for as AWQ: an error that says what can be had instead."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli.commands import invar, serving
from golden.hf_form import write_hf_directory

from invar.engine.quantization_names import MADE_AT_LOAD

FLAGS = ("--gpu-memory-utilization", "0.9", "--max-num-seqs", "256", "--port", "0")


@pytest.mark.parametrize("wanted", ["awq", "gptq_marlin"])
def test_plain_weights_are_no_awq(wanted: str, tmp_path: Path) -> None:
    write_hf_directory("llama_gqa", tmp_path / "plain")
    words = ("--quantization", wanted, "--kv-store", "off", "--response-store", "off")
    result = invar("serve", str(tmp_path / "plain"), *words, *FLAGS)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    line = result.stderr.splitlines()[-1]
    assert f"plain has plain weights, and {wanted} has to be calibrated with data" in line
    assert "use a checkpoint that was made with it" in line
    assert ", ".join(MADE_AT_LOAD) in line


def test_what_it_names_can_be_had(tmp_path: Path) -> None:
    write_hf_directory("llama_gqa", tmp_path / "plain")
    words = ("--quantization", "q8_0", "--max-num-seqs", "2")
    with serving(str(tmp_path / "plain"), *words) as server:
        assert "of plain are quantised to Q8_0 as they are loaded" in server.printed()
