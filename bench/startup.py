"""From the shell to the first token: `invar run -p Hi -n 1`, the page cache warm.

python bench/startup.py [MODEL …] [--runs 7]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time


def seconds(model: str) -> float:
    """A whole process, from its start to its end."""
    command = [sys.executable, "-m", "invar.cli.main", "run", model, "-p", "Hi", "-n", "1"]
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=["smollm2"])
    parser.add_argument("--runs", type=int, default=7)
    arguments = parser.parse_args()
    for model in arguments.models:
        seconds(model)
    figures: dict[str, list[float]] = {model: [] for model in arguments.models}
    for _ in range(arguments.runs):
        for model in arguments.models:
            figures[model].append(seconds(model))
    for model, times in figures.items():
        print(f"{model}: {statistics.median(times):.2f} s ({min(times):.2f} … {max(times):.2f})")


if __name__ == "__main__":
    main()
