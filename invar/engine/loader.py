"""From options to a model that answers: file, tokenizer, graph, memory, runner, engine."""

from __future__ import annotations

import logging
import math
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from invar._native import MAX_TOP_LOGPROBS
from invar.backends.cpu.memory import kv_bytes, plan_memory
from invar.backends.cpu.runner import CpuRunner
from invar.backends.runner import RunnerInfo
from invar.config import DEFAULT_KV_BYTES, EngineConfig
from invar.engine.door import Door, SeedSource
from invar.engine.engine import Engine
from invar.graph.graph import Graph
from invar.models import registry
from invar.text.chat_template import ChatTemplate
from invar.text.tokenizer import Tokenizer
from invar.weights.gguf import GGUFFile
from invar.weights.sources import resolve

logger = logging.getLogger("invar")

CGROUP = Path("/sys/fs/cgroup")
TEMPLATE_KEY = "tokenizer.chat_template"


@dataclass
class LoadedModel:
    """Everything that serves one model. `close()` gives its memory back."""

    config: EngineConfig
    path: Path
    engine: Engine
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    door: Door
    info: RunnerInfo

    @property
    def memory_table(self) -> tuple[tuple[str, int], ...]:
        """Rows (what, bytes) of the table that is shown at start."""
        return self.info.memory

    def close(self) -> None:
        self.engine.close()


def load_engine(config: EngineConfig) -> LoadedModel:
    """Reads a model and builds its engine.

    Raises ValueError (or one of its kinds: ModelSourceError, GGUFError, ConfigError, GraphError,
    DoesNotFit) for what is wrong with the options, the file or the memory.
    """
    path = resolve(config.model)
    refuse_other_quantization(config, path)
    if config.max_logprobs > MAX_TOP_LOGPROBS:
        raise ValueError(
            f"max_logprobs: {config.max_logprobs} is more than the {MAX_TOP_LOGPROBS} that the "
            f"CPU backend reports"
        )
    with GGUFFile(path) as source:
        tokenizer = load_tokenizer(config, source)
        graph = registry.build(source)
        runner = make_runner(config, graph, source, tokenizer.vocab_size)
        chat_template = load_template(config, source.metadata)
    engine = Engine(runner, policy=config.scheduling_policy)
    door = Door(
        vocab_size=runner.info.vocab_size,
        max_model_len=engine.max_model_len,
        kv_capacity_tokens=engine.kv_capacity_tokens,
        eos_token_ids=tokenizer.stop_token_ids,
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False, parse_special=False),
        max_logprobs=config.max_logprobs,
        seeds=SeedSource(config.seed),
    )
    return LoadedModel(config, path, engine, tokenizer, chat_template, door, runner.info)


def load_tokenizer(config: EngineConfig, source: GGUFFile) -> Tokenizer:
    if config.tokenizer is None or config.tokenizer == config.model:
        return Tokenizer.from_gguf(source.metadata)
    with GGUFFile(resolve(config.tokenizer)) as other:
        return Tokenizer.from_gguf(other.metadata)


def load_template(config: EngineConfig, metadata: Mapping[str, Any]) -> ChatTemplate | None:
    """The file's own template, or the text (or file) that the options give in its place."""
    if config.chat_template is None:
        return ChatTemplate.from_gguf(metadata)
    text = config.chat_template
    if "\n" not in text and "{" not in text:  # no template without one of them
        text = Path(text).read_text(encoding="utf-8")
    return ChatTemplate.from_gguf(ChainMap({TEMPLATE_KEY: text}, dict(metadata)))


def refuse_other_quantization(config: EngineConfig, path: Path) -> None:
    if config.quantization not in (None, "gguf"):
        raise ValueError(
            f"quantization={config.quantization!r}: {path.name} is a GGUF file, whose number "
            f"formats are told by the file; leave the option out"
        )


def make_runner(config: EngineConfig, graph: Graph, source: GGUFFile, vocab_size: int) -> CpuRunner:
    longest = config.max_model_len or graph.max_positions
    if longest > graph.max_positions:
        raise ValueError(
            f"max_model_len: {longest} is beyond the {graph.max_positions} tokens that the model "
            f"was made for"
        )
    budget = kv_budget(config, graph, source, longest, vocab_size)
    fitting = fitting_length(graph, budget, longest)
    if fitting < longest and config.max_model_len is not None:
        raise ValueError(
            f"max_model_len: {longest} tokens need {mib(kv_bytes(graph, longest, 1))} of KV "
            f"memory, the budget is {mib(budget)} ({fitting} tokens); lower max_model_len or raise "
            f"kv_cache_memory_bytes or gpu_memory_utilization"
        )
    if fitting < longest:
        logger.warning(
            "max_model_len lowered from %d to %d: the KV budget is %s",
            longest,
            fitting,
            mib(budget),
        )
    return CpuRunner(
        graph,
        source,
        max_tokens_per_step=config.max_num_batched_tokens,
        max_sequences=config.max_num_seqs,
        max_model_len=fitting,
        kv_budget_bytes=budget,
        threads=config.num_threads,
        vocab_size=vocab_size,
    )


def kv_budget(
    config: EngineConfig, graph: Graph, source: GGUFFile, longest: int, vocab_size: int
) -> int:
    """Bytes for KV memory: never more than all requests at full length could use.

    | given                    | budget                                                        |
    |--------------------------|---------------------------------------------------------------|
    | `kv_cache_memory_bytes`  | that                                                          |
    | `gpu_memory_utilization` | that share of available memory, less weights and workspace    |
    | neither                  | the same with 0.9, and no more than `DEFAULT_KV_BYTES`        |
    """
    useful = kv_bytes(graph, longest, config.max_num_seqs)
    if config.kv_cache_memory_bytes is not None:
        return min(config.kv_cache_memory_bytes, useful)
    plan = plan_memory(
        graph,
        source,
        max_tokens_per_step=config.max_num_batched_tokens,
        max_sequences=config.max_num_seqs,
        max_model_len=longest,
        kv_budget_bytes=useful,
        threads=config.num_threads or 1,
        vocab_size=vocab_size,
    )
    fixed = plan.lowered.weights.size + plan.workspace_bytes
    available = available_memory()
    budget = int(available * config.memory_fraction) - fixed
    if budget <= 0:
        raise ValueError(
            f"{source.path.name}: weights and workspace need {mib(fixed)}; "
            f"{config.memory_fraction:g} of the available {mib(available)} is less than that"
        )
    if config.gpu_memory_utilization is None:
        budget = min(budget, DEFAULT_KV_BYTES)
    return min(budget, useful)


def fitting_length(graph: Graph, budget: int, longest: int) -> int:
    """Most tokens, up to `longest`, that one request can have in `budget` bytes of KV memory."""
    low, high = 0, longest
    while low < high:
        middle = math.ceil((low + high) / 2)
        if kv_bytes(graph, middle, 1) <= budget:
            low = middle
        else:
            high = middle - 1
    if not low:
        raise ValueError(
            f"a KV budget of {mib(budget)} does not hold one page; give it more memory"
        )
    return low


def available_memory() -> int:
    """Bytes that can be used without swapping, within the limit of the process's cgroup."""
    available = int(psutil.virtual_memory().available)
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
    except OSError:
        return available
    return available if limit == "max" else min(available, max(0, int(limit) - used))


def mib(size: int) -> str:
    return f"{size / (1 << 20):,.0f} MiB"
