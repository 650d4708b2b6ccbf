"""A prompt as long as a context: what its prefill and decode take, whole or by samples.

    python bench/long_context.py MODEL [--length 131072] [--samples 5] [--whole] [--decode 32]
                                 [--kv-cache-dtype bf16]

With --whole the prompt is read from its first token to its last. Without, SAMPLES steps of it are:
a step's time is that of its products, which every step has alike, and of its attention, which
grows with the tokens before it, so that the times of steps at positions far apart give that of all
others between them. K and V of the tokens that are skipped are copies of the first step's, since
their time does not depend on what they say. One request, random ids, greedy.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from invar.backends.runner import PAGE_TOKENS
from invar.config import EngineConfig
from invar.engine.engine import Engine
from invar.engine.loader import LoadedModel, load_engine
from invar.engine.request import EngineRequest, Sampling
from invar.engine.state import RequestState


@dataclass(frozen=True)
class Step:
    """Rows ``[start, end)`` of the prompt, by the clock and by all threads' processor time."""

    start: int
    end: int
    seconds: float
    cpu_seconds: float


def open_model(args: argparse.Namespace) -> LoadedModel:
    config = EngineConfig(
        model=args.model,
        max_model_len=args.length,
        max_num_seqs=1,
        gpu_memory_utilization=0.9,
        enable_prefix_caching=False,
        kv_cache_dtype=args.kv_cache_dtype,
    )
    return load_engine(config)


def timed_step(engine: Engine, state: RequestState) -> Step:
    start, began, cpu = state.num_computed_tokens, time.perf_counter(), time.process_time()
    engine.step()
    seconds = time.perf_counter() - began
    return Step(start, state.num_computed_tokens, seconds, time.process_time() - cpu)


def skip_to(engine: Engine, state: RequestState, position: int) -> None:
    """Takes a request, of which whole pages are computed, to a page further on: copies of those
    stand in the place of what lies between."""
    assert state.slot is not None
    done, end = state.num_computed_tokens // PAGE_TOKENS, position // PAGE_TOKENS
    for group, table in enumerate(engine.memory.tables):
        row = table[state.slot]
        at = done
        while at < end:
            count = min(at, end - at)
            engine.runner.copy_pages(group, row[:count], row[at : at + count])
            at += count
    engine.scheduler.advance(state, position)


def sampled_positions(length: int, rows: int, samples: int) -> list[int]:
    """Starts of steps of `rows` rows, evenly over the prompt; the last one ends it."""
    wanted = np.linspace(0, length - rows, samples)
    return sorted({int(at) // rows * rows for at in wanted})


def measure(model: LoadedModel, args: argparse.Namespace) -> dict[str, Any]:
    engine, info = model.engine, model.info
    rows = info.max_tokens_per_step
    prompt_tokens = (engine.max_model_len - args.decode) // rows * rows
    ids = np.random.default_rng(0).integers(0, info.vocab_size, prompt_tokens).astype(np.int32)
    request = EngineRequest("long", ids, args.decode, Sampling(seed=0, temperature=0))
    engine.add_request(request)
    state = engine.states["long"]
    steps = []
    if args.whole:
        while state.num_computed_tokens < prompt_tokens:
            steps.append(timed_step(engine, state))
    else:
        for position in sampled_positions(prompt_tokens, rows, args.samples):
            if position:
                skip_to(engine, state, position)
            steps.append(timed_step(engine, state))
    started, count = time.perf_counter(), 0
    while engine.has_unfinished:
        engine.step()
        count += 1
    decode_s = time.perf_counter() - started
    return {
        "prompt_tokens": prompt_tokens,
        "whole": args.whole,
        "prefill_s": round(of_all(steps, prompt_tokens, [one.seconds for one in steps]), 1),
        "prefill_cpu_s": round(of_all(steps, prompt_tokens, [one.cpu_seconds for one in steps]), 1),
        "steps": [(one.start, round(one.seconds, 2)) for one in steps[:: -(-len(steps) // 16)]],
        "decode_tokens_per_s": round(count / decode_s, 2),
        "memory_bytes": dict(model.memory_table),
        "peak_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def of_all(steps: list[Step], prompt_tokens: int, taken: list[float]) -> float:
    """The sum over all steps of the prompt; those that were not run, by the ones on both sides."""
    starts = np.arange(0, prompt_tokens, steps[0].end - steps[0].start)
    return float(np.interp(starts, [one.start for one in steps], taken).sum())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--length", type=int, default=131072)
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--decode", type=int, default=32)
    parser.add_argument("--kv-cache-dtype", default="bf16")
    args = parser.parse_args()
    model = open_model(args)
    try:
        print(json.dumps(measure(model, args), indent=1))
    finally:
        model.close()


if __name__ == "__main__":
    main()
