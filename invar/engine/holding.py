"""What a request that has a slot holds of KV memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from invar._native import RadixNode
from invar.backends.runner import PAGE_TOKENS
from invar.engine.pages import PageIds
from invar.engine.radix import RadixTree

if TYPE_CHECKING:
    from invar.engine.stored_prefix import StoredPrefix

TokenIds = npt.NDArray[np.int32]


@dataclass(slots=True)
class Held:
    """The pages ``[first, end)`` of a request's table in one group, counted in pages."""

    first: int
    end: int


@dataclass(slots=True)
class Holding:
    """Of one request."""

    ids: TokenIds  # the request's own, of which at least the computed ones are known
    groups: tuple[Held, ...]
    node: RadixNode  # where its shared pages end
    shared: int  # pages of the table that are the tree's
    computed: int  # tokens
    publishes: bool  # its whole pages go to the tree
    generation: int  # of the tree when it came
    stored: StoredPrefix | None = None  # what it has to do with the page store

    def check_integrity(self, tree: RadixTree, tables: Sequence[PageIds]) -> None:
        """tables: of each group the request's row. Raises AssertionError where what is shared is
        not what the tree has."""
        assert self.shared == self.node.end
        whole = self.computed // PAGE_TOKENS if self.publishes else 0
        assert self.shared == whole, "a full page that is not the tree's"
        for group, (held, table) in enumerate(zip(self.groups, tables, strict=True)):
            assert 0 <= held.first <= held.end
            if held.first < held.end:
                assert (table[: held.first] == table[held.first]).all()
            shared = table.copy()
            tree.pages_of(self.node, group, shared, held.first)
            assert np.array_equal(shared, table), "table and tree differ"
        path, node = b"", self.node
        while node.parent is not None:
            path, node = node.key + path, node.parent
        assert self.ids[: self.shared * PAGE_TOKENS].tobytes() == path, "ids of strangers"
