"""What the prefix cache saves: time to first token with caching on and off, and its own cost.

    python bench/prefix.py [--model smollm2] [--users 8] [--turns 10] [--peers llama.cpp …] [--json]

- chat: USERS users share a system prompt of 1,500 tokens and talk for TURNS turns, all users a turn
  at a time; each turn sends the whole conversation again.
- agent: one ReAct agent of 20 tool turns over the same system prompt: its own call (16 tokens),
  then an observation (100 tokens).
- restart: the chat over engines that keep prefixes on disk; half-way the engine is closed and
  loaded again: with its store, with a store that the system has not in memory, and with none.
- tree: microseconds a request for matching, inserting and evicting at 1,000 cached conversations of
  2,000 tokens, without a model.

The answers with and without caching and restarts are compared: they must be equal. Peers hold the
same conversations, each with its own answers in them, with their own prefix caching off and on.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import llama_cpp
import numpy as np
import openvino_peer

from invar.backends.runner import GroupMemory, RunnerInfo
from invar.config import EngineConfig
from invar.engine.engine import Engine
from invar.engine.kv import KVMemory
from invar.engine.loader import load_engine
from invar.engine.request import EngineRequest, Sampling

SYSTEM_TOKENS = 1500
QUESTION_TOKENS = 40
ANSWER_TOKENS = 16
OBSERVATION_TOKENS = 100
PEERS = ("llama.cpp", "openvino-genai")


Answers = list[tuple[list[int], float]]  # the tokens, and the seconds to the first of them


def answer_of(engine: Engine, prompts: Sequence[list[int]], name: str) -> Answers:
    """Sends the prompts together."""
    start = time.perf_counter()
    first: dict[str, float] = {}
    said: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        one = f"{name}-{index}"
        said[one] = []
        ids = np.array(prompt, np.int32)
        engine.add_request(EngineRequest(one, ids, ANSWER_TOKENS, Sampling(seed=0, temperature=0)))
    while engine.has_unfinished:
        for output in engine.step():
            first.setdefault(output.request_id, time.perf_counter() - start)
            said[output.request_id] += output.token_ids
    return [(said[one], first[one]) for one in said]


def conversation(
    ask: Callable[[int, Sequence[list[int]]], Answers],
    vocab: int,
    users: int,
    turns: int,
    told: int,
) -> tuple[list[float], list[list[int]]]:
    """Median time to first token of each turn, and all answers. ask: takes the number of a turn and
    what each user sends; told: tokens a user adds in a turn"""
    dice = np.random.default_rng(0)
    system = dice.integers(0, vocab, SYSTEM_TOKENS).tolist()
    talks: list[list[int]] = [list(system) for _ in range(users)]
    times, answers = [], []
    for turn in range(turns):
        for talk in talks:
            talk += dice.integers(0, vocab, told).tolist()
        found = ask(turn, talks)
        times.append(statistics.median(seconds for _, seconds in found))
        for talk, (said, _) in zip(talks, found, strict=True):
            talk += said
            answers.append(said)
    return times, answers


def compare(
    model: str, users: int, turns: int, told: int, peers: Sequence[str] = ()
) -> dict[str, Any]:
    """The same conversation with caching off and on, and the same with peers."""
    longest = SYSTEM_TOKENS + turns * (told + ANSWER_TOKENS)
    result: dict[str, Any] = {"users": users, "turns": turns, "times_s": {}}
    answers = []
    for caching in (False, True):
        loaded = load_engine(
            EngineConfig(model=model, max_model_len=longest, enable_prefix_caching=caching)
        )
        engine, vocab, path = loaded.engine, loaded.info.vocab_size, loaded.path
        # The first step of a model touches its weights: not part of either side.
        answer_of(engine, [[1, 2, 3]], "warm")

        def ask(turn: int, talks: Sequence[list[int]]) -> Answers:
            return answer_of(engine, talks, f"t{turn}")  # noqa: B023

        times, said = conversation(ask, vocab, users, turns, told)
        answers.append(said)
        result["times_s"][side("Invar", caching)] = [round(seconds, 4) for seconds in times]
        loaded.close()
    assert answers[0] == answers[1], "answers depend on the cache"
    for name in peers:
        for caching in (False, True):
            peer = peer_of(name, path, users, longest, caching)
            peer.ask([[1, 2, 3]], 1)
            times, _ = conversation(
                lambda turn, talks: peer.ask(talks, ANSWER_TOKENS),  # noqa: B023
                vocab,
                users,
                turns,
                told,
            )
            result["times_s"][side(peer.name, caching)] = [round(seconds, 4) for seconds in times]
            peer.close()
    off, on = (result["times_s"][side("Invar", caching)] for caching in (False, True))
    ratios = [one / other for one, other in zip(on, off, strict=True)]
    result["ratio_first_turn"] = round(ratios[0], 4)
    result["ratio_later_median"] = round(statistics.median(ratios[1:]), 4)
    result["ratio_later_worst"] = round(max(ratios[1:]), 4)
    return result


def peer_of(name: str, model: Path, users: int, context: int, caching: bool) -> Any:
    threads = len(os.sched_getaffinity(0))
    if name == "llama.cpp":
        return llama_cpp.Server(model, threads, users, context + 64, caching=caching)
    return openvino_peer.Peer(model, threads, [users], caching=caching)


def side(engine: str, caching: bool) -> str:
    return f"{engine}, {'on' if caching else 'off'}"


def restart(model: str, users: int, turns: int, told: int) -> dict[str, Any]:
    """Time to first token of the turns before a restart and of the one after it."""
    half = max(2, turns // 2)
    result: dict[str, Any] = {"users": users, "turn": half + 1}
    answers = []
    for name in ("no restart", "store", "store, from the disk", "no store"):
        with TemporaryDirectory() as folder:
            config = EngineConfig(
                model=model,
                max_model_len=SYSTEM_TOKENS + turns * (told + ANSWER_TOKENS),
                kv_store=None if name == "no store" else folder,
            )

            def warm() -> Engine:
                engine = load_engine(config).engine  # noqa: B023
                answer_of(engine, [[1, 2, 3]], "warm")
                return engine

            engine = warm()
            vocab = engine.runner.info.vocab_size

            def ask(turn: int, talks: Sequence[list[int]]) -> Answers:
                nonlocal engine
                if turn == half and name != "no restart":  # noqa: B023
                    engine.close()
                    if name == "store, from the disk":  # noqa: B023
                        drop_from_memory(Path(folder))
                    engine = warm()
                return answer_of(engine, talks, f"t{turn}")

            times, said = conversation(ask, vocab, users, half + 2, told)
            answers.append(said)
            result[name] = [round(seconds, 4) for seconds in times]
            if name == "store":
                files = list(Path(folder).rglob("*.kv"))
                result["store_mib"] = round(sum(f.stat().st_blocks for f in files) / 2048, 1)
    assert all(said == answers[0] for said in answers), "answers depend on a restart"
    for name in ("store", "store, from the disk", "no store"):
        before = statistics.median(result[name][1:half])  # the first turn computes the prompt
        result[f"ratio: {name}"] = round(result[name][half] / before, 3)
    return result


def drop_from_memory(folder: Path) -> None:
    for path in folder.rglob("*.kv"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def tree_cost(conversations: int = 1000, length: int = 2000) -> dict[str, float]:
    """Medians in microseconds once memory is full, so that every request evicts another one."""
    page = GroupMemory("full", 1, 3, None)
    slabs = conversations * -(-length // 32) // page.pages_per_slab + 8
    info = RunnerInfo(
        vocab_size=50_000,
        max_model_len=4096,
        max_tokens_per_step=length,
        max_sequences=64,
        groups=(page,),
        slab_bytes=page.page_bytes * page.pages_per_slab,
        slabs=slabs,
        max_top_logprobs=0,
        fingerprint="",
        memory=(),
        plan="",
    )
    memory = KVMemory(info, max_model_len=4096, max_chunk=length, copy_pages=lambda *_: None)
    dice = np.random.default_rng(0)
    times: dict[str, list[float]] = {"match, take, evict": [], "insert": [], "give back": []}
    for number in range(2 * conversations):
        ids = dice.integers(0, info.vocab_size, length).astype(np.int32)
        start = time.perf_counter()
        found = memory.open(ids, length, length - 1)
        opened = time.perf_counter()
        assert found is not None
        memory.advance(found[0], length)
        inserted = time.perf_counter()
        memory.give_back(found[0])
        end = time.perf_counter()
        if number > conversations:
            for part, seconds in zip(
                times.values(), (opened - start, inserted - opened, end - inserted), strict=True
            ):
                part.append(1e6 * seconds)
    medians = {name: round(statistics.median(part), 1) for name, part in times.items()}
    whole = [sum(parts) for parts in zip(*times.values(), strict=True)]
    return {**medians, "all": round(statistics.median(whole), 1)}


def shown(name: str, result: dict[str, Any]) -> Iterable[str]:
    yield f"{name}: {result['users']} users, {result['turns']} turns, time to first token in ms"
    for who, times in result["times_s"].items():
        yield f"  {who:>30}  " + " ".join(f"{1000 * seconds:7.1f}" for seconds in times)
    yield (
        f"  Invar, on by off: first turn {result['ratio_first_turn']:.3f}, later turns "
        f"{result['ratio_later_median']:.3f} (worst {result['ratio_later_worst']:.3f})"
    )


def shown_restart(result: dict[str, Any]) -> Iterable[str]:
    yield (
        f"restart before turn {result['turn']}: {result['users']} users, time to first token of "
        f"each turn in ms; the store has {result['store_mib']} MiB"
    )
    for name in ("no restart", "store", "store, from the disk", "no store"):
        line = f"  {name:>20}  " + " ".join(f"{1000 * s:7.1f}" for s in result[name])
        ratio = result.get(f"ratio: {name}")
        yield line + ("" if ratio is None else f"   after/before {ratio:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--agent-turns", type=int, default=20)
    parser.add_argument("--part", choices=("chat", "agent", "restart", "tree"), action="append")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=[])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    parts = options.part or ["chat", "agent", "restart", "tree"]
    results: dict[str, Any] = {"model": options.model}
    if "chat" in parts:
        shape = (options.users, options.turns, QUESTION_TOKENS)
        results["chat"] = compare(options.model, *shape, options.peers)
    if "agent" in parts:
        shape = (1, options.agent_turns, OBSERVATION_TOKENS)
        results["agent"] = compare(options.model, *shape, options.peers)
    if "restart" in parts:
        results["restart"] = restart(options.model, options.users, options.turns, QUESTION_TOKENS)
    if "tree" in parts:
        results["tree_us"] = tree_cost()
    if options.json:
        print(json.dumps(results, indent=1))
        return
    for name in ("chat", "agent"):
        if name in results:
            print("\n".join(shown(name, results[name])))
    if "restart" in results:
        print("\n".join(shown_restart(results["restart"])))
    if "tree_us" in results:
        print("tree, microseconds a request of 2,000 new tokens at 1,000 conversations:")
        print("  " + ", ".join(f"{name} {us}" for name, us in results["tree_us"].items()))


if __name__ == "__main__":
    main()
