"""A step's chunks as the arrays that the backend takes.

What stays the same for the whole life of a request is laid out once: its numbers in its slot of
`SlotTable`, from which a step gathers, and what few requests have (bias, masks) in `Constraints`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from invar.backends.runner import Batch, RunnerInfo, SamplingBatch
from invar.engine.constraints import Constraints
from invar.engine.kv import KVMemory
from invar.engine.request import Sampling
from invar.engine.state import Chunk, RequestState

Drawing = tuple[int, RequestState]  # index among the logit rows, the request that draws there

NO_FEEDBACK = np.empty((0, 2), np.int32)
NO_IDS = np.empty(0, np.int32)
NO_VALUES = np.empty(0, np.float32)


class SlotTable:
    """Sampling parameters by slot, ``[slots]`` each."""

    def __init__(self, slots: int) -> None:
        self.temperature = np.zeros(slots, np.float32)
        self.top_k = np.zeros(slots, np.int32)
        self.top_p = np.ones(slots, np.float32)
        self.min_p = np.zeros(slots, np.float32)
        self.seed = np.zeros(slots, np.uint64)
        self.choice = np.zeros(slots, np.int32)
        self.repetition_penalty = np.ones(slots, np.float32)
        self.frequency_penalty = np.zeros(slots, np.float32)
        self.presence_penalty = np.zeros(slots, np.float32)
        self.logprobs = np.zeros(slots, np.int32)

    def write(self, slot: int, sampling: Sampling) -> None:
        self.temperature[slot] = sampling.temperature
        self.top_k[slot] = sampling.top_k
        self.top_p[slot] = sampling.top_p
        self.min_p[slot] = sampling.min_p
        self.seed[slot] = sampling.seed
        self.choice[slot] = sampling.choice
        self.repetition_penalty[slot] = sampling.repetition_penalty
        self.frequency_penalty[slot] = sampling.frequency_penalty
        self.presence_penalty[slot] = sampling.presence_penalty
        self.logprobs[slot] = sampling.logprobs or 0


class BatchBuilder:
    """Turns chunks into a `Batch`. Holds nothing that outlives a request but its slot's entry."""

    def __init__(self, info: RunnerInfo, memory: KVMemory) -> None:
        self.memory = memory
        self.table = SlotTable(info.max_sequences)
        self.vocab_size = info.vocab_size
        # slot → the request whose parameters it holds; None where it holds nobody's yet
        self.written: list[RequestState | None] = [None] * info.max_sequences

    def build(self, chunks: Sequence[Chunk]) -> Batch:
        slots = np.array([self._slot(chunk.state) for chunk in chunks], np.int32)
        start = np.array([chunk.start for chunk in chunks], np.int32)
        end = np.array([chunk.end for chunk in chunks], np.int32)
        query_start = starts_of(end - start, np.int32)
        token_ids = np.concatenate([c.state.token_ids[c.start : c.end] for c in chunks])
        positions = np.arange(query_start[-1], dtype=np.int32)
        positions += np.repeat(start - query_start[:-1], end - start)
        return Batch(
            token_ids=token_ids,
            feedback=NO_FEEDBACK,
            positions=positions[np.newaxis],
            query_start=query_start,
            kv_len=end,
            block_tables=self.memory.block_tables(slots, int(end.max())),
            logit_rows=logit_rows(chunks, query_start),
            sampling=self._sampling(chunks, slots),
        )

    def _slot(self, state: RequestState) -> int:
        assert state.slot is not None
        if self.written[state.slot] is not state:
            self.written[state.slot] = state
            self.table.write(state.slot, state.request.sampling)
        return state.slot

    def _sampling(self, chunks: Sequence[Chunk], slots: np.ndarray) -> SamplingBatch:
        """Rows in the order of `logit_rows`: of each chunk its score rows, then its draw."""
        table = self.table
        row_counts = np.array([chunk.num_logit_rows for chunk in chunks], np.int32)
        outputs = np.array([chunk.state.num_output_tokens for chunk in chunks], np.int32)
        slot = np.repeat(slots, row_counts)
        score, score_token, top = self._scores(chunks, slot)
        special = [(row, state) for row, state in drawing(chunks) if state.draws_specially]
        history, history_start, prompt_len = self._histories(special, len(slot))
        bias_ids, bias_values, bias_start = self._biases(special, len(slot))
        masks, masked_rows = self._masks(special)
        return SamplingBatch(
            temperature=table.temperature[slot],
            top_k=table.top_k[slot],
            top_p=table.top_p[slot],
            min_p=table.min_p[slot],
            seed=table.seed[slot],
            choice=table.choice[slot],
            position=np.repeat(outputs, row_counts),
            repetition_penalty=table.repetition_penalty[slot],
            frequency_penalty=table.frequency_penalty[slot],
            presence_penalty=table.presence_penalty[slot],
            history=history,
            history_start=history_start,
            prompt_len=prompt_len,
            bias_ids=bias_ids,
            bias_values=bias_values,
            bias_start=bias_start,
            masks=masks,
            masked_rows=masked_rows,
            score=score,
            score_token=score_token,
            top_logprobs=top,
        )

    def _scores(
        self, chunks: Sequence[Chunk], slot: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Which rows only report a known token, that token, and how many alternatives."""
        score = np.zeros(len(slot), bool)
        score_token = np.zeros(len(slot), np.int32)
        top = self.table.logprobs[slot]
        row = 0
        for chunk in chunks:
            if scored := chunk.score_rows:
                rows = slice(row, row + len(scored))
                score[rows] = True
                score_token[rows] = chunk.state.token_ids[scored.start + 1 : scored.stop + 1]
                of_prompt = max(
                    0, min(len(scored), chunk.state.num_prompt_tokens - 1 - scored.start)
                )
                top[row : row + of_prompt] = chunk.state.request.sampling.prompt_logprobs or 0
            row += chunk.num_logit_rows
        return score, score_token, top

    def _histories(
        self, special: Sequence[Drawing], rows: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Prompt and output of the rows that draw under a penalty; nothing for the others."""
        parts, lengths = [], np.zeros(rows, np.int64)
        prompt_len = np.zeros(rows, np.int32)
        for row, state in special:
            if state.request.sampling.has_penalty:
                parts.append(state.token_ids[: state.num_tokens])
                lengths[row] = state.num_tokens
                prompt_len[row] = state.num_prompt_tokens
        history = np.concatenate(parts) if parts else NO_IDS
        return history, starts_of(lengths, np.int64), prompt_len

    def _biases(
        self, special: Sequence[Drawing], rows: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The caller's bias, and −inf on what must not come now."""
        ids, values = [NO_IDS], [NO_VALUES]
        lengths = np.zeros(rows, np.int64)
        for row, state in special:
            biased, bias = self._constraints(state).bias(state.output_token_ids)
            ids.append(biased)
            values.append(bias)
            lengths[row] = len(biased)
        return np.concatenate(ids), np.concatenate(values), starts_of(lengths, np.int64)

    def _masks(self, special: Sequence[Drawing]) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
        masks, rows = [], []
        for row, state in special:
            mask = self._constraints(state).mask if state.guide is None else state.guide.mask
            if mask is not None:
                masks.append(mask)
                rows.append(row)
        return tuple(masks), np.array(rows, np.int32)

    def _constraints(self, state: RequestState) -> Constraints:
        if state.constraints is None:
            state.constraints = Constraints.of(state.request, self.vocab_size)
        return state.constraints


def starts_of(lengths: np.ndarray, dtype: type[np.signedinteger]) -> np.ndarray:
    """``[n + 1]``: where each of n ranges begins, and where the last one ends."""
    starts = np.zeros(len(lengths) + 1, dtype)
    np.cumsum(lengths, out=starts[1:])
    return starts


def logit_rows(chunks: Sequence[Chunk], query_start: np.ndarray) -> np.ndarray:
    """int32, ascending: the rows of the batch that score or draw."""
    rows: list[int] = []
    for chunk, first in zip(chunks, query_start.tolist(), strict=False):
        rows += [first + token - chunk.start for token in chunk.score_rows]
        if chunk.samples:
            rows.append(first + chunk.end - chunk.start - 1)
    return np.array(rows, np.int32)


def drawing(chunks: Sequence[Chunk]) -> list[Drawing]:
    """The rows that draw a token."""
    drawn, row = [], 0
    for chunk in chunks:
        row += chunk.num_logit_rows
        if chunk.samples:
            drawn.append((row - 1, chunk.state))
    return drawn
