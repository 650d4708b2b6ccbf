"""What an engine counts, for metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from invar.engine.engine import Engine


@dataclass(frozen=True)
class EngineStats:
    """Gauges now, and totals since the start."""

    started: float  # seconds since 1970: tells the totals of two engines apart
    max_sequences: int  # of a batch
    max_rows: int  # of a step
    running: int
    waiting: int  # also for their grammar
    kv_usage: float  # 0 … 1
    kv_unfilled: float  # share of the pages in use that holds no token, 0 … 1
    kv_saved_by_sharing: int  # bytes that requests would have more without it
    kv_saved_by_windows: int  # bytes that would be in use if every layer kept all tokens
    preemptions: int
    cache_tokens: int  # that the prefix cache holds now
    cache_queries: int  # tokens of prompts that were looked up in it
    cache_hits: int  # of them, found
    cache_evictions: int  # tokens
    prompt_tokens: int  # rows of prompts run; recomputed ones count again
    generated_tokens: int
    steps: int
    store_tokens: int  # read from the page store
    store_pages_written: int
    store_pages_read: int
    store_bytes: int  # on disk
    store_queries: int  # tokens of prompts that memory did not have, looked up in the store
    prompt_computed: int  # tokens of prompts, by where their K and V came from
    prompt_from_memory: int
    prompt_from_store: int
    corrupted: int  # requests whose logits were NaN
    work: Mapping[str, float]  # of steps: see `Work`


def stats_of(engine: Engine) -> EngineStats:
    scheduler, memory = engine.scheduler, engine.memory
    store, prefixes = engine.page_store, memory.prefixes
    use = engine.kv_use()
    return EngineStats(
        started=engine.started,
        max_sequences=scheduler.max_running,
        max_rows=scheduler.max_tokens_per_step,
        running=len(scheduler.running),
        waiting=len(scheduler.waiting) + len(engine.guidance.compiling),
        kv_usage=memory.usage,
        kv_unfilled=use.unfilled_share,
        kv_saved_by_sharing=use.saved_by_sharing,
        kv_saved_by_windows=use.saved_by_windows,
        preemptions=scheduler.num_preemptions,
        cache_tokens=memory.tree.num_tokens,
        cache_queries=scheduler.num_queried_tokens,
        cache_hits=scheduler.num_reused_tokens,
        cache_evictions=memory.tree.num_evicted_tokens,
        prompt_tokens=engine.prompt_tokens,
        generated_tokens=engine.generated_tokens,
        steps=engine.steps,
        store_tokens=0 if prefixes is None else prefixes.num_read_tokens,
        store_pages_written=0 if store is None else store.pages_written,
        store_pages_read=0 if store is None else store.pages_read,
        store_bytes=0 if store is None else store.bytes,
        store_queries=0
        if store is None
        else scheduler.num_prompt_computed + scheduler.num_prompt_from_store,
        prompt_computed=scheduler.num_prompt_computed,
        prompt_from_memory=scheduler.num_prompt_from_memory,
        prompt_from_store=scheduler.num_prompt_from_store,
        corrupted=engine.num_corrupted,
        work=engine.work.totals(),
    )
