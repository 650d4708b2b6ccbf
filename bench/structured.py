"""What grammars cost and what they gain, beside llama.cpp's on the same schema.

    python bench/structured.py MODEL.gguf [--streams 32] [--tokens 48] [--runs 3] [--peer PORT]

Masks: rate and tail over walks through each schema. Decode: tokens per second of all streams,
plain, with the grammar drawn token by token, and with forced tokens in one step. Runs take turns
A B C; figures are medians with their range. --peer PORT: the same of a `llama-server`
(bench/llama_cpp.py build) that runs there with as many slots.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from invar import LLM, SamplingParams, StructuredOutputs
from invar.grammar.guide import Guide

SKILL = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "level": {"enum": ["junior", "senior"]}},
    "required": ["name", "level"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {
    "records": {"type": "array", "items": SKILL, "minItems": 64},
    "tool call": {
        "type": "object",
        "properties": {
            "name": {"const": "get_current_weather_forecast"},
            "arguments": {
                "type": "object",
                "properties": {
                    "unit_of_temperature": {"enum": ["celsius", "fahrenheit"]},
                    "include_hourly_details": {"type": "boolean"},
                    "number_of_days": {"type": "integer", "minimum": 1, "maximum": 9},
                },
                "required": ["unit_of_temperature", "include_hourly_details", "number_of_days"],
                "additionalProperties": False,
            },
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    },
}
PROMPT = "Answer with JSON. The skills of person number {}, in order:"


def form_of(name: str) -> StructuredOutputs:
    return StructuredOutputs(
        json=SCHEMAS[name], disable_any_whitespace=True, complete_at_limit=False
    )


def masks(llm: LLM, name: str, count: int = 2000) -> str:
    """Microseconds of a mask, over answers of a model that finds every token equally likely."""
    grammars, chance = llm.model.door.grammars, np.random.default_rng(1)
    assert grammars is not None
    began = time.perf_counter()
    grammar = grammars.check(form_of(name).normalised())
    compiled = time.perf_counter() - began
    times: list[float] = []
    while len(times) < count:
        guide = Guide(grammar, llm.model.info.vocab_size, max_tokens=100, jumps=False)
        while not (guide.finished or guide.error) and len(times) < count:
            began = time.perf_counter()
            guide.write_mask()
            times.append(time.perf_counter() - began)
            bits = np.unpackbits(guide.mask[:-1].view(np.uint8), bitorder="little")
            guide.take(int(chance.choice(np.flatnonzero(bits))))
            if guide.steered:
                break
    mean, tail = np.mean(times) * 1e6, np.percentile(times, 99) * 1e6
    return (
        f"{1e6 / mean:,.0f} masks/s ({mean:.1f} us, p99 {tail:.0f} us), compiled {compiled:.3f} s"
    )


def rate(llm: LLM, streams: int, tokens: int, form: StructuredOutputs | None, jumps: bool) -> float:
    """Tokens per second of all answers together, prompts computed before."""
    llm.model.engine.guidance._jumps = jumps
    prompts = [PROMPT.format(index) for index in range(streams)]
    params = SamplingParams(
        temperature=0.8,
        seed=1,
        max_tokens=tokens,
        ignore_eos=True,
        structured_outputs=form,
    )
    llm.generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)
    began = time.perf_counter()
    answers = llm.generate(prompts, params, use_tqdm=False)
    took = time.perf_counter() - began
    return sum(len(answer.outputs[0].token_ids) for answer in answers) / took


def peer_rate(port: int, streams: int, tokens: int, schema: Any) -> float:
    def answer(index: int) -> int:
        body: dict[str, Any] = {
            "prompt": PROMPT.format(index),
            "n_predict": tokens,
            "temperature": 0.8,
            "ignore_eos": schema is None,
        }
        if schema is not None:
            body["json_schema"] = schema
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/completion",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as response:
            return int(json.load(response)["tokens_predicted"])

    with ThreadPoolExecutor(streams) as clients:
        list(clients.map(answer, range(streams)))  # prompts
        began = time.perf_counter()
        total = sum(clients.map(answer, range(streams)))
    return total / (time.perf_counter() - began)


def spread(rates: list[float]) -> str:
    return f"{statistics.median(rates):7.1f} ({min(rates):.1f} to {max(rates):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--peer", metavar="PORT", type=int, help="a llama-server that runs there")
    args = parser.parse_args()
    with LLM(str(args.model), max_num_seqs=args.streams, max_model_len=512) as llm:
        for name in SCHEMAS:
            print(f"{name}: {masks(llm, name)}")
        for name in SCHEMAS:
            kinds = {"plain": (None, False), "drawn": (form_of(name), False)}
            kinds["jumping"] = form_of(name), True
            rates: dict[str, list[float]] = {kind: [] for kind in kinds}
            for _ in range(args.runs):
                for kind, (form, jumps) in kinds.items():
                    rates[kind].append(rate(llm, args.streams, args.tokens, form, jumps))
            for kind, figures in rates.items():
                print(f"{name}, {args.streams} streams, {kind:8}: {spread(figures)} tokens/s")
    if args.peer:
        for name, schema in SCHEMAS.items():
            for kind, asked in (("plain", None), ("grammar", schema)):
                figures = [
                    peer_rate(args.peer, args.streams, args.tokens, asked) for _ in range(args.runs)
                ]
                print(f"llama.cpp, {name}, {kind}: {spread(figures)} tokens/s")


if __name__ == "__main__":
    main()
