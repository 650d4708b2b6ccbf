"""Masks that answers to one grammar share while they go the same way.

Requests for the same tool, or records of one schema, begin alike: what may come after the same
tokens of the same grammar is the same mask, so that one of them has it written and the others copy.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]

PLACES = 1024  # of a grammar that are told apart: beginnings, where answers are still alike
MASKS = 32  # of a grammar that are kept, the newest: 16 KB each for 128,000 tokens


class Place:
    """Where an answer is after certain tokens of its grammar. An engine's thread goes from place to
    place, the threads of its `MaskWriter` read and keep masks."""

    __slots__ = ("_after", "_all", "mask")

    def __init__(self, all_places: SharedMasks) -> None:
        self.mask: Words | None = None  # of the grammar alone, whatever a request adds to it
        self._after: dict[int, Place] = {}
        self._all = all_places

    def after(self, token: int) -> Place | None:
        """None: beyond the places that are told apart."""
        found = self._after.get(token)
        if found is None and self._all.left > 0:
            self._all.left -= 1
            found = self._after[token] = Place(self._all)
        return found

    def keep(self, mask: Words) -> None:
        self.mask = mask.copy()
        self._all.kept.append(self)
        if len(self._all.kept) > MASKS:
            self._all.kept.popleft().mask = None


class SharedMasks:
    """Of one grammar."""

    def __init__(self) -> None:
        self.left = PLACES
        self.kept: deque[Place] = deque()
        self.start = Place(self)
