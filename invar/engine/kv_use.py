"""What the pages in use are used for, in bytes: room that holds no token, and what is saved."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from invar.backends.runner import PAGE_TOKENS
from invar.engine.kv import KVMemory


@dataclass(frozen=True)
class KVUse:
    """Bytes now."""

    owned: int  # pages of requests and of the prefix cache
    unfilled: int  # room in them for tokens that are not known
    saved_by_sharing: int  # that requests would have more, had each of them pages of its own
    saved_by_windows: int  # that owned would be more if every layer kept all tokens

    @property
    def unfilled_share(self) -> float:
        return self.unfilled / self.owned if self.owned else 0.0


def kv_use(memory: KVMemory, known: Iterable[tuple[int, int]]) -> KVUse:
    """known: of every request with pages its slot, and how many tokens are known of it: written, or
    to be written next."""
    tree = memory.tree
    pages, room = (
        tree.num_pages,
        [tree.num_pages * PAGE_TOKENS - tree.num_tokens] * len(memory.pools),
    )
    for slot, tokens in known:
        holding = memory.held[slot]
        pages += max(held.end for held in holding.groups) - holding.shared
        for group, held in enumerate(holding.groups):
            if held.end > holding.shared:
                room[group] += max(0, held.end * PAGE_TOKENS - tokens)
    owned = unfilled = shared = windows = 0
    for pool, tokens in zip(memory.pools, room, strict=True):
        page_bytes = pool.group.page_bytes
        owned += pool.num_owned * page_bytes
        unfilled += tokens * page_bytes // PAGE_TOKENS
        shared += (pool.num_named - pool.num_used) * page_bytes
        if pool.group.window is not None:
            windows += (pages - pool.num_owned) * page_bytes
    return KVUse(owned, unfilled, shared, windows)
