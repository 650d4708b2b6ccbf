"""vLLM's engine arguments on `LLM`."""

from __future__ import annotations

from invar import LLM, SamplingParams


def test_engine_arguments_of_vllm() -> None:
    with LLM(
        model="smollm2",
        gpu_memory_utilization=0.9,
        max_num_batched_tokens=8192,
        max_num_seqs=256,
        enable_chunked_prefill=True,
    ) as llm:
        (output,) = llm.generate("Hello", SamplingParams(max_tokens=4, temperature=0))
        assert output.outputs[0].token_ids
