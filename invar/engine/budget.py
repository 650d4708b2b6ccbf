"""How much of the machine's memory a model gets: planned and refused before a byte is taken."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from pathlib import Path

from invar.backends.cpu.lowered import Lowered
from invar.backends.cpu.memory import kv_bytes, lower_graph, plan_memory, usable_threads
from invar.config import DEFAULT_KV_BYTES, EngineConfig
from invar.engine.model_files import ModelFile
from invar.graph.graph import Graph, WeightSource

logger = logging.getLogger("invar")

CGROUP = Path("/sys/fs/cgroup")
MEMINFO, AVAILABLE = Path("/proc/meminfo"), "MemAvailable:"


@dataclass(frozen=True)
class RunnerSizes:
    """What a runner is built with; every number is resolved."""

    max_tokens_per_step: int
    max_sequences: int
    max_model_len: int
    kv_budget_bytes: int
    threads: int
    vocab_size: int
    eager: bool
    lowered: Lowered  # once, for the budget and for the runner: half of what planning takes


def plan_sizes(
    config: EngineConfig, graph: Graph, source: WeightSource, name: str, vocab_size: int
) -> RunnerSizes:
    """The sizes that the options ask for, with the context lowered to what KV memory holds.

    name: of the model, for messages. Raises ValueError with the numbers where an option asks for
    more than there is.
    """
    longest = config.max_model_len or graph.max_positions
    if longest > graph.max_positions:
        raise ValueError(
            f"max_model_len: {longest} is beyond the {graph.max_positions} tokens that the model "
            f"was made for"
        )
    chunk, sequences = config.max_num_batched_tokens, config.max_num_seqs
    threads, eager = running_threads(config.num_threads), config.enforce_eager
    sizes = RunnerSizes(
        max_tokens_per_step=chunk,
        max_sequences=sequences,
        max_model_len=longest,
        # More than all requests at full length can use would lie idle.
        kv_budget_bytes=kv_bytes(graph, longest, sequences, chunk),
        threads=threads,
        vocab_size=vocab_size,
        eager=eager,
        lowered=lower_graph(graph, source, max_tokens_per_step=chunk, threads=threads, eager=eager),
    )
    budget = min(sizes.kv_budget_bytes, kv_budget(config, graph, source, name, sizes))
    fitting = fitting_length(graph, budget, longest, chunk)
    if fitting < longest and config.max_model_len is not None:
        raise ValueError(
            f"max_model_len: {longest} tokens need {mib(kv_bytes(graph, longest, 1, chunk))} of KV "
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
    return replace(sizes, max_model_len=fitting, kv_budget_bytes=budget)


def running_threads(wanted: int | None) -> int:
    """As many as were asked for, and no more than there are cores.

    Threads that share a core wait for each other at every phase: 12 on 2 cores took 4 to 6 times
    as long as 2. Answers do not depend on the number.
    """
    cores = usable_threads()
    if wanted is None or wanted <= cores:
        return wanted or cores
    logger.warning(
        "%d threads are more than the %d cores that this process may use; %d run, and the "
        "answers are the same",
        wanted,
        cores,
        cores,
    )
    return cores


def kv_budget(
    config: EngineConfig, graph: Graph, source: WeightSource, name: str, sizes: RunnerSizes
) -> int:
    """Bytes that KV memory may have.

    | given                    | budget                                                        |
    |--------------------------|---------------------------------------------------------------|
    | `kv_cache_memory_bytes`  | that                                                          |
    | `gpu_memory_utilization` | that share of available memory, less weights and workspace    |
    | neither                  | the same with 0.9, and no more than `DEFAULT_KV_BYTES`        |
    """
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    plan = plan_memory(graph, source, **vars(sizes))
    fixed = plan.lowered.weights.size + plan.workspace_bytes
    available = available_memory()
    budget = int(available * config.memory_fraction) - fixed
    if budget <= 0:
        raise ValueError(
            f"{name}: weights and workspace need {mib(fixed)}; "
            f"{config.memory_fraction:g} of the available {mib(available)} is less than that"
        )
    return budget if config.gpu_memory_utilization is not None else min(budget, DEFAULT_KV_BYTES)


def fitting_length(graph: Graph, budget: int, longest: int, max_chunk: int) -> int:
    """Most tokens, up to `longest`, that one request can have in `budget` bytes of KV memory."""
    low, high = 0, longest
    while low < high:
        middle = math.ceil((low + high) / 2)
        if kv_bytes(graph, middle, 1, max_chunk) <= budget:
            low = middle
        else:
            high = middle - 1
    if not low:
        raise ValueError(
            f"a KV budget of {mib(budget)} does not hold one page; give it more memory"
        )
    return low


def drop_file_if_short(source: ModelFile, planned: int, available: int) -> None:
    """After packing: the file leaves the page cache if it does not fit beside what was planned.

    Both are bytes, `available` those before anything was allocated. Where both fit the page cache
    is left alone, so that the next start reads no disk; where they do not, the system would have to
    find out by itself which pages nobody reads any more.
    """
    if source.file_bytes + planned <= available:
        return
    source.drop_from_page_cache()
    logger.info(
        "%s (%s) leaves the page cache: beside %s for the model it does not fit into the "
        "available %s",
        source.path.name,
        mib(source.file_bytes),
        mib(planned),
        mib(available),
    )


def available_memory() -> int:
    """Bytes that can be used without swapping, within the limit of the process's cgroup."""
    available = system_memory()
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
    except OSError:
        return available
    return available if limit == "max" else min(available, max(0, int(limit) - used))


def system_memory() -> int:
    """What the system says is available; asked of Linux itself, since psutil takes 0.1 s to load"""
    try:
        lines = MEMINFO.read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(AVAILABLE))
    except (OSError, StopIteration):
        import psutil

        return int(psutil.virtual_memory().available)


def mib(size: int) -> str:
    return f"{size / (1 << 20):,.0f} MiB"
