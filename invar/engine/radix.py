"""The prefix cache: a radix tree over token ids whose nodes own pages.

A root stands for a `cache_salt`: nothing is shared between two roots.

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
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from invar._native import common_ids
from invar.backends.runner import PAGE_TOKENS
from invar.engine.pages import PageIds, PagePool
from invar.engine.radix_node import ID_BYTES, PAGE_BYTES, Node, RootName

Free = Callable[[int, PageIds], None]  # (group, pages that nobody uses)


@dataclass
class Match:
    """What is there of a prompt. Stays true until the tree is mutated."""

    node: Node | None = None  # the deepest node of which whole pages match; None: the root
    pages: int = 0  # that match whole, from the root on; the node may have more
    source: Node | None = None  # begins (after a split of `node`) with a page that matches partly
    lent: tuple[int, ...] | None = None  # in its place, per group: the page of a running request
    tail_tokens: int = 0  # that match in it

    @property
    def tokens(self) -> int:
        return self.pages * PAGE_TOKENS + self.tail_tokens


class RadixTree:
    """Owner of the pages of finished prefixes. Belongs to the engine's thread."""

    def __init__(self, pools: Sequence[PagePool], free: Free) -> None:
        """free: called for pages that leave the tree."""
        self.pools = pools
        self.free = free
        self.windows = [
            (group, pool.group.window)
            for group, pool in enumerate(pools)
            if pool.group.window is not None
        ]
        self.generation = 0
        self.roots: dict[RootName, Node] = {}
        self.clock = 0
        self.serials = itertools.count()
        self.leaves: list[tuple[int, int, Node]] = []  # a heap; used_at may be out of date
        self.wide: dict[Node, None] = {}  # may have pages before their last window
        self.num_tokens = 0
        self.num_pages = 0  # of the tokens, whether or not a window group still has them
        self.num_evicted_tokens = 0

    # -------------------------------------------------------------------------------- matching

    def match(self, salt: str | None, data: bytes) -> Match:
        """Mutates nothing. data: ids that may be reused, as bytes of int32."""
        node = self.roots.get((self.generation, salt))
        if node is None:
            return Match()
        position = 0
        while found := node.nearest(data, position):
            child, common = found
            whole, tail = divmod(common, PAGE_TOKENS)
            if tail or whole < child.num_pages:
                deepest = child if whole else node
                return Match(deepest, node.end + whole, child if tail else None, None, tail)
            node, position = child, position + common
        return Match(node, node.end)

    def usable(self, match: Match) -> Match:
        """Mutates nothing. The longest part of a match whose last window is there in every group:
        all of it, its whole pages, or those up to the end of an earlier node."""
        node, pages = match.node, match.pages
        if node is None or not self.windows:
            return match
        if match.tail_tokens and self._has_windows(node, pages, match.tokens):
            source = match.source
            page = 0 if source is None or source is not node else pages - node.start
            if source is None or all(first <= page for first in source.first):
                return match
        while node.parent is not None:
            if self._has_windows(node, pages, pages * PAGE_TOKENS):
                return Match(node, pages)
            node, pages = node.parent, node.start
        return Match(node, 0)

    def _has_windows(self, node: Node, pages: int, tokens: int) -> bool:
        return all(
            self._has_window(group, behind_window(tokens, window), node, pages)
            for group, window in self.windows
        )

    def _has_window(self, group: int, needed: int, node: Node, end: int) -> bool:
        """Whether the group's pages ``[needed, end)`` are there; `node` has page ``end - 1``."""
        while needed < end and node.parent is not None:
            if max(needed, node.start) < node.start + node.first[group]:
                return False
            node, end = node.parent, node.start
        return True

    # --------------------------------------------------------------------------------- holding

    def hold(self, match: Match, salt: str | None) -> Node:
        """Mutates: the node whose end is that of the match's whole pages, held. To be released."""
        node = match.node
        if node is None:
            node = self._root(salt)
        elif match.pages < node.end:
            node = self._split(node, match.pages - node.start)
        node.holders += 1
        self._touch(match.source or node)
        return node

    def _root(self, salt: str | None) -> Node:
        name = (self.generation, salt)
        if name not in self.roots:
            root = self._new(None, 0, b"", [])
            root.name = name
            self.roots[name] = root
        return self.roots[name]

    def release(self, node: Node) -> None:
        """Mutates: a node that was held or got as the end of an insertion may be evicted."""
        node.holders -= 1
        self._settle(node)

    def pages_of(self, node: Node, group: int, table: np.ndarray, first: int) -> None:
        """Writes the group's pages ``[first, end of node)`` into a block table."""
        end = node.end
        while first < end and node.parent is not None:
            begin = max(first, node.start)
            table[begin:end] = node.pages[group][begin - node.start : end - node.start]
            node, end = node.parent, node.start

    def tail_pages(self, match: Match) -> tuple[int, ...] | None:
        """Per group the page to copy from, once the match is held. None: it has been evicted."""
        if match.source is None:
            return match.lent
        if not match.source.key or any(match.source.first):
            return None
        return tuple(int(pages[0]) for pages in match.source.pages)

    # ------------------------------------------------------------------------------- inserting

    def insert(
        self, node: Node, data: bytes, runs: Sequence[PageIds], first: Sequence[int] | None = None
    ) -> tuple[Node, Sequence[PageIds] | None]:
        """Mutates: whole pages of ids that follow `node`, which the caller holds; the hold moves to
        the node that is returned.

        runs: per group the caller's page for each; the arrays may become the tree's. first: per
        group, the caller has none before this one. Returned beside the node: None where the tree
        had none of these ids; else per group the page for each that is the tree's now.
        """
        kept: list[PageIds] | None = None
        first = first or [0] * len(runs)
        position, total = 0, len(runs[0])
        while position < total:
            page = data[position * PAGE_BYTES : (position + 1) * PAGE_BYTES]
            index = bisect_left(node.keys, page)
            missing = [max(0, begin - position) for begin in first]
            if index == len(node.keys) or node.keys[index] != page:
                rest = [run[position:] for run in runs]
                child = self._append(node, index, data[position * PAGE_BYTES :], rest, missing)
                stop = total
            else:
                child = self._begun(node.children[index], data, position * PAGE_TOKENS)
                stop = position + child.num_pages
                kept = kept or [run.copy() for run in runs]
                self._exchange(child, [run[position:stop] for run in kept], missing)
            node.holders -= 1
            child.holders += 1
            node, position = child, stop
        self._touch(node)
        return node, kept

    def _exchange(self, node: Node, runs: Sequence[PageIds], missing: Sequence[int]) -> None:
        """Of pages that are there twice the tree's stay; those that it lacks, it takes."""
        for group, (run, first) in enumerate(zip(runs, missing, strict=True)):
            gone = node.first[group]
            node.pages[group][first:gone] = run[first:gone]
            node.first[group] = min(first, gone)
            run[gone:] = node.pages[group][gone:]
        self._widen(node)

    def insert_tail(self, node: Node, data: bytes, pages: Sequence[PageIds]) -> bool:
        """Mutates: a page that is not full, of a request that holds `node` and ends.

        Per group one page. False where the tree has these ids already: then the page is not taken.
        """
        found = node.nearest(data, 0) if node.children else None
        if found is not None and found[1] == len(data) // ID_BYTES:
            self._touch(found[0])
            return False
        own = [page.copy() for page in pages]
        index = bisect_left(node.keys, data)
        self._touch(self._append(node, index, data, own, [0] * len(own)))
        return True

    def _begun(self, child: Node, data: bytes, position: int) -> Node:
        """A child that begins with the page at id `position`, cut where it leaves what follows."""
        whole = common_ids(child.key, data, position) // PAGE_TOKENS
        return child if whole == child.num_pages else self._split(child, whole)

    def _append(
        self, node: Node, index: int, data: bytes, pages: list[PageIds], missing: Sequence[int]
    ) -> Node:
        """A leaf that only the caller holds grows, unless pages are missing behind it; any other
        node gets a child, to stand at `index` among the others, whose own the arrays of pages are
        from now on."""
        self.num_tokens += len(data) // ID_BYTES
        self.num_pages += len(pages[0])
        if index and data.startswith(node.keys[index - 1]):
            # A partly filled page that a fuller one begins with is of no more use.
            index -= 1
            self._trim(node.children[index], 1)
        if node.children or node.holders > 1 or node.parent is None or any(missing):
            child = self._new(node, node.end, data, pages)
            child.first = list(missing)
            node.put(index, child)
            node = child
            self._settle(node)
        else:
            node.key += data
            both = zip(node.pages, pages, strict=True)
            node.pages = [np.concatenate((old, new)) for old, new in both]
        self._widen(node)
        return node

    def _split(self, node: Node, pages: int) -> Node:
        """Cuts a node's first `pages` pages off as its new parent, which is returned."""
        parent = node.parent
        assert parent is not None
        assert 0 < pages < node.num_pages
        upper = self._new(
            parent, node.start, node.key[: pages * PAGE_BYTES], [p[:pages] for p in node.pages]
        )
        upper.first = [min(first, pages) for first in node.first]
        upper.used_at = node.used_at
        parent.children[parent.index(node)] = upper
        node.parent, node.start = upper, node.start + pages
        node.key = node.key[pages * PAGE_BYTES :]
        node.pages = [p[pages:] for p in node.pages]
        node.first = [max(0, first - pages) for first in node.first]
        upper.put(0, node)
        self._widen(upper)
        return upper

    def _new(self, parent: Node | None, start: int, key: bytes, pages: list[PageIds]) -> Node:
        return Node(parent, start, key, pages, next(self.serials))

    def _touch(self, node: Node | None) -> None:
        self.clock += 1
        while node is not None:
            node.used_at = self.clock
            node = node.parent

    def _settle(self, node: Node) -> None:
        """To be called where a node may have become a leaf: queues it, or forgets an empty root."""
        if node.is_leaf:
            if not node.queued:
                node.queued = True
                heapq.heappush(self.leaves, (node.used_at, node.serial, node))
        elif node.name is not None and not node.children and not node.holders:
            del self.roots[node.name]

    # -------------------------------------------------------------------------------- evicting

    def evict(self, pages: int) -> bool:
        """Mutates: frees something that no request uses, `pages` pages of a group if there are so
        many in one place. False when there is nothing left to evict.

        In this order: pages before the last window of a node's end (they serve only prompts that
        part from the node's run in its middle); from the least recently used leaf the last pages;
        at last windows that end in the middle of running requests.
        """
        wide = bool(self.wide) and self._evict_wide()
        return wide or self._evict_leaf(pages) or self._evict_windows()

    def clear(self) -> None:
        """Mutates: evicts all that no running request uses."""
        while self.evict(1 << 30):
            pass

    def reset(self) -> None:
        """Mutates: nothing computed so far is found any more. What running requests use leaves the
        memory with them."""
        self.clear()
        self.generation += 1

    def forget(self, node: Node) -> None:
        """Mutates: evicts what nobody else uses of the path to a node, which was released."""
        while node.is_leaf:
            parent = node.parent
            self._trim(node, node.num_pages)
            assert parent is not None
            node = parent

    def _evict_leaf(self, pages: int) -> bool:
        while self.leaves:
            used_at, serial, node = self.leaves[0]
            if not node.is_leaf:
                heapq.heappop(self.leaves)
                node.queued = False
            elif node.used_at != used_at:
                heapq.heapreplace(self.leaves, (node.used_at, serial, node))
            else:
                before = self.num_tokens
                self._trim(node, min(pages, node.num_pages))
                self.num_evicted_tokens += before - self.num_tokens
                return True
        return False

    def _trim(self, node: Node, count: int) -> None:
        """Gives a leaf's last `count` pages back; one without pages leaves the tree."""
        left = node.num_pages - count
        for group, pages in enumerate(node.pages):
            self.free(group, pages[max(left, node.first[group]) :])
        key = node.key[: left * PAGE_BYTES]
        self.num_tokens -= (len(node.key) - len(key)) // ID_BYTES
        self.num_pages -= count
        if left:
            node.key = key
            node.pages = [pages[:left] for pages in node.pages]
            node.first = [min(first, left) for first in node.first]
        else:
            parent = node.parent
            assert parent is not None
            parent.remove(node)
            node.parent, node.key = None, b""
            self.wide.pop(node, None)
            self._settle(parent)

    def _widen(self, node: Node) -> None:
        if self.windows:
            self.wide[node] = None

    def _evict_wide(self) -> bool:
        for node in list(self.wide):
            freed, blocked = False, False
            for group, window in self.windows:
                stop = behind_window(node.end_tokens, window) - node.start
                freed |= self._evict_front(node, group, stop)
                blocked |= node.first[group] < min(stop, node.num_pages)
            if not blocked:
                del self.wide[node]
            if freed:
                return True
        return False

    def _evict_windows(self) -> bool:
        freed = False
        for node in self.nodes():
            for group, _ in self.windows:
                freed |= self._evict_front(node, group, node.num_pages)
        return freed

    def _evict_front(self, node: Node, group: int, stop: int) -> bool:
        """Frees pages before index `stop`, up to the first one in use."""
        first = node.first[group]
        pages = node.pages[group][first : max(first, min(stop, node.num_pages))]
        pages = pages[: self.pools[group].leading_unused(pages)]
        if not len(pages):
            return False
        node.first[group] = first + len(pages)
        self.free(group, pages)
        return True

    # --------------------------------------------------------------------------------- looking

    def nodes(self) -> Iterator[Node]:
        """All nodes but the roots, parents first."""
        stack = list(self.roots.values())
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack += node.children

    def check_integrity(self, holders: Sequence[Node]) -> None:
        """holders: of each running request the node where its shared pages end."""
        queued = {node for _, _, node in self.leaves}
        assert len(queued) == len(self.leaves)
        for root in self.roots.values():
            assert root.children or root.holders, "an empty root"
        for node in [*self.roots.values(), *self.nodes()]:
            assert node.keys == [child.first_page for child in node.children] == sorted(node.keys)
            for left, right in itertools.pairwise(node.keys):
                assert not right.startswith(left), "a page that a sibling begins with"
            assert all(child.parent is node and child.start == node.end for child in node.children)
            assert node.holders == sum(holder is node for holder in holders)
            assert node.queued == (node in queued)
            assert node.queued or not node.is_leaf, "a leaf that cannot be evicted"
            assert not len(node.key) % PAGE_BYTES or not node.children
            for first, pages in zip(node.first, node.pages, strict=True):
                assert 0 <= first <= len(pages) == node.num_pages
            if node.parent is not None:
                assert node.num_pages, "an empty node"
        names = set(self.nodes()) | set(self.roots.values())
        assert names.issuperset(holders), "a request holds a node that has left the tree"
        assert names.issuperset(self.wide)
        assert self.num_tokens == sum(len(node.key) for node in self.nodes()) // ID_BYTES
        assert self.num_pages == sum(node.num_pages for node in self.nodes())


def behind_window(tokens: int, window: int) -> int:
    """The first page that a row at position `tokens` sees."""
    return max(0, tokens - window + 1) // PAGE_TOKENS
