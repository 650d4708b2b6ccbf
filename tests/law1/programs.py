"""Random programs of an engine with shared prefixes: submit, step, cancel, preempt, evict, reset,
restart.

A restart is another engine over the same page store, some of whose files may have been damaged in
between; whoever waited for an answer asks for the rest of it. `check_integrity()` runs after every
operation, freed pages are NaN, and every request that ended must have the ids and log-probabilities
of its lone cold run, bit for bit.

`python -m law1.programs [MINUTES]` runs programs over all tiny models until the time is over.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
from engine.helpers import Client
from engine.scripted_runner import Answer
from golden.tiny_models import TINY_MODELS

from invar.backends.cpu import layout
from invar.engine import scheduler, stored_prefix
from invar.engine.engine import Engine
from invar.engine.request import EngineRequest, Sampling
from law1.workload import Setting, as_bits, engine_of

SALTS = (None, None, None, "A", "B")
CONVERSATIONS = 4  # that prompts begin with
LONGEST = 150  # of a prompt
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "prompt_logprobs": 1},
    {"temperature": 0.9, "seed": 11, "top_p": 0.9},
    {"temperature": 1.2, "seed": 12, "repetition_penalty": 1.2},
)


@dataclass
class Program:
    """Engines one after another and what they were asked; `dice` decides everything."""

    make: Callable[[Path], Engine]  # over the page store in a folder
    lone: Callable[[EngineRequest], Answer]
    dice: random.Random
    vocab: int
    operations: int = 0
    requests: dict[str, EngineRequest] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)

    def run(self, length: int) -> None:
        with (
            TemporaryDirectory() as folder,
            patch.object(stored_prefix, "LONG_PREFIX_TOKENS", self.dice.choice((32, 96, 1000))),
            patch.object(scheduler, "FETCH_S", self.dice.choice((0.0, 1.0))),
        ):
            self.folder = Path(folder)
            self.engine = self.make(self.folder)
            self.client = Client(self.engine)
            self._run(length)
            self.engine.close()

    def _run(self, length: int) -> None:
        actions = (
            self.submit, self.step, self.cancel, self.preempt, self.evict, self.reset, self.restart
        )  # fmt: skip
        for _ in range(length):
            self.operations += 1
            self.dice.choices(actions, weights=(20, 60, 4, 5, 10, 1, 3))[0]()
            self.engine.check_integrity()
        while self.engine.has_unfinished:
            self.operations += 1
            self.client.step()
        assert not self.client.errors, self.client.errors
        for name, one in self.requests.items():
            if name not in self.aborted:
                expected, answer = self.lone(one), self.client.answers[name]
                assert as_bits({name: answer}) == as_bits({name: expected}), name
        self.engine.reset_prefix_cache()
        self.engine.check_integrity()
        memory = self.engine.memory
        assert memory.arbiter.num_free == memory.arbiter.total
        assert not memory.tree.roots

    def submit(self) -> None:
        if len(self.engine.states) > 10:
            return
        prompt = self.prompt()
        room = min(self.engine.max_model_len, self.engine.kv_capacity_tokens + 1)
        prompt = prompt[: room - 1]
        one = EngineRequest(
            id=f"r{len(self.requests)}",
            prompt_token_ids=np.array(prompt, np.int32),
            max_tokens=min(self.dice.randint(1, 30), room - len(prompt)),
            sampling=Sampling(**{"seed": 0, "logprobs": 2, **self.dice.choice(SAMPLINGS)}),
            cache_salt=self.dice.choice(SALTS),
            priority=self.dice.choice((-1, 0, 0, 1)),
            tenant=self.dice.choice(("heavy", "heavy", "light", None)),
            reads_cache=self.dice.random() < 0.95,
        )
        for _ in range(self.dice.choice((1, 1, 1, 3))):  # choices of one prompt
            one = replace(
                one,
                id=f"r{len(self.requests)}",
                sampling=replace(one.sampling, choice=len(self.requests) % 3),
            )
            self.requests[one.id] = one
            self.client.add(one)

    def prompt(self) -> list[int]:
        """The beginning of a conversation, or an earlier prompt with its answer and a new turn."""
        spoken = [name for name in self.client.answers if name in self.requests]
        if spoken and self.dice.random() < 0.5:
            name = self.dice.choice(spoken)
            said = self.client.answers[name].token_ids
            before = [*self.requests[name].prompt_token_ids.tolist(), *said]
        else:
            words = random.Random(self.dice.randrange(CONVERSATIONS))
            before = [words.randrange(self.vocab) for _ in range(LONGEST)]
        cut = self.dice.choice((len(before), self.dice.randint(0, len(before))))
        turn = [self.dice.randrange(self.vocab) for _ in range(self.dice.randint(1, 20))]
        return [*before[:cut], *turn][:LONGEST]

    def step(self) -> None:
        for _ in range(self.dice.randint(1, 4)):
            self.operations += 1
            self.client.step()

    def cancel(self) -> None:
        if self.engine.states:
            name = self.dice.choice(list(self.engine.states))
            self.client.abort(name)
            self.aborted.add(name)

    def preempt(self) -> None:
        if self.engine.scheduler.running:
            self.engine.scheduler.preempt(self.dice.choice(self.engine.scheduler.running))

    def evict(self) -> None:
        """Some of what no request uses, or all of it, once what is on its way to disk is there."""
        assert self.engine.page_store is not None
        self.engine.page_store.flush()
        if self.dice.random() < 0.3:
            self.engine.memory.tree.clear()
        else:
            self.engine.memory.tree.evict(self.dice.choice((1, 2, 1000)))

    def reset(self) -> None:
        self.engine.reset_prefix_cache()

    def restart(self) -> None:
        self.engine.close()
        if self.dice.random() < 0.5:
            self.damage()
        self.engine = self.client.engine = self.make(self.folder)
        for name, one in self.requests.items():
            answer = self.client.answers.get(name, Answer([]))
            if name not in self.aborted and answer.finish_reason is None:
                if answer.token_ids:  # the prompt's scores have come with the first of them
                    said = np.array(answer.token_ids, np.int32)
                    scored = replace(one.sampling, prompt_logprobs=None)
                    one = replace(one, output_token_ids=said, sampling=scored)
                self.client.add(one)

    def damage(self) -> None:
        """A file of the store has gone, or rows or pages in it are not what they were."""
        files = sorted(self.folder.glob("*/*.kv"))
        store = self.engine.page_store
        if not files or store is None:
            return
        path = self.dice.choice(files)
        how = self.dice.choice(("remove", "cut", "rows", "pages", "pages"))
        if how == "remove":
            path.unlink()
            return
        data = bytearray(path.read_bytes())
        pages_at = store.layout.table_bytes(store.slots)
        if how == "cut":
            del data[self.dice.randrange(len(data)) :]
        begin, end = (4096, 4096 + 2000) if how == "rows" else (pages_at, len(data))
        for index in range(begin + self.dice.randrange(400), min(end, len(data)), 400):
            data[index] ^= 1 << self.dice.randrange(8)
        path.write_bytes(data)


class ColdRuns:
    """Lone cold answers of a tiny model, each computed once."""

    def __init__(self, model: str) -> None:
        self.engine = engine_of(model, Setting(length=256), prefix_caching=False)
        self.answers: dict[Any, Answer] = {}

    def __call__(self, one: EngineRequest) -> Answer:
        key = (one.prompt_token_ids.tobytes(), one.max_tokens, one.sampling)
        if key not in self.answers:
            client = Client(self.engine)
            client.add(one)
            self.answers[key] = client.drain()[one.id]
        return self.answers[key]


def tiny_engines(model: str, dice: random.Random) -> Callable[[Path], Engine]:
    """Over real kernels, in memory for a few requests: slabs of one or two pages."""
    setting = Setting(
        threads=dice.choice((1, 2)),
        chunk=dice.choice((5, 32, 48, 128)),
        sequences=dice.randint(1, 6),
        slabs=dice.randint(12, 40),
        length=256,
    )

    def make(folder: Path) -> Engine:
        with patch.object(layout, "SLAB_BYTES", 1):
            return engine_of(model, setting, store=folder)

    return make


def main(minutes: float) -> None:
    cold = {model: ColdRuns(model) for model in TINY_MODELS}
    end, operations, seed = time.monotonic() + 60 * minutes, 0, 0
    while time.monotonic() < end:
        for model in TINY_MODELS:
            seed += 1
            dice = random.Random(seed)
            program = Program(tiny_engines(model, dice), cold[model], dice, vocab=256)
            program.run(100)
            operations += program.operations
    print(f"{seed} programs, {operations} operations: all answers as alone")


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 10.0)
