"""From the shell to the first token: `invar run -p Hi -n 1`, the page cache warm.

python bench/startup.py [MODEL …] [--runs 7]

Bytecode is there, as it is where pip has installed the package: the run that does not count writes
it (also where PYTHONDONTWRITEBYTECODE is set).
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time


def measured(model: str, environment: dict[str, str]) -> tuple[float, float]:
    """Of a whole process, from its start to its end: seconds, and those of CPU."""
    command = [sys.executable, "-m", "invar.cli.main", "run", model, "-p", "Hi", "-n", "1"]
    before, began = cpu_seconds(), time.perf_counter()
    subprocess.run(
        command, check=True, capture_output=True, stdin=subprocess.DEVNULL, env=environment
    )
    return time.perf_counter() - began, cpu_seconds() - before


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def spread(times: list[float]) -> str:
    return f"{statistics.median(times):.2f} s ({min(times):.2f} … {max(times):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=["smollm2"])
    parser.add_argument("--runs", type=int, default=7)
    arguments = parser.parse_args()
    environment = dict(os.environ)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    figures: dict[str, list[tuple[float, float]]] = {model: [] for model in arguments.models}
    with tempfile.TemporaryDirectory() as bytecode:
        environment["PYTHONPYCACHEPREFIX"] = bytecode
        for model in arguments.models:
            measured(model, environment)
        for _ in range(arguments.runs):
            for model in arguments.models:
                figures[model].append(measured(model, environment))
    for model, of_model in figures.items():
        elapsed, cpu = (list(times) for times in zip(*of_model, strict=True))
        print(f"{model}: {spread(elapsed)}; of CPU {spread(cpu)}")


if __name__ == "__main__":
    main()
