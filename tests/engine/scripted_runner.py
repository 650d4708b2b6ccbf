"""Runners without a model, for tests of the engine.

`HashRunner` keeps a paged memory of its own. Every row stores its token and position in the page
that the block table names, then reads back what attention would read, and its "logits" are a hash
of that. A wrong page, position, length, window or a page of a stranger changes the answer or fails
an assertion. `lone_answer` computes the same answer from the request alone, without pages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from invar.backends.runner import (
    PAGE_TOKENS,
    Batch,
    GroupMemory,
    RunnerInfo,
    StepResult,
)
from invar.engine.request import EngineRequest, TokenLogprobs

VOCAB = 97
PAGE_BYTES = PAGE_TOKENS * 2 * 8  # of (token, position) as int64
POISON = -1


def runner_info(
    *,
    slabs: int = 64,
    pages_per_slab: int = 1,
    max_model_len: int = 256,
    max_tokens_per_step: int = 64,
    max_sequences: int = 8,
    window: int | None = None,
    window_pages_per_slab: int = 1,
) -> RunnerInfo:
    groups = [GroupMemory("full", PAGE_BYTES, pages_per_slab, None)]
    if window is not None:
        groups.append(GroupMemory("window", PAGE_BYTES, window_pages_per_slab, window))
    return RunnerInfo(
        vocab_size=VOCAB,
        max_model_len=max_model_len,
        max_tokens_per_step=max_tokens_per_step,
        max_sequences=max_sequences,
        groups=tuple(groups),
        slab_bytes=1,
        slabs=slabs,
        max_top_logprobs=20,
        fingerprint="hash",
        memory=(),
    )


WEIGHTS = np.random.default_rng(0).integers(1, 1 << 62, 4096)


def mix(values: list[int]) -> int:
    """A hash of a sequence that depends on order, 0 … 2^31."""
    numbers = np.array(values, np.int64) + 7
    return int(numbers @ WEIGHTS[: len(numbers)]) >> 17 & 0x7FFFFFFF


@dataclass
class Rules:
    """What a row samples, as a function of what it sees and of its parameters."""

    never: frozenset[int] = frozenset()  # ids this model never says

    def token(self, seen: list[int], draw: tuple[int, ...], forbidden: frozenset[int]) -> int:
        token = mix([*seen, *draw]) % VOCAB
        while token in forbidden or token in self.never:
            token = (token + 1) % VOCAB
        return token

    def logprob(self, seen: list[int], token: int) -> float:
        return -float(np.float32(1 + (sum(seen) * 31 + token) % 1009) / np.float32(64))


class HashRunner:
    def __init__(self, info: RunnerInfo, rules: Rules | None = None) -> None:
        self.info = info
        self.rules = rules or Rules()
        self.pages = [
            np.full((info.slabs * group.pages_per_slab, PAGE_TOKENS, 2), POISON, np.int64)
            for group in info.groups
        ]
        self.slab_of: dict[int, int] = {}  # slab → group that wrote it last
        self.fail_next = False
        self.refuses: Callable[[Batch], bool] = lambda batch: False
        self.not_finite: Callable[[int], bool] = lambda token: False
        self.batches: list[Batch] = []
        self.closed = False

    # ------------------------------------------------------------------------- Runner protocol

    def submit(self, batch: Batch) -> HashRunner:
        if self.refuses(batch):
            raise ValueError("scripted refusal")
        self.batches.append(batch)
        self.batch = batch
        return self

    def result(self) -> StepResult:
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("scripted failure")
        batch = self.batch
        assert 1 <= len(batch.token_ids) <= self.info.max_tokens_per_step
        assert batch.positions.shape == (1, len(batch.token_ids))
        assert batch.query_start[-1] == len(batch.token_ids)
        assert (np.diff(batch.query_start) > 0).all()
        assert (np.diff(batch.logit_rows) > 0).all()
        for sequence in range(len(batch.kv_len)):
            self._write(sequence)
        return self._answer()

    def clear_pages(self, group: int, page_ids: np.ndarray) -> None:
        self.pages[group][page_ids] = POISON

    def copy_pages(self, group: int, sources: np.ndarray, targets: np.ndarray) -> None:
        assert set(sources.tolist()).isdisjoint(targets.tolist())
        cells, per_slab = self.pages[group], self.info.groups[group].pages_per_slab
        cells[targets] = cells[sources]
        self.slab_of.update(dict.fromkeys((targets // per_slab).tolist(), group))

    def read_pages(self, group: int, page_ids: np.ndarray, out: np.ndarray) -> None:
        assert out.dtype == np.uint8
        assert out.shape == (len(page_ids), PAGE_BYTES)
        out[:] = self.pages[group][page_ids].reshape(len(page_ids), -1).view(np.uint8)

    def write_pages(self, group: int, page_ids: np.ndarray, data: np.ndarray) -> None:
        cells, per_slab = self.pages[group], self.info.groups[group].pages_per_slab
        assert data.shape == (len(page_ids), PAGE_BYTES)
        cells[page_ids] = np.ascontiguousarray(data).view(np.int64).reshape(-1, PAGE_TOKENS, 2)
        self.slab_of.update(dict.fromkeys((page_ids // per_slab).tolist(), group))

    def close(self) -> None:
        self.closed = True

    # ----------------------------------------------------------------------------------- memory

    def _rows(self, sequence: int) -> tuple[int, int, int]:
        first, last = self.batch.query_start[sequence : sequence + 2].tolist()
        return first, last, int(self.batch.kv_len[sequence]) - (last - first)

    def _write(self, sequence: int) -> None:
        first, last, start = self._rows(sequence)
        expected = np.arange(start, start + last - first)
        assert (self.batch.positions[0, first:last] == expected).all()
        for group, table in enumerate(self.batch.block_tables):
            pages = table[sequence, expected // PAGE_TOKENS]
            for slab in set((pages // self.info.groups[group].pages_per_slab).tolist()):
                self.slab_of[slab] = group
            cells = self.pages[group]
            cells[pages, expected % PAGE_TOKENS, 0] = self.batch.token_ids[first:last]
            cells[pages, expected % PAGE_TOKENS, 1] = expected

    def _seen(self, sequence: int, position: int) -> list[int]:
        """What the row at `position` reads: tokens of every group, the window's only."""
        seen: list[int] = []
        for group, table in enumerate(self.batch.block_tables):
            window = self.info.groups[group].window
            first = 0 if window is None else max(0, position - window + 1)
            positions = np.arange(first, position + 1)
            pages = table[sequence, positions // PAGE_TOKENS]
            slabs = set((pages // self.info.groups[group].pages_per_slab).tolist())
            assert all(self.slab_of[slab] == group for slab in slabs), "a slab of another group"
            cells = self.pages[group][pages, positions % PAGE_TOKENS]
            assert (cells[:, 1] == positions).all(), "unwritten or foreign KV was read"
            seen += cells[:, 0].tolist()
        return seen

    # ---------------------------------------------------------------------------------- answers

    def _answer(self) -> StepResult:
        batch, sampling = self.batch, self.batch.sampling
        rows = len(batch.logit_rows)
        sequences = np.searchsorted(batch.query_start, batch.logit_rows, side="right") - 1
        tokens = np.zeros(rows, np.int32)
        logprobs = np.zeros(rows, np.float32)
        finite = np.ones(rows, bool)
        skipped = np.zeros(rows, bool)
        for mask, row in zip(sampling.masks, sampling.masked_rows.tolist(), strict=True):
            skipped[row] = mask[-1] == 0
        width = int(sampling.top_logprobs.max(initial=0))
        top_ids = np.zeros((rows, width), np.int32)
        top_logprobs = np.zeros((rows, width), np.float32)
        for index, row in enumerate(batch.logit_rows.tolist()):
            seen = self._seen(int(sequences[index]), int(batch.positions[0, row]))
            if skipped[index]:
                continue
            forbidden = self._forbidden(index)
            if len(forbidden) == VOCAB and not sampling.score[index]:
                finite[index] = False
                continue
            if sampling.score[index]:
                tokens[index] = sampling.score_token[index]
            else:
                tokens[index] = self.rules.token(seen, self._draw(index), forbidden)
            logprobs[index] = self.rules.logprob(seen, int(tokens[index]))
            for rank in range(int(sampling.top_logprobs[index])):
                top_ids[index, rank] = (sum(seen) + rank) % VOCAB
                top_logprobs[index, rank] = self.rules.logprob(seen, int(top_ids[index, rank]))
            finite[index] = not self.not_finite(int(batch.token_ids[row]))
        ranks = (tokens % 5 + 1).astype(np.int32)
        return StepResult(tokens, logprobs, ranks, finite, skipped, top_ids, top_logprobs)

    def _draw(self, index: int) -> tuple[int, ...]:
        """Everything that a draw depends on beside the logits."""
        sampling = self.batch.sampling
        first, last = sampling.history_start[index : index + 2].tolist()
        if sampling.temperature[index] == 0:
            key: tuple[int, ...] = ()
        else:
            seed = int(sampling.seed[index]) % (1 << 31)
            key = (seed, int(sampling.choice[index]), int(sampling.position[index]))
        history = sampling.history[first:last].tolist()
        return (*key, *history, int(sampling.prompt_len[index]))

    def _forbidden(self, index: int) -> frozenset[int]:
        sampling = self.batch.sampling
        first, last = sampling.bias_start[index : index + 2].tolist()
        ids = sampling.bias_ids[first:last][np.isneginf(sampling.bias_values[first:last])]
        forbidden = set(ids.tolist())
        for mask, row in zip(sampling.masks, sampling.masked_rows.tolist(), strict=True):
            if row == index:
                bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB]
                forbidden |= set(np.flatnonzero(bits == 0).tolist())
        return frozenset(forbidden)


@dataclass
class Answer:
    """What came for a request, from the engine or computed alone."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: str | None = None


def lone_answer(info: RunnerInfo, rules: Rules, request: EngineRequest) -> Answer:
    """The answer of `HashRunner` to a request, from its tokens alone."""
    sampling = request.sampling
    known = request.prompt_token_ids.tolist()
    prompt = len(known)
    resumed = [] if request.output_token_ids is None else request.output_token_ids.tolist()
    known += resumed

    def seen_at(position: int) -> list[int]:
        seen: list[int] = []
        for group in info.groups:
            first = 0 if group.window is None else max(0, position - group.window + 1)
            seen += known[first : position + 1]
        return seen

    def report(seen: list[int], token: int, top: int) -> TokenLogprobs:
        ids = tuple((sum(seen) + rank) % VOCAB for rank in range(top))
        values = tuple(rules.logprob(seen, other) for other in ids)
        return TokenLogprobs(token, rules.logprob(seen, token), token % 5 + 1, ids, values)

    answer = Answer([])
    if sampling.prompt_logprobs is not None:
        count = sampling.prompt_logprobs
        scores = [report(seen_at(t), known[t + 1], count) for t in range(prompt - 1)]
        answer.prompt_logprobs = [None, *scores]
    if sampling.logprobs is not None:
        answer.logprobs = []
    while True:
        produced = len(known) - prompt
        forbidden = set(request.stop_token_ids) if produced < request.min_tokens else set()
        if sampling.allowed_token_ids is not None:
            forbidden |= set(range(VOCAB)) - set(sampling.allowed_token_ids)
        for bad in sampling.bad_sequences:
            if len(bad) - 1 <= produced and known[len(known) - len(bad) + 1 :] == list(bad[:-1]):
                forbidden.add(bad[-1])
        key = () if sampling.temperature == 0 else (sampling.seed, sampling.choice, produced)
        draw = (*key, *known, prompt) if sampling.has_penalty else (*key, 0)
        seen = seen_at(len(known) - 1)
        token = rules.token(seen, draw, frozenset(forbidden))
        if answer.logprobs is not None:
            answer.logprobs.append(report(seen, token, sampling.logprobs or 0))
        known.append(token)
        answer.token_ids.append(token)
        if token in request.stop_token_ids and token not in forbidden:
            answer.finish_reason = "stop"
            return answer
        if len(known) - prompt == request.max_tokens:
            answer.finish_reason = "length"
            return answer
