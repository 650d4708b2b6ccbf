"""The memory that a model takes, for `invar inspect`: all of it by the engine's own arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from invar.cli.tables import memory_table, size_text, table
from invar.config import EngineConfig

if TYPE_CHECKING:
    from invar.engine.model_files import ModelFile
    from invar.graph.graph import Graph

LENGTHS = (512, 2048, 8192, 32768, 131072, 1048576)
BATCHES = (1, 8, 64)


def memory_of(
    source: ModelFile,
    config: EngineConfig,
    lengths: Sequence[int] | None,
    batches: Sequence[int] | None,
) -> dict[str, Any]:
    """In JSON's types. A file of which no model can be made has the reason in the place of KV.

    `kv_bytes` is what an engine for so many requests of so many tokens takes, in whole pages and
    slabs: `kv_bytes[tokens][requests]`.
    """
    from invar.graph.operations import KVFormat
    from invar.graph.passes import with_kv_format
    from invar.models import registry

    try:
        graph = with_kv_format(registry.build(source), KVFormat(config.kv_format))
    except ValueError as error:
        return {"kv_format": config.kv_format, "kv_error": str(error)}
    return kv_of(graph, config, lengths, batches) | {"at_start": at_start(source, config)}


def kv_of(
    graph: Graph,
    config: EngineConfig,
    lengths: Sequence[int] | None,
    batches: Sequence[int] | None,
) -> dict[str, Any]:
    from invar.backends.cpu.layout import page_bytes
    from invar.backends.cpu.memory import kv_bytes
    from invar.backends.runner import PAGE_TOKENS

    if lengths is None:
        longest = config.max_model_len or graph.max_positions
        lengths = [n for n in LENGTHS if n < longest] + [longest]
    if batches is None:
        batches = sorted({*BATCHES, config.max_num_seqs})
    chunk = config.max_num_batched_tokens
    return {
        "kv_format": config.kv_format,
        "kv_bytes_per_token": sum(page_bytes(group) for group in graph.groups) // PAGE_TOKENS,
        "kv_groups": [
            {
                "name": group.name,
                "layers": group.layers,
                "window": group.window,
                "bytes_per_token": page_bytes(group) // PAGE_TOKENS,
            }
            for group in graph.groups
        ],
        "kv_bytes": {
            str(tokens): {
                str(requests): kv_bytes(graph, tokens, requests, chunk) for requests in batches
            }
            for tokens in lengths
        },
    }


def at_start(source: ModelFile, config: EngineConfig) -> dict[str, Any]:
    """What an engine of these options takes of this machine, or why there can be none."""
    from invar.backends.cpu.memory import plan_memory
    from invar.engine.loader import plan_engine

    try:
        plan = plan_engine(config, source.path, source)
        rows = plan_memory(plan.graph, plan.weights, **vars(plan.sizes)).rows
    except ValueError as error:
        return {"error": str(error)}
    sizes = plan.sizes
    return {
        "max_model_len": sizes.max_model_len,
        "max_num_seqs": sizes.max_sequences,
        "max_num_batched_tokens": sizes.max_tokens_per_step,
        "threads": sizes.threads,
        "bytes": dict(rows),
    }


def memory_text(memory: dict[str, Any]) -> str:
    stored = table([("weights, as stored", size_text(memory["weights_bytes"]))])
    if "kv_error" in memory:
        return f"{stored}\n  KV: unknown, no model can be made of it: {memory['kv_error']}"
    groups = [
        f"{size_text(of['bytes_per_token'])} in {layers(of['layers'])}"
        + (f" that see {of['window']:,} tokens" if of["window"] else "")
        for of in memory["kv_groups"]
    ]
    per_token = size_text(memory["kv_bytes_per_token"])
    lengths = memory["kv_bytes"]
    batches = list(next(iter(lengths.values())))
    rows = [("KV of requests", *(f"{int(n):,}" for n in batches))]
    for tokens, sizes in lengths.items():
        rows.append((f"of {int(tokens):,} tokens", *(size_text(size) for size in sizes.values())))
    return "\n".join(
        [
            stored,
            f"  KV per token in {memory['kv_format']}: {per_token} ({', '.join(groups)})",
            table(rows, right=range(1, len(rows[0]))),
            start_text(memory["at_start"]),
        ]
    )


def layers(count: int) -> str:
    return f"{count} layer" if count == 1 else f"{count} layers"


def start_text(start: dict[str, Any]) -> str:
    if "error" in start:
        return f"  Not on this machine with these options: {start['error']}"
    return (
        f"  An engine for {start['max_num_seqs']} requests of up to {start['max_model_len']:,} "
        f"tokens takes here\n{memory_table(list(start['bytes'].items()))}"
    )
