"""Work that would hold up other clients is done beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# Characters, tokens or alternatives. Python looks at about a million of them a second, so what
# stays on the event loop stays there for some 20 ms at most.
INLINE_ITEMS = 20_000


async def beside_loop(items: int, work: Callable[[], T]) -> T:
    """What ``work`` returns; done on a thread if it goes through many items."""
    return await asyncio.to_thread(work) if items > INLINE_ITEMS else work()
