"""Pages for tests of the page store: any number of them in a row, bytes that follow from the key.

`python -m engine.stored_pages FOLDER` writes pages until it is killed, saying how many are there.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np

from invar.backends.runner import PAGE_TOKENS
from invar.engine.page_file import Bytes, Page, PageLayout
from invar.engine.page_store import PageStore
from invar.engine.stored_prefix import key_of, root_of

LAYOUT = PageLayout("a build", (9000, 500))  # slots of three blocks of 4096 bytes
SIZE = 64 * LAYOUT.file_bytes(4)
BOTH = 0b11


def chain(start: int = 0, groups: int = BOTH) -> Iterator[Page]:
    parent = root_of(None)
    for index in count(start):
        ids = np.arange(index, index + PAGE_TOKENS, dtype=np.int32).tobytes()
        key = key_of(parent, ids)
        yield Page(key, parent, ids, groups)
        parent = key


def pages(number: int, start: int = 0, groups: int = BOTH) -> list[Page]:
    return [page for page, _ in zip(chain(start, groups), range(number), strict=False)]


def content(page: Page) -> Bytes:
    """uint8 [slot_bytes]"""
    dice = np.random.default_rng(list(page.key))
    return dice.integers(0, 256, LAYOUT.slot_bytes).astype(np.uint8)


def put(store: PageStore, page: Page) -> bool:
    def fill(out: Bytes) -> None:
        out[:] = content(page)

    return store.put(page, fill)


def put_all(store: PageStore, some: list[Page]) -> None:
    """One after another: the writer keeps up."""
    for page in some:
        assert put(store, page)
        store.flush()


def found(store: PageStore, page: Page) -> bool:
    """Whether a page can be read; if so, its bytes must be right."""
    out = np.full(LAYOUT.slot_bytes, 0xEE, np.uint8)
    there = store.read(page, out, wait=True)
    if there is None:
        return False
    assert there
    expected = content(page)
    for group, span in enumerate(LAYOUT.spans):
        wanted = expected[span] if page.groups >> group & 1 else np.uint8(0xEE)
        assert (out[span] == wanted).all()
    return True


def num_found(store: PageStore, some: list[Page]) -> int:
    return sum(found(store, page) for page in some)


def main(folder: str) -> None:
    store = PageStore(Path(folder), LAYOUT, SIZE)
    for number, page in enumerate(pages(150)):
        while not put(store, page):
            pass
        print(number, flush=True)
    signal.pause()


if __name__ == "__main__":
    main(sys.argv[1])
