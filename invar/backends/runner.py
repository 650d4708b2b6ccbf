"""The seam between engine and backend: a batch goes in, sampled tokens come out.

``runner.submit(batch)`` returns a ticket at once; ``ticket.result()`` waits. All arrays belong to
the caller and must stay unchanged until the result is taken.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

PAGE_TOKENS = 32  # of the CPU backend's page layout; the engine only counts with it


def pages_of(tokens: int) -> int:
    return -(-tokens // PAGE_TOKENS)


def peak_pages(tokens: int, window: int | None, max_chunk: int) -> int:
    """Most pages that a request of `tokens` tokens ever holds in a cache group.

    A step of `max_chunk` rows sees ``window - 1`` tokens before its first row. That many tokens in
    a row, n, lie in at most ``pages_of(n - 1) + 1`` pages, wherever they begin.
    """
    if window is None:
        return pages_of(tokens)
    return min(pages_of(tokens), pages_of(window + max_chunk - 2) + 1)


@dataclass(frozen=True)
class SamplingBatch:
    """Sampling parameters of the rows that need logits, ``[rows]`` each unless said otherwise."""

    temperature: np.ndarray  # float32, 0 = greedy
    top_k: np.ndarray  # int32, 0 = off
    top_p: np.ndarray  # float32, 1 = off
    min_p: np.ndarray  # float32, 0 = off
    seed: np.ndarray  # uint64
    choice: np.ndarray  # int32, choice index
    position: np.ndarray  # int32, position in the output
    repetition_penalty: np.ndarray  # float32, 1 = off
    frequency_penalty: np.ndarray  # float32, 0 = off
    presence_penalty: np.ndarray  # float32, 0 = off
    history: np.ndarray  # int32, ids of all rows one after another: prompt then output
    history_start: np.ndarray  # int64 [rows + 1]; an empty range where no penalty is on
    prompt_len: np.ndarray  # int32, ids of the prompt at the start of the row's history
    bias_ids: np.ndarray  # int32, of all rows one after another
    bias_values: np.ndarray  # float32; -inf forbids
    bias_start: np.ndarray  # int64 [rows + 1]
    # uint32 [words of 32 ids + 1] each; a bit of 1 allows. The last word is not 0 once the others
    # are final: they may be written (and published, `_native.publish_mask`) while the step runs.
    masks: tuple[np.ndarray, ...]
    masked_rows: np.ndarray  # int32 [masked], which row each mask belongs to
    score: np.ndarray  # bool: no draw, report score_token
    score_token: np.ndarray  # int32
    top_logprobs: np.ndarray  # int32, how many of the highest to report


@dataclass(frozen=True)
class Batch:
    """One step: ``tokens`` rows of ``sequences`` requests.

    Sequence s owns rows ``query_start[s]:query_start[s + 1]``; its K and V of these rows go to
    positions ``kv_len[s] - rows … kv_len[s]`` of its block tables.
    """

    token_ids: np.ndarray  # int32 [tokens]
    feedback: np.ndarray  # int32 [n, 2]: (row, index in the last step's samples) replaces the id
    positions: np.ndarray  # int32 [axes, tokens]
    query_start: np.ndarray  # int32 [sequences + 1]
    kv_len: np.ndarray  # int32 [sequences], after this step
    block_tables: tuple[np.ndarray, ...]  # per cache group int32 [sequences, pages]
    logit_rows: np.ndarray  # int32 [rows], ascending
    sampling: SamplingBatch


@dataclass(frozen=True)
class StepResult:
    """Per row of ``logit_rows``."""

    token_ids: np.ndarray  # int32 [rows]
    logprobs: np.ndarray  # float32 [rows], of the raw logits
    ranks: np.ndarray  # int32 [rows], 1 = highest logit
    finite: np.ndarray  # bool [rows]; False: NaN in the logits or nothing allowed
    skipped: np.ndarray  # bool [rows]: its mask was not ready, so that nothing was drawn
    top_ids: np.ndarray  # int32 [rows, max top_logprobs of the batch]
    top_logprobs: np.ndarray  # float32, same shape
    # sequence of the batch → where its first NaN came from; an eager plan alone knows
    faults: Mapping[int, str] = field(default_factory=dict)


class Ticket(Protocol):
    def result(self) -> StepResult:
        """Waits for the step. Raises RuntimeError if the step itself failed."""


@dataclass(frozen=True)
class GroupMemory:
    """Page geometry of a cache group."""

    name: str
    page_bytes: int
    pages_per_slab: int
    window: int | None


@dataclass(frozen=True)
class ModelWork:
    """What the plan does for rows, for metrics: a multiply and an add are two operations.

    Products by the peak that bounds them, `int8`, `bf16` or `fp32`.
    """

    row_ops: Mapping[str, int]  # of every row
    logit_ops: Mapping[str, int]  # of a row that needs logits, beside those
    attention_ops: tuple[int, ...]  # per cache group, of a row and one token that it sees (bf16)
    weight_bytes: int
    expert_bytes: int = 0  # of these, what belongs to experts
    expert_share: float = 1.0  # of that, what one row uses

    def weights_read(self, rows: float) -> float:
        """Bytes that a step of so many rows reads: every weight once, but for experts that no row
        chooses, as many as there would be if all were as likely."""
        unread = self.expert_bytes * math.pow(1 - self.expert_share, rows)
        return self.weight_bytes - unread


@dataclass(frozen=True)
class RunnerInfo:
    """What the engine plans with."""

    vocab_size: int  # ids that can be sampled
    max_model_len: int  # positions the model knows
    max_tokens_per_step: int
    max_sequences: int
    groups: tuple[GroupMemory, ...]
    slab_bytes: int
    slabs: int  # of the arena, all groups together
    max_top_logprobs: int  # that a row can report
    fingerprint: str
    memory: tuple[tuple[str, int], ...]  # rows of the memory table: (what, bytes)
    plan: str = ""  # how steps run, in one line
    kv_fingerprint: str = ""  # of the part of the build that changes a byte of a page
    work: ModelWork | None = None  # None: not known


class Runner(Protocol):
    @property
    def info(self) -> RunnerInfo: ...

    def submit(self, batch: Batch) -> Ticket: ...

    def machine_limit(self, name: str, seconds: float) -> float:
        """What the machine does per second at most, measured for about `seconds` between two
        steps: operations of the peak `int8`, `bf16` or `fp32`, or bytes of weights `read`. 0 where
        there is no such peak. Asked for by an engine that knows its work alone."""

    def clear_pages(self, group: int, page_ids: np.ndarray) -> None:
        """Fills pages with NaN (tests) so that a read of unwritten KV cannot pass unseen."""

    def copy_pages(self, group: int, sources: np.ndarray, targets: np.ndarray) -> None:
        """Copies whole pages of a cache group, one to one; no page is both read and written.

        sources, targets: int32 [pages]. Raises ValueError for pages that do not exist.
        """

    def read_pages(self, group: int, page_ids: np.ndarray, out: np.ndarray) -> None:
        """Copies whole pages out of a cache group. What the bytes mean is the backend's affair;
        `write_pages` of the same build understands them.

        page_ids: int32 [pages]; out: uint8 [pages, page_bytes]. Raises ValueError for pages that
        do not exist.
        """

    def write_pages(self, group: int, page_ids: np.ndarray, data: np.ndarray) -> None:
        """Copies into pages what `read_pages` took out of others. Shapes and errors are its own."""

    def count_progress_in(self, counter: np.ndarray) -> None:
        """Counts items of work there from now on: uint64 [1], which another process may see."""

    def close(self) -> None: ...
