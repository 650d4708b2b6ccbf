"""The memory table: every byte the runner will allocate, before it allocates one."""

from __future__ import annotations

from dataclasses import dataclass

from invar import _native
from invar.backends.cpu.emit import PlanShape
from invar.backends.cpu.layout import SlabLayout, place_buffers, plan_slabs, round_up
from invar.backends.cpu.lower import lower
from invar.backends.cpu.lowered import Lowered
from invar.backends.runner import peak_pages
from invar.graph.graph import Graph, WeightSource
from invar.graph.passes import optimise, separate


class DoesNotFit(ValueError):
    """The budget is too small; the message has the numbers."""


@dataclass(frozen=True)
class CpuPlan:
    """A lowered graph with the sizes of everything it needs."""

    lowered: Lowered
    shape: PlanShape
    slabs: SlabLayout
    slab_count: int
    workspace_bytes: int
    eager: bool

    @property
    def line(self) -> str:
        """How a step runs, for the log at start."""
        phases = self.lowered.phases
        operations = sum(len(calls) for calls in phases)
        how = (
            "run operation by operation, each timed and checked for NaN (enforce_eager)"
            if self.eager
            else "recorded once and replayed every step"
        )
        return (
            f"plan: {how}; {len(phases)} phases of {operations} operations, "
            f"up to {self.shape.max_tokens} rows, {self.workspace_bytes / (1 << 20):.1f} MiB"
        )

    @property
    def rows(self) -> tuple[tuple[str, int], ...]:
        """(what, bytes), for the table that is printed at start."""
        scratch = self.shape.thread_bytes
        partials = self.shape.partials * self.shape.partial_bytes
        return (
            ("weights", self.lowered.weights.size),
            ("KV cache", self.slab_count * self.slabs.slab_bytes),
            ("workspace: buffers", self.workspace_bytes - scratch - partials),
            ("workspace: threads", scratch),
            ("workspace: attention between threads", partials),
        )


def lower_graph(
    graph: Graph, source: WeightSource, *, max_tokens_per_step: int, threads: int, eager: bool
) -> Lowered:
    """Raises ``GraphError`` for a model the backend cannot run."""
    ops = separate(graph) if eager else optimise(graph)
    return lower(ops, source, max_tokens_per_step, threads, eager)


def plan_memory(
    graph: Graph,
    source: WeightSource,
    *,
    max_tokens_per_step: int,
    max_sequences: int,
    max_model_len: int,
    kv_budget_bytes: int,
    threads: int,
    vocab_size: int,
    isa: str = "",
    eager: bool = False,
    lowered: Lowered | None = None,
) -> CpuPlan:
    """Sizes of weights, KV cache and workspaces; allocates nothing.

    lowered: what ``lower_graph`` made of graph and source for these rows and threads, if it did.
    Raises ``GraphError`` for a model the backend cannot run and ``DoesNotFit`` when the KV budget
    holds less than one slab per cache group.
    """
    lowered = lowered or lower_graph(
        graph, source, max_tokens_per_step=max_tokens_per_step, threads=threads, eager=eager
    )
    slabs = plan_slabs(graph.groups)
    slab_count = kv_budget_bytes // slabs.slab_bytes
    if slab_count < len(graph.groups):
        raise DoesNotFit(
            f"KV cache: {kv_budget_bytes:,} bytes are less than one slab of "
            f"{slabs.slab_bytes:,} bytes for each of {len(graph.groups)} cache groups; "
            "give it more memory"
        )
    buffer_bytes = place_buffers(lowered.buffers)
    shape = PlanShape(
        isa=isa,
        threads=threads,
        max_tokens=max_tokens_per_step,
        max_sequences=max_sequences,
        vocab_size=vocab_size,
        scratch_offset=buffer_bytes,
        scratch_bytes=_scratch_bytes(lowered, isa),
        sampling_scratch_bytes=_native.sampling_scratch_bytes(isa, vocab_size),
        partials=_native.attention_partials(threads, max_model_len),
        partial_bytes=max(
            (_native.attention_partial_bytes(of.heads, of.head_dim) for of in lowered.attention),
            default=0,
        ),
    )
    workspace = buffer_bytes + shape.thread_bytes + shape.partials * shape.partial_bytes
    return CpuPlan(lowered, shape, slabs, slab_count, workspace, eager)


def kv_bytes(graph: Graph, tokens: int, sequences: int, max_chunk: int) -> int:
    """Bytes of KV cache in which ``sequences`` requests of ``tokens`` tokens run at once.

    max_chunk: most rows of one request in a step; a window group keeps no more than it needs then.
    """
    slabs = plan_slabs(graph.groups)
    total = 0
    for group, per_slab in zip(graph.groups, slabs.pages_per_slab, strict=True):
        pages = sequences * peak_pages(tokens, group.window, max_chunk)
        total += -(-pages // per_slab) * slabs.slab_bytes
    return total


def usable_threads() -> int:
    """The physical cores that this process may use, by affinity and cgroup."""
    return _native.cpu_info()["usable_cores"]


def _scratch_bytes(lowered: Lowered, isa: str) -> int:
    sizes = [
        _native.attention_scratch_bytes(isa, of.kv_format, of.heads, of.head_dim)
        for of in lowered.attention
    ]
    if lowered.tile_columns:
        sizes.append(_native.linear_scratch_bytes(lowered.tile_columns))
    return round_up(max(sizes, default=0))
