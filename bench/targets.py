"""The whole table of limits and peers, part after part, as bench/README.md holds it.

    python bench/targets.py --models FOLDER [--runs 5] [--parts smollm2,1b,…] [--list]

FOLDER has bench-1b-TYPE.gguf for Q4_K_M, Q4_0, Q8_0 and BF16 (those that lack are made: 5 GB).
Every part is a command that can be run alone; `--list` prints them with their times, in minutes on
an idle machine of two cores at the full number of runs. Peers run in turn with Invar inside a part.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
TYPES = ("Q4_K_M", "Q4_0", "Q8_0", "BF16")


@dataclass(frozen=True)
class Part:
    """Lines of the table that one command measures."""

    name: str
    lines: str
    command: tuple[str, ...]  # after the interpreter
    minutes: float
    runs: int  # what --runs 5 means here


def compare(model: str, batches: str, *more: str) -> tuple[str, ...]:
    return (str(HERE / "compare.py"), model, "--batches", batches, *more)


def bench(*words: str) -> tuple[str, ...]:
    return ("-m", "invar.cli.main", "bench", *words)


def parts(models: dict[str, str], smollm2: str, gemma3: str) -> list[Part]:
    q4_k_m = models["Q4_K_M"]
    llama_cpp, openvino = ("--peers", "llama.cpp"), ("--peers", "openvino-genai")
    return [
        Part("kernels", "kernels alone", bench("kernels", "--rows", "4,64"), 1.5, 5),
        Part("smollm2", "SmolLM2: prefill, decode", compare(smollm2, "1,32"), 4, 5),
        Part("1b", "1B Q4_K_M: prefill, decode", compare(q4_k_m, "1,8"), 4.5, 5),
        Part("1b-32", "1B Q4_K_M: 32 streams", compare(q4_k_m, "32", *openvino), 2.5, 2),
        *(
            Part(f"1b-{kind}", f"1B {kind}", compare(models[kind], "1", *llama_cpp), minutes, 5)
            for kind, minutes in (("Q4_0", 1.2), ("Q8_0", 1.5), ("BF16", 2))
        ),
        Part("gemma3", "Gemma 3 beside llama.cpp", compare(gemma3, "1", *llama_cpp), 1.2, 5),
        Part(
            "context",
            "1B Q4_K_M, 8,192 tokens",
            bench("engine", q4_k_m, "--batches", "1", "--context", "8192"),
            2.7,
            2,
        ),
        Part("overhead", "step overhead", bench("engine", smollm2, "--batches", "64"), 1.2, 5),
        Part("step", "32 streams, phase by phase", (str(HERE / "step.py"), smollm2), 0.7, 5),
        Part("startup", "start", (str(HERE / "startup.py"), smollm2, q4_k_m), 0.4, 7),
        Part("cores", "two engines; one core, two", (str(HERE / "cores.py"), smollm2), 1.5, 5),
    ]


def made(folder: Path, kind: str) -> str:
    """The path of the 1B of that type, which is written if it is not there."""
    path = folder / f"bench-1b-{kind}.gguf"
    if not path.exists():
        command = [sys.executable, str(HERE / "synthetic.py"), "1b", kind, str(path)]
        subprocess.run(command, check=True)
    return str(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=Path, required=True, help="folder of the 1B models")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--parts", help="these alone, by name")
    parser.add_argument("--list", action="store_true", help="the commands, and no more")
    arguments = parser.parse_args()
    from invar.weights.sources import resolve

    models = {
        kind: str(arguments.models / f"bench-1b-{kind}.gguf")
        if arguments.list
        else made(arguments.models, kind)
        for kind in TYPES
    }
    found = parts(models, str(resolve("smollm2")), str(resolve("gemma3-270m")))
    names = [part.name for part in found]
    wanted = arguments.parts.split(",") if arguments.parts else names
    for unknown in sorted(set(wanted) - set(names)):
        parser.error(f"--parts: {unknown} is none of {', '.join(names)}")
    for part in found:
        if part.name not in wanted:
            continue
        runs = max(1, round(part.runs * arguments.runs / 5))
        command = [sys.executable, *part.command, "--runs", str(runs)]
        minutes = part.minutes * runs / part.runs
        print(f"\n## {part.name}: {part.lines} (about {minutes:.1f} minutes)\n", flush=True)
        print(f"    {shlex.join(['python', *command[1:]])}\n", flush=True)
        if arguments.list:
            continue
        began = time.perf_counter()
        subprocess.run(command, check=False)  # a peer that fails costs its part alone
        print(f"\n{(time.perf_counter() - began) / 60:.1f} minutes", flush=True)


if __name__ == "__main__":
    main()
