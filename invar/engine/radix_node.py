"""A node of the prefix cache's tree.

A node is a run of pages that follows its parent's. Its key is the ids of the run as bytes, so that
comparing is `memcmp`; only a leaf may end within a page. Children are sorted by the ids of their
first page, and no two begin with the same page. What has the longest common prefix with a page
is then next to where the page would stand, so a partly matching page is found without looking at
the other children.
"""

from __future__ import annotations

from bisect import bisect_left

from invar._native import common_ids
from invar.backends.runner import PAGE_TOKENS
from invar.engine.pages import PageIds

ID_BYTES = 4  # int32
PAGE_BYTES = PAGE_TOKENS * ID_BYTES  # of ids

RootName = tuple[int, str | None]  # (generation, cache_salt)


class Node:
    """A run of pages. A root has none."""

    __slots__ = (
        "children", "first", "holders", "key", "keys", "name", "pages", "parent", "queued",
        "serial", "start", "used_at",
    )  # fmt: skip

    def __init__(
        self, parent: Node | None, start: int, key: bytes, pages: list[PageIds], serial: int
    ) -> None:
        self.parent = parent
        self.start = start  # pages before it
        self.key = key
        self.pages = pages  # per group, one for each page of the key
        self.first = [0] * len(pages)  # per group: pages before that are gone
        self.keys: list[bytes] = []  # of the children: their first pages, ascending
        self.children: list[Node] = []
        self.holders = 0  # running requests whose shared pages end with this node
        self.used_at = 0
        self.queued = False  # among the leaves to evict
        self.serial = serial
        self.name: RootName | None = None  # of a root

    @property
    def num_pages(self) -> int:
        return -(-len(self.key) // PAGE_BYTES)

    @property
    def end(self) -> int:
        return self.start + self.num_pages

    @property
    def end_tokens(self) -> int:
        return self.start * PAGE_TOKENS + len(self.key) // ID_BYTES

    @property
    def first_page(self) -> bytes:
        return self.key[:PAGE_BYTES]

    @property
    def is_leaf(self) -> bool:
        """Whether it can be evicted."""
        return not self.children and not self.holders and self.parent is not None

    def nearest(self, data: bytes, position: int) -> tuple[Node, int] | None:
        """The child that has most ids in common with what begins at id `position`, and how many
        they are; None where no child has any."""
        keys, at = self.keys, position * ID_BYTES
        page = data[at : at + PAGE_BYTES]
        index = bisect_left(keys, page)
        if index < len(keys) and keys[index] == page:
            child = self.children[index]
            return child, common_ids(child.key, data, position)
        best, most, first = None, 0, page[:ID_BYTES]
        for beside in (index - 1, index):
            if first and 0 <= beside < len(keys) and keys[beside].startswith(first):
                common = common_ids(keys[beside], page)
                if common > most:
                    best, most = self.children[beside], common
        return (best, most) if best is not None else None

    def put(self, index: int, child: Node) -> None:
        """A child whose first page stands at `index` among the others'."""
        self.keys.insert(index, child.first_page)
        self.children.insert(index, child)

    def remove(self, child: Node) -> None:
        index = self.index(child)
        del self.keys[index], self.children[index]

    def index(self, child: Node) -> int:
        return bisect_left(self.keys, child.first_page)
