"""What is in use of KV memory, unfilled, and saved."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from engine.helpers import Client, make_engine, request, words
from engine.scripted_runner import runner_info
from invar.backends.runner import RunnerInfo
from invar.engine.kv_use import KVUse

PAGE_BYTES = 64  # two for each token


def info(window: int | None = None, **sizes: int) -> RunnerInfo:
    made = runner_info(window=window, **sizes)
    return replace(made, groups=tuple(replace(g, page_bytes=PAGE_BYTES) for g in made.groups))


def use_of(client: Client) -> KVUse:
    return client.engine.kv_use()


def test_room_for_tokens_that_are_not_known() -> None:
    client = Client(make_engine(info()))
    assert use_of(client) == KVUse(0, 0, 0, 0)
    assert use_of(client).unfilled_share == 0
    client.add(request("r", words(1, 40), 10))
    client.step()  # 41 tokens are known
    assert use_of(client) == KVUse(2 * PAGE_BYTES, 2 * 23, 0, 0)
    client.drain()  # the tree has 49: the last one was drawn and never run
    assert use_of(client) == KVUse(2 * PAGE_BYTES, 2 * 15, 0, 0)
    assert client.engine.stats().kv_unfilled == 30 / 128


def test_what_sharing_saves() -> None:
    client = Client(make_engine(info(max_tokens_per_step=128)))
    client.add(
        *[request(f"c{i}", words(1, 70), 20, seed=5, choice=i, temperature=1) for i in range(4)]
    )
    for _ in range(3):
        client.step()
    assert use_of(client).saved_by_sharing == 3 * 2 * PAGE_BYTES
    assert client.engine.stats().kv_saved_by_sharing == 3 * 2 * PAGE_BYTES
    client.drain()
    assert use_of(client).saved_by_sharing == 0


def test_what_windows_save() -> None:
    client = Client(make_engine(info(window=32, slabs=64, max_tokens_per_step=32)))
    client.add(request("r", words(1, 200), 20))
    for _ in range(7):
        client.step()
    while client.engine.memory.tree._evict_wide():
        pass
    memory = client.engine.memory
    full, window = (pool.num_owned for pool in memory.pools)
    assert full == 7
    assert window == 2
    assert use_of(client).saved_by_windows == (full - window) * PAGE_BYTES
    assert client.engine.stats().kv_saved_by_windows == 5 * PAGE_BYTES


def test_conversations_leave_less_than_four_percent_unfilled() -> None:
    """Half a page of each on average: what is said in a chat of some turns is 500 tokens long."""
    dice = np.random.default_rng(0)
    client = Client(make_engine(info(slabs=400, max_model_len=1024, max_tokens_per_step=256)))
    lengths = dice.integers(300, 900, 16).tolist()
    client.add(*[request(f"r{i}", words(i, n), 20) for i, n in enumerate(lengths)])
    shares = []
    while client.engine.has_unfinished:
        client.step()
        shares.append(client.engine.stats().kv_unfilled)
    assert max(shares[10:]) < 0.04
    assert shares[-1] > 0
