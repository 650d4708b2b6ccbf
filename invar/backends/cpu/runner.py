"""The CPU backend behind the engine's seam: one native call per step."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from invar import _native
from invar.backends.cpu.eager import EagerPlan, OperationTime, time_lines
from invar.backends.cpu.emit import PlanMemory, emit
from invar.backends.cpu.fingerprint import fingerprint, kv_fingerprint
from invar.backends.cpu.lowered import Lowered
from invar.backends.cpu.memory import plan_memory, usable_threads
from invar.backends.cpu.packing import pack_weights
from invar.backends.cpu.work import machine_peak, model_work
from invar.backends.runner import Batch, GroupMemory, RunnerInfo, StepResult
from invar.graph.graph import Graph, WeightSource

logger = logging.getLogger("invar")

CLOSED = "the model has been closed; load it again to go on"
NO_FAULTS = np.zeros(0, np.int32)


@dataclass(frozen=True)
class FinishedTicket:
    """A step that ran inside ``submit``."""

    step: StepResult

    def result(self) -> StepResult:
        return self.step


class CpuRunner:
    """Owns packed weights, the KV arena and the plan of one model.

    ``vocab_size`` is the tokenizer's count: ids beyond it are never sampled, whatever the model
    has logits for. ``threads`` defaults to the physical cores this process may use. ``eager``: a
    plan that runs operation by operation, slower, and tells where a NaN came from. ``lowered``:
    what ``lower_graph`` made for these sizes, if it did.
    """

    def __init__(
        self,
        graph: Graph,
        source: WeightSource,
        *,
        max_tokens_per_step: int,
        max_sequences: int,
        max_model_len: int,
        kv_budget_bytes: int,
        threads: int | None = None,
        vocab_size: int | None = None,
        isa: str = "",
        eager: bool = False,
        lowered: Lowered | None = None,
    ) -> None:
        vocab = min(vocab_size or graph.vocab_size, graph.vocab_size)
        threads = threads or usable_threads()
        self.plan_sizes = plan_memory(
            graph,
            source,
            max_tokens_per_step=max_tokens_per_step,
            max_sequences=max_sequences,
            max_model_len=max_model_len,
            kv_budget_bytes=kv_budget_bytes,
            threads=threads,
            vocab_size=vocab,
            isa=isa,
            eager=eager,
            lowered=lowered,
        )
        sizes = self.plan_sizes
        memory = PlanMemory(
            workspace=_native.Memory(sizes.workspace_bytes),
            weights=pack_weights(sizes.lowered.weights, source, threads, isa),
            arena=_native.Memory(sizes.slab_count * sizes.slabs.slab_bytes),
        )
        self._weights: _native.Memory | None = memory.weights
        self._eager = EagerPlan(sizes.lowered, graph, max_tokens_per_step) if eager else None
        first_fault = self._eager.first_fault if self._eager else NO_FAULTS
        self._open: _native.Plan | None = emit(
            sizes.lowered, source, memory, sizes.shape, graph.groups, sizes.slabs, first_fault
        )
        self._open.set_profile(eager)
        groups = zip(graph.groups, sizes.slabs.page_bytes, sizes.slabs.pages_per_slab, strict=True)
        kv = kv_fingerprint(graph, source)
        self._info = RunnerInfo(
            vocab_size=vocab,
            max_model_len=max_model_len,
            max_tokens_per_step=max_tokens_per_step,
            max_sequences=max_sequences,
            groups=tuple(
                GroupMemory(group.name, page_bytes, per_slab, group.window)
                for group, page_bytes, per_slab in groups
            ),
            slab_bytes=sizes.slabs.slab_bytes,
            slabs=sizes.slab_count,
            max_top_logprobs=_native.MAX_TOP_LOGPROBS,
            fingerprint=fingerprint(kv, max_model_len=max_model_len, vocab_size=vocab),
            kv_fingerprint=kv,
            memory=sizes.rows,
            plan=sizes.line,
            work=model_work(sizes.lowered, tuple(graph.groups)),
        )

    @property
    def _plan(self) -> _native.Plan:
        if self._open is None:
            raise RuntimeError(CLOSED)
        return self._open

    @property
    def info(self) -> RunnerInfo:
        return self._info

    @property
    def isa(self) -> str:
        """The instruction set of the kernels; it changes no bit of a result."""
        return self._plan.isa

    @property
    def progress(self) -> int:
        """Advances with every item of work of a running step; a hang stands still."""
        return self._plan.progress

    def count_progress_in(self, counter: npt.NDArray[np.uint64]) -> None:
        """Counts there from now on: uint64 [1], which another process may see."""
        self._plan.count_in(counter)

    def submit(self, batch: Batch) -> FinishedTicket:
        """Runs the step at once, on this thread and the pool, without the GIL.

        Raises ``ValueError`` for a batch that does not fit the plan; nothing has run then.
        """
        result = empty_result(batch)
        if self._eager:
            self._eager.first_fault.fill(0)
        self._plan.run(batch, result)
        if self._eager:
            result = replace(result, faults=self._eager.faults(batch))
        return FinishedTicket(result)

    def machine_limit(self, name: str, seconds: float) -> float:
        threads = self.plan_sizes.shape.threads
        if name != "read":
            return machine_peak(name, threads, seconds)
        if self._weights is None:
            raise RuntimeError(CLOSED)
        return _native.read_rate_gbs(self._weights, threads, seconds) * 1e9

    def clear_pages(self, group: int, page_ids: np.ndarray) -> None:
        self._plan.clear_pages(group, np.ascontiguousarray(page_ids, dtype=np.int32))

    def copy_pages(self, group: int, sources: np.ndarray, targets: np.ndarray) -> None:
        self._plan.copy_pages(
            group,
            np.ascontiguousarray(sources, dtype=np.int32),
            np.ascontiguousarray(targets, dtype=np.int32),
        )

    def read_pages(self, group: int, page_ids: np.ndarray, out: np.ndarray) -> None:
        self._plan.read_pages(group, np.ascontiguousarray(page_ids, dtype=np.int32), out)

    def write_pages(self, group: int, page_ids: np.ndarray, data: np.ndarray) -> None:
        self._plan.write_pages(group, np.ascontiguousarray(page_ids, dtype=np.int32), data)

    def logits(self, rows: int) -> npt.NDArray[np.float32]:
        """Raw logits ``[rows, model's logits]`` of the last tile of the last step, for tests."""
        logits = self.plan_sizes.lowered.logits
        assert logits is not None
        return self._plan.read_matrix(logits.number, rows)

    def set_profile(self, on: bool) -> None:
        self._plan.set_profile(on)

    def profile(self) -> list[tuple[str, int, int]]:
        """Per phase of the plan (kind, calls, nanoseconds) since profiling was switched on."""
        return self._plan.profile()

    def operation_times(self) -> list[OperationTime]:
        """What each operation took, over all steps so far; nothing unless the plan is eager."""
        return self._eager.times(self.profile()) if self._eager else []

    def close(self) -> None:
        """Gives all memory back; a second call does nothing. What is used afterwards raises
        RuntimeError. An eager plan says in the log what its operations took."""
        if self._open is not None and self._eager:
            for line in time_lines(self.operation_times()):
                logger.info(line)
        self._open = self._weights = None


def empty_result(batch: Batch) -> StepResult:
    rows = len(batch.logit_rows)
    highest = int(batch.sampling.top_logprobs.max(initial=0))
    return StepResult(
        token_ids=np.zeros(rows, np.int32),
        logprobs=np.zeros(rows, np.float32),
        ranks=np.zeros(rows, np.int32),
        finite=np.zeros(rows, np.bool_),
        skipped=np.zeros(rows, np.bool_),
        top_ids=np.zeros((rows, highest), np.int32),
        top_logprobs=np.zeros((rows, highest), np.float32),
    )
