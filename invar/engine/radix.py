"""The prefix cache: a radix tree over token ids whose nodes own pages.

A root stands for a `cache_salt`: nothing is shared between two roots. A node is a run of pages that
follows its parent's; only a leaf may end within a page, and no two children begin with the same.

Pages of tokens that a request computed, with S shared, C computed, F behind its window:

| tokens       | owner | of the tree's pages a request uses | evicted                            |
|--------------|-------|------------------------------------|------------------------------------|
| ``[0, F)``   | tree  | none (window groups)               | first, unless a node's last window |
| ``[F, S)``   | tree  | all                                | never while the request runs       |
| ``[S, C)``   | the request; the tree once it ends (its last page, partly filled)         ||

S is C rounded down to a page: a page goes to the tree when it is full, so a request that comes with
the same prompt finds what the first one has computed so far. The end of a running request's shared
pages is the end of a node (`holders` counts them), so what a request uses of a node in a window
group is a suffix of it, and so is what is left there of pages: ``pages[first:]``.

The tree is native (`native/runtime/radix.h` has its calls): every request looks through thousands
of ids and pages. It belongs to the engine's thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from invar import _native
from invar._native import RadixNode, SlabArbiter
from invar.backends.runner import PAGE_TOKENS
from invar.engine.pages import PageIds, PagePool

ID_BYTES = 4  # int32
PAGE_BYTES = PAGE_TOKENS * ID_BYTES  # of ids


class RadixTree(_native.RadixTree):
    """Owner of the pages of finished prefixes."""

    def __init__(
        self,
        arbiter: SlabArbiter,
        pools: Sequence[PagePool],
        on_free: Callable[[int, PageIds], None] | None,
    ) -> None:
        """on_free: told of the group and pages that are about to be free"""
        super().__init__(arbiter, pools, [pool.group.window for pool in pools], on_free)

    # ------------------------------------------------------------------------------------ tests

    def check_integrity(self, holders: Sequence[RadixNode]) -> None:
        """holders: of each running request the node where its shared pages end."""
        roots, nodes, leaves = self.roots, self.nodes(), self.leaves()
        for root in roots:
            assert root.children or root.holders, "an empty root"
            assert root.parent is None
            assert not root.key
        for node in [*roots, *nodes]:
            children, end, num_pages = node.children, node.end, node.num_pages
            pages = [child.key[:PAGE_BYTES] for child in children]
            order = [memoryview(page).cast("i").tolist() for page in pages]
            assert order == sorted(order)
            for left, right in itertools.pairwise(pages):
                assert not right.startswith(left), "a page that a sibling begins with"
            assert all(child.parent is node and child.start == end for child in children)
            assert node.holders == sum(holder is node for holder in holders)
            assert node.is_leaf == (node in leaves), (
                "a leaf that cannot be evicted, or none that can"
            )
            assert not len(node.key) % PAGE_BYTES or not children
            assert num_pages == -(-len(node.key) // PAGE_BYTES)
            for first, run in zip(node.first, node.pages, strict=True):
                assert 0 <= first <= len(run) == num_pages
            assert node.key or node.parent is None, "an empty node"
        assert len(set(leaves)) == len(leaves)
        names = {*roots, *nodes}
        assert names.issuperset(leaves)
        assert names.issuperset(holders), "a request holds a node that has left the tree"
        assert self.num_tokens == sum(len(node.key) for node in nodes) // ID_BYTES
        assert self.num_pages == sum(node.num_pages for node in nodes)
