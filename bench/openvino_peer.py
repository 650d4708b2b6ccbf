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
    """A process that has the model loaded and measures when asked."""

    def __init__(self, model: Path, threads: int, batches: list[int]) -> None:
        command = [build(), __file__, str(model), "--threads", str(threads), "--serve"]
        command += ["--batches", ",".join(map(str, batches))]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.run()  # the first figures are those of cold caches

    def run(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
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

    def __init__(self, model: str, threads: int, batches: list[int]) -> None:
        import openvino_genai

        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 2  # GiB
        scheduler.max_num_batched_tokens = CHUNK
        scheduler.max_num_seqs = max(batches)
        options = {"INFERENCE_NUM_THREADS": threads}
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", options)
        self.batches = batches

    def add(self, number: int, prompt: int, output: int) -> Any:
        import numpy as np
        import openvino
        import openvino_genai

        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = output, True, False
        ids = np.random.randint(5, 250, (1, prompt))  # plain bytes of any vocabulary
        return self.pipeline.add_request(number, openvino.Tensor(ids), config)

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
    parser.add_argument("--serve", action="store_true", help="inside the venv: figures per line")
    arguments = parser.parse_args()
    batches = [int(batch) for batch in arguments.batches.split(",")]
    if not arguments.serve:
        peer = Peer(Path(arguments.model), arguments.threads, batches)
        print(json.dumps(peer.run()))
        peer.close()
        return
    pipeline = Pipeline(arguments.model, arguments.threads, batches)
    for _ in sys.stdin:
        print(json.dumps(pipeline.figures()), flush=True)


if __name__ == "__main__":
    main()
