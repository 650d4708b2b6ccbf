"""Two prompts through `LLM`: two results, in order."""

from __future__ import annotations

import subprocess
import sys

from cli.commands import environment

SCRIPT = """
from invar import LLM, SamplingParams

prompts = ["The capital of France is", "One, two, three,"]
sampling_params = SamplingParams(temperature=0.7, top_p=0.95, max_tokens=512)
llm = LLM(model="smollm2")
outputs = llm.generate(prompts, sampling_params)
for output in outputs:
    print(repr(output.prompt), "->", repr(output.outputs[0].text))
"""


def test_two_results_in_order() -> None:
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    first, second = result.stdout.splitlines()
    assert first.startswith("'The capital of France is' -> '") or '-> "' in first
    assert second.startswith("'One, two, three,' -> ")
    assert len(first) > 60
