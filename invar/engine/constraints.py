"""What bends a request's draws beside the numbers of the slot table: bias, bans, a mask.

What does not change from token to token is laid out once for each request; a step only copies it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from invar.engine.request import EngineRequest

MASK_BITS = 32  # ids of one mask word


@dataclass(frozen=True)
class Constraints:
    """The arrays of one request. Forbidden ids carry a bias of −inf."""

    bias_ids: np.ndarray  # int32 [n]: the caller's bias, and ids that never come
    bias_values: np.ndarray  # float32 [n]
    stop_ids: np.ndarray  # int32, ascending: forbidden before min_tokens
    min_tokens: int
    bad_sequences: tuple[tuple[np.ndarray, int], ...]  # int32 ids, and what must not follow them
    mask: np.ndarray | None  # as `SamplingBatch.masks` has them

    @classmethod
    def of(cls, request: EngineRequest, vocab_size: int) -> Constraints:
        sampling = request.sampling
        bias = dict(sampling.bias)
        bias.update((bad[0], -np.inf) for bad in sampling.bad_sequences if len(bad) == 1)
        allowed = sampling.allowed_token_ids
        return cls(
            bias_ids=np.array(list(bias), np.int32),
            bias_values=np.array(list(bias.values()), np.float32),
            stop_ids=np.array(sorted(request.stop_token_ids), np.int32),
            min_tokens=request.min_tokens,
            bad_sequences=tuple(
                (np.array(bad[:-1], np.int32), bad[-1])
                for bad in sampling.bad_sequences
                if len(bad) > 1
            ),
            mask=None if allowed is None else mask_of(allowed, vocab_size),
        )

    def bias(self, output: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Ids and values for the token after `output` (int32, the answer so far).

        An id may be there twice; −inf plus anything is −inf.
        """
        forbidden = self._forbidden(output)
        if not len(forbidden):
            return self.bias_ids, self.bias_values
        ids = np.concatenate((self.bias_ids, forbidden))
        values = np.full(len(ids), -np.inf, np.float32)
        values[: len(self.bias_values)] = self.bias_values
        return ids, values

    def allow_nothing(self, mask: np.ndarray, output: np.ndarray) -> bool:
        """Whether all that a mask leaves is forbidden after `output`.

        mask: as `SamplingBatch.masks` has them.
        """
        ids, values = self.bias(output)
        banned = ids[np.isneginf(values)].astype(np.uint32)
        words = mask[:-1].copy()
        np.bitwise_and.at(words, banned // MASK_BITS, ~(np.uint32(1) << banned % MASK_BITS))
        return not words.any()

    def _forbidden(self, output: np.ndarray) -> np.ndarray:
        """int32: what must not come now, though it may come later."""
        ids = [
            last
            for before, last in self.bad_sequences
            if len(before) <= len(output)
            and np.array_equal(output[len(output) - len(before) :], before)
        ]
        stops = self.stop_ids if len(output) < self.min_tokens else self.stop_ids[:0]
        return np.concatenate((stops, np.array(ids, np.int32))) if ids else stops


def mask_of(allowed: tuple[int, ...], vocab_size: int) -> np.ndarray:
    """uint32: bit id % 32 of word id // 32 is set where id is allowed; the last word says that it
    is ready."""
    bits = np.zeros(mask_words(vocab_size) * MASK_BITS, np.uint8)
    bits[np.array(allowed, np.int64)] = 1
    words = np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)
    return np.append(words, np.uint32(1))


def mask_words(vocab_size: int) -> int:
    return -(-vocab_size // MASK_BITS)
