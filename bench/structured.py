"""What grammars cost and what they gain, beside llama.cpp's on the same schema.

    python bench/structured.py MODEL.gguf [--streams 32] [--tokens 48] [--runs 5]
        [--peers llama.cpp openvino-genai]

Masks: rate and tail over walks through each schema; what they cost, by steps of two engines in
turn. Decode: tokens per second of all streams, greedy, plain, with the grammar drawn token by
token, and with forced tokens in one step; of peers plain and with their grammar. Runs take turns
A B C; figures are medians with their range, and what a grammar costs or gains is the median, run by
run, of its rate over the plain one of that run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import openvino_peer

from invar import LLM, SamplingParams, StructuredOutputs
from invar.engine.request import EngineOutput
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
        temperature=0, max_tokens=tokens, ignore_eos=True, structured_outputs=form
    )
    llm.generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)
    began = time.perf_counter()
    answers = llm.generate(prompts, params, use_tqdm=False)
    took = time.perf_counter() - began
    return sum(len(answer.outputs[0].token_ids) for answer in answers) / took


def step_cost(plain: LLM, guided: LLM, streams: int, tokens: int, form: StructuredOutputs) -> str:
    """Two engines take turns step by step, so that both see the same machine: how long a step of
    all streams takes without the grammar, of one with it, and how many of these drew less than a
    token for each stream."""
    turns = threading.Semaphore(1), threading.Semaphore(0)
    steps: tuple[list[tuple[int, float]], ...] = ([], [])

    def answer(mine: int, llm: LLM, form: StructuredOutputs | None) -> None:
        engine = llm.model.engine
        engine.guidance._jumps, step = False, engine.step

        def in_turn() -> list[EngineOutput]:
            turns[mine].acquire()
            began = time.perf_counter()
            outputs = step()
            took = time.perf_counter() - began
            steps[mine].append((sum(len(output.token_ids) for output in outputs), took))
            turns[1 - mine].release()
            return outputs

        engine.step = in_turn  # type: ignore[method-assign]
        params = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, structured_outputs=form
        )
        try:
            llm.generate([PROMPT.format(index) for index in range(streams)], params, use_tqdm=False)
        finally:
            engine.step = step  # type: ignore[method-assign]
            turns[1 - mine].release(1_000_000)  # who is not done goes on alone

    other = threading.Thread(target=answer, args=(0, plain, None))
    other.start()
    answer(1, guided, form)
    other.join()
    full: list[list[float]] = [[took for count, took in of if count == streams] for of in steps]
    ratios = [bare / shaped for bare, shaped in zip(*full, strict=False)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    begun = next(at for at, (count, _) in enumerate(steps[1]) if count == streams)
    short = sum(0 < count < streams for count, _ in steps[1][begun:])
    return (
        f"{len(ratios)} steps in turn: {middle:.3f} of plain (quartiles {low:.3f} … {high:.3f}), "
        f"{short} drew less than {streams} tokens"
    )


Peer = llama_cpp.Server | openvino_peer.Peer


def peer_rate(peer: Peer, prompts: list[list[int]], tokens: int, schema: Any) -> float:
    peer.ask(prompts, 1)
    began = time.perf_counter()
    said = peer.ask(prompts, tokens, schema)
    return sum(len(ids) for ids, _ in said) / (time.perf_counter() - began)


def started(names: list[str], model: Path, threads: int, streams: int) -> dict[str, Peer]:
    peers: dict[str, Peer] = {}
    if "llama.cpp" in names:
        peers["llama.cpp"] = llama_cpp.Server(model, threads, streams, 512, caching=True)
    if "openvino-genai" in names:
        peers["openvino-genai"] = openvino_peer.Peer(model, threads, [streams], caching=True)
    return peers


def spread(rates: list[float], digits: int = 1) -> str:
    low, high = min(rates), max(rates)
    return f"{statistics.median(rates):,.{digits}f} ({low:,.{digits}f} … {high:,.{digits}f})"


def in_turn(kinds: dict[str, Callable[[], float]], runs: int) -> dict[str, list[float]]:
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(runs):
        for kind, measured in kinds.items():
            rates[kind].append(measured())
    return rates


def table(name: str, rates: dict[str, list[float]]) -> str:
    """`kinds` are named ENGINE, KIND; each is held against its engine's plain one."""
    text = f"| {name} | tokens/s | of plain |\n|---|---|---|\n"
    for kind, figures in rates.items():
        plain = rates[f"{kind.split(',')[0]}, plain"]
        ratios = [ours / bare for ours, bare in zip(figures, plain, strict=True)]
        text += f"| {kind} | {spread(figures)} | {spread(ratios, 2)} |\n"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--peers", nargs="*", choices=["llama.cpp", "openvino-genai"], default=[])
    args = parser.parse_args()
    count, tokens = args.streams, args.tokens
    peers = started(args.peers, args.model, args.threads, count)
    sizes = {"max_num_seqs": count, "max_model_len": 512}
    with LLM(str(args.model), **sizes) as llm, LLM(str(args.model), **sizes) as plain:
        tokenizer = llm.get_tokenizer()
        prompts = [tokenizer.encode(PROMPT.format(index)).tolist() for index in range(count)]
        for name, schema in SCHEMAS.items():
            form = form_of(name)
            kinds: dict[str, Callable[[], float]] = {
                "Invar, plain": lambda: rate(llm, count, tokens, None, False),
                "Invar, drawn": lambda form=form: rate(llm, count, tokens, form, False),
                "Invar, jumping": lambda form=form: rate(llm, count, tokens, form, True),
            }
            for engine, peer in peers.items():
                for kind, asked in (("plain", None), ("grammar", schema)):
                    kinds[f"{engine}, {kind}"] = lambda peer=peer, asked=asked: peer_rate(
                        peer, prompts, tokens, asked
                    )
            print(f"{name}: {masks(llm, name)}")
            print(step_cost(plain, llm, count, 4 * tokens, form), "\n", flush=True)
            print(table(f"{name}, {count} streams", in_turn(kinds, args.runs)), flush=True)
    for peer in peers.values():
        peer.close()


if __name__ == "__main__":
    main()
