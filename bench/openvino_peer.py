"""OpenVINO GenAI as a peer: continuous batching over the same GGUF file, in a venv of its own.

python bench/openvino_peer.py MODEL.gguf        # one line of JSON, as bench/llama_cpp.py

It reads llama and qwen files of F16, Q4_0, Q4_1, Q4_K_M or Q8_0, told by `general.file_type`; BF16
ends with "Unsupported quantization type". Reading takes 5 to 20 s, so a `Peer` stays loaded and is
asked for its figures when it is its turn; its threads sleep meanwhile. Left at its defaults (8-bit
KV, activations quantised by groups of 32) but for the threads: others were slower on AVX2.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp

VERSION = "2026.4.1"
CHUNK = 512  # tokens a step, as Invar's default


def build() -> Path:
    """The Python of a venv with OpenVINO GenAI."""
    folder = llama_cpp.cache_folder().parent / f"openvino-genai-{VERSION}"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        packages = [f"openvino=={VERSION}"]
        packages += [f"{name}=={VERSION}.0" for name in ("openvino-genai", "openvino-tokenizers")]
        subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True)
        (folder / "complete").touch()
    return python


class Peer:
    """A process that has the model loaded and measures, or answers, when asked."""

    name = f"OpenVINO GenAI {VERSION}"

    def __init__(
        self, model: Path, threads: int, batches: list[int], *, caching: bool = False
    ) -> None:
        command = [build(), __file__, str(model), "--threads", str(threads), "--serve"]
        command += ["--batches", ",".join(map(str, batches))]
        self.process = subprocess.Popen(
            [*command, *["--prefix-caching"] * caching],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self) -> dict[str, Any]:
        """The first figures are those of cold caches."""
        return self._told({})

    def ask(
        self, prompts: Sequence[list[int]], output: int, schema: Any = None
    ) -> list[tuple[list[int], float]]:
        """All prompts at once: of each its answer and its time to first token in seconds."""
        request = {"prompts": prompts, "output": output, "schema": schema}
        return [tuple(one) for one in self._told(request)["said"]]

    def _told(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise RuntimeError("OpenVINO GenAI ended; what it said stands above")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


class Pipeline:
    """Inside the venv."""

    def __init__(self, model: str, threads: int, batches: list[int], caching: bool) -> None:
        import openvino_genai

        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = caching
        scheduler.cache_size = 2  # GiB
        scheduler.max_num_batched_tokens = CHUNK
        scheduler.max_num_seqs = max(batches)
        options = {"INFERENCE_NUM_THREADS": threads}
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", options)
        self.batches = batches

    def add(self, number: int, prompt: int, output: int) -> Any:
        import numpy as np

        ids = np.random.randint(5, 250, prompt)  # plain bytes of any vocabulary
        return self.add_ids(number, ids, output)

    def add_ids(self, number: int, ids: Any, output: int, schema: Any = None) -> Any:
        import numpy as np
        import openvino
        import openvino_genai

        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = output, schema is None, False
        if schema is not None:
            structure = openvino_genai.StructuredOutputConfig(json_schema=json.dumps(schema))
            config.structured_output_config = structure
        tensor = openvino.Tensor(np.array([ids], np.int64))
        return self.pipeline.add_request(number, tensor, config)

    def answers(self, prompts: list[list[int]], output: int, schema: Any) -> dict[str, Any]:
        """Of each prompt [ids, seconds to the first]."""
        began = time.perf_counter()
        handles = [self.add_ids(n, ids, output, schema) for n, ids in enumerate(prompts)]
        said: list[list[int]] = [[] for _ in prompts]
        first = [0.0] * len(prompts)
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
            for n, handle in enumerate(handles):
                if handle.can_read():
                    first[n] = first[n] or time.perf_counter() - began
                    said[n] += handle.read()[0].generated_ids
        return {"said": list(zip(said, first, strict=True))}

    def prefill(self, tokens: int) -> float:
        handle = self.add(0, tokens, 1)  # a request whose handle is gone is dropped
        started = time.perf_counter()
        self.finish()
        elapsed = time.perf_counter() - started
        assert handle.can_read(), "the prompt was not run"
        return tokens / elapsed

    def decode(self, streams: int, prompt: int, output: int) -> float:
        """Tokens per second of all streams, from when the last one has its first token."""
        slack = streams * prompt // max(1, CHUNK - streams) + 2
        handles = [self.add(n, prompt, output + slack) for n in range(streams)]
        waiting = set(range(streams))
        while waiting:
            waiting -= {n for n, count in enumerate(self.step(handles)) if count}
        started = time.perf_counter()
        delivered = sum(sum(self.step(handles)) for _ in range(output - 1))
        elapsed = time.perf_counter() - started
        assert delivered == streams * (output - 1), "a stream ended while it was measured"
        for handle in handles:
            handle.stop()
        self.finish()
        return delivered / elapsed

    def step(self, handles: list[Any]) -> list[int]:
        """New tokens of each stream."""
        self.pipeline.step()
        return [
            len(handle.read()[0].generated_ids) if handle.can_read() else 0 for handle in handles
        ]

    def finish(self) -> None:
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()

    def figures(self) -> dict[str, Any]:
        return {
            "engine": f"OpenVINO GenAI {VERSION}",
            "prefill_tokens_per_s": self.prefill(512),
            "decode_tokens_per_s": {str(n): self.decode(n, 128, 64) for n in self.batches},
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--serve", action="store_true", help="inside the venv: answers per line")
    parser.add_argument("--prefix-caching", action="store_true")
    arguments = parser.parse_args()
    batches = [int(batch) for batch in arguments.batches.split(",")]
    if not arguments.serve:
        peer = Peer(Path(arguments.model), arguments.threads, batches)
        peer.run()
        print(json.dumps(peer.run()))
        peer.close()
        return
    pipeline = Pipeline(arguments.model, arguments.threads, batches, arguments.prefix_caching)
    for line in sys.stdin:
        request = json.loads(line)
        told = pipeline.answers(**request) if request else pipeline.figures()
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
