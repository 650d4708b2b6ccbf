"""What a long prompt costs those who decode: gaps between their tokens, without it and beside it.

    python bench/long_prompt.py [--model gemma3-270m] [--streams 16] [--prompt 16000] [--unpaced]

STREAMS requests decode; after a while one with a prompt of PROMPT tokens comes. Reported: the 50th
and 99th percentile of the gaps between the tokens of the others before it came, and while its
prompt was read; its time to first token, beside that of the same prompt when nobody else is there.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np

from invar.config import EngineConfig
from invar.engine.engine import Engine
from invar.engine.loader import load_engine
from invar.engine.request import EngineRequest, Sampling

STREAM_PROMPT = 64
BEFORE_STEPS = 100  # whose gaps are those without the prompt


def request(
    name: str, dice: np.random.Generator, vocab: int, prompt: int, tokens: int
) -> EngineRequest:
    ids = dice.integers(0, vocab, prompt).astype(np.int32)
    return EngineRequest(name, ids, tokens, Sampling(seed=0, temperature=0))


def time_to_first(engine: Engine, one: EngineRequest) -> float:
    start = time.perf_counter()
    engine.add_request(one)
    while not any(output.request_id == one.id for output in engine.step()):
        pass
    return time.perf_counter() - start


def gaps_of_steps(engine: Engine, steps: int | None, until: str | None) -> list[float]:
    """Seconds between steps: every stream gets a token in each, so it is their gap."""
    gaps, seen = [], False
    while not seen and (steps is None or len(gaps) < steps):
        start = time.perf_counter()
        outputs = engine.step()
        gaps.append(time.perf_counter() - start)
        seen = any(output.request_id == until for output in outputs)
    return gaps


def measure(model: str, streams: int, prompt: int, paced: bool) -> dict[str, Any]:
    loaded = load_engine(
        EngineConfig(
            model=model, max_model_len=prompt + 64, enable_prefix_caching=False, paces_prompts=paced
        )
    )
    engine, vocab = loaded.engine, loaded.info.vocab_size
    dice = np.random.default_rng(0)
    alone = time_to_first(engine, request("alone", dice, vocab, prompt, 1))
    most = min(prompt, 8000)
    for number in range(streams):
        engine.add_request(request(f"s{number}", dice, vocab, STREAM_PROMPT, most))
    while any(state.num_remaining > 1 for state in engine.scheduler.states()):
        engine.step()
    gaps_of_steps(engine, 20, None)
    before = gaps_of_steps(engine, BEFORE_STEPS, None)
    start = time.perf_counter()
    engine.add_request(request("long", dice, vocab, prompt, 1))
    beside = gaps_of_steps(engine, None, "long")
    first = time.perf_counter() - start
    assert len(engine.scheduler.running) == streams, "a stream ended while it was measured"
    loaded.close()
    ms = {
        f"{name} p{share}": round(1000 * float(np.percentile(gaps, share)), 2)
        for name, gaps in (("before", before), ("beside", beside))
        for share in (50, 99)
    }
    return {
        "model": model,
        "streams": streams,
        "prompt": prompt,
        "gaps_ms": ms,
        "ratio_p99": round(ms["beside p99"] / ms["before p99"], 3),
        "steps_beside": len(beside),
        "first_token_alone_s": round(alone, 2),
        "first_token_beside_s": round(first, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--model", default="gemma3-270m")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=16000)
    parser.add_argument("--unpaced", action="store_true", help="chunks as large as a step holds")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = measure(options.model, options.streams, options.prompt, not options.unpaced)
    if options.json:
        print(json.dumps(result, indent=1))
        return
    print(f"{options.streams} streams and a prompt of {options.prompt} tokens, {options.model}:")
    print("  gaps, ms: " + ", ".join(f"{name} {ms}" for name, ms in result["gaps_ms"].items()))
    print(f"  p99 beside it / before: {result['ratio_p99']} ({result['steps_beside']} steps)")
    print(
        f"  its first token: {result['first_token_beside_s']} s, alone "
        f"{result['first_token_alone_s']} s"
    )


if __name__ == "__main__":
    main()
