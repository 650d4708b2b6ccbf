"""Public cases over both tiers, memory and the KV store behind it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.helpers import Client, make_engine, request, words
from engine.scripted_runner import HashRunner, Rules, lone_answer, runner_info
from invar.backends.runner import PAGE_TOKENS, RunnerInfo
from invar.engine import scheduler, stored_prefix
from invar.engine.page_file import PageLayout
from invar.engine.page_store import PageStore
from invar.engine.policies import POLICIES
from invar.engine.request import EngineRequest


@contextmanager
def tiers(folder: Path, info: RunnerInfo, long: int = 64, **options: Any) -> Iterator[Client]:
    """An engine over a store in `folder` that keeps prefixes of `long` tokens; one page is read a
    step where others decode."""
    layout = PageLayout("hash", [group.page_bytes for group in info.groups])
    engine = make_engine(
        info, store=PageStore(folder, layout, 1 << 22), store_salted=True, **options
    )
    with (
        patch.object(stored_prefix, "LONG_PREFIX_TOKENS", long),
        patch.object(scheduler, "FETCH_S", 0.0),
    ):
        yield Client(engine)
    engine.close()


def check(client: Client, info: RunnerInfo, *requests: EngineRequest) -> None:
    assert not client.errors, client.errors
    for one in requests:
        assert client.answers[one.id] == lone_answer(info, Rules(), one), one.id


def settle(client: Client) -> None:
    """What is on its way to the disk arrives."""
    assert client.engine.page_store is not None
    client.engine.page_store.flush()


def demote(client: Client) -> None:
    """Memory forgets everything that is on disk."""
    settle(client)
    client.engine.memory.tree.clear()
    client.engine.check_integrity()


def rows_run(client: Client) -> int:
    assert isinstance(client.engine.runner, HashRunner)
    return sum(len(batch.token_ids) for batch in client.engine.runner.batches)


def test_b46_no_request_sees_what_another_one_said(tmp_path: Path) -> None:
    """200 prompts with a marker each, 8 at a time, few of which begin alike, in memory for 8."""
    info = runner_info(slabs=8 * 5, max_sequences=8)
    dice = random.Random(3)
    requests = []
    for index in range(200):
        begun = words(index % 5, dice.randrange(0, 100)) if dice.random() < 0.3 else []
        marker = [index % 97, index // 97, 11]
        requests.append(request(f"r{index}", [*begun, *marker, *words(900 + index, 20)], 6))
    with tiers(tmp_path, info, long=32) as client:
        for number, one in enumerate(requests):
            client.add(one)
            while len(client.engine.states) >= 8:
                client.step()
            if number % 20 == 0:
                demote(client)
        client.drain()
        check(client, info, *requests)
        stats = client.engine.stats()
        assert stats.preemptions == 0
        assert stats.cache_evictions > 0
        assert 0 < stats.store_tokens < stats.cache_hits == sum(client.cached.values())
        # What a request says it reused is what was not run for it: all but the last drawn token.
        known = sum(len(one.prompt_token_ids) + one.max_tokens - 1 for one in requests)
        assert rows_run(client) == known - stats.cache_hits


def test_b48_salts_and_ids_that_concatenate_alike_share_nothing(tmp_path: Path) -> None:
    """The ids of a prompt as bytes begin with what the other salt ends in, at either tier."""
    info = runner_info(max_model_len=512)
    ids = words(1, 160)
    swallowed = np.array(ids[:PAGE_TOKENS], np.int32).tobytes().decode("latin-1")
    pairs = {
        "whole": ("A", ids),
        "shorter": ("A" + swallowed, ids[PAGE_TOKENS:]),
        "none": (None, ids),
        "empty": ("", ids),
        "prefix": ("salt:A", ids),
    }

    def ask(client: Client, turn: str) -> dict[str, int]:
        for name, (salt, prompt) in pairs.items():
            one = request(f"{name} {turn}", prompt, 2, cache_salt=salt)
            client.add(one)
            client.drain()
            settle(client)
            check(client, info, one)
        return {name: client.cached[f"{name} {turn}"] for name in pairs}

    in_memory = {name: len(prompt) - 1 for name, (_, prompt) in pairs.items()}
    on_disk = {name: tokens // PAGE_TOKENS * PAGE_TOKENS for name, tokens in in_memory.items()}
    with tiers(tmp_path, info) as client:
        assert ask(client, "first") == dict.fromkeys(pairs, 0)
        assert ask(client, "memory") == in_memory
        demote(client)
        assert ask(client, "disk") == on_disk
    with tiers(tmp_path, info) as client:
        assert ask(client, "restarted") == on_disk


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("length", [140, 90])
def test_b51_two_conversations_on_disk_of_more_than_half_the_pool_both_go_on(
    tmp_path: Path, policy: str, window: int | None, length: int
) -> None:
    """Prompts that do not fit beside each other, and prompts that do and fill the pool: then each
    wants more than there is."""
    slabs = 8 if window is None else 14
    info = runner_info(slabs=slabs, window=window, max_tokens_per_step=48)
    begun = [request(name, words(seed, length), 10) for seed, name in enumerate("ab")]
    with tiers(tmp_path, info, policy=policy) as client:
        for one in begun:
            client.add(one)
            client.drain()
            demote(client)
        resumed = [client.resumed(one, words(9, 10), 60) for one in begun]
        client.add(*resumed)
        client.drain(limit=300)
        check(client, info, *resumed)
        stats, stored = client.engine.stats(), (length + 9) // PAGE_TOKENS * PAGE_TOKENS
        assert stats.store_tokens >= 2 * stored
        assert client.cached["a2"] == client.cached["b2"] == stored
        assert (stats.preemptions > 0) is (length == 90)


REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 2), st.integers(1, 150), st.integers(-1, 1), st.sampled_from([None, "A"])
    ),
    min_size=2,
    max_size=5,
)


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    info=st.builds(
        runner_info,
        slabs=st.integers(5, 14),
        max_tokens_per_step=st.sampled_from([1, 16, 33, 64]),
        max_sequences=st.integers(1, 5),
        window=st.sampled_from([None, 1, 32, 50]),
    ),
    policy=st.sampled_from(sorted(POLICIES)),
    requests=REQUESTS,
)
def test_b51_while_anything_waits_for_pages_from_disk_a_request_soon_gets_a_token(
    info: RunnerInfo, policy: str, requests: list[tuple[int, int, int, str | None]]
) -> None:
    with TemporaryDirectory() as folder, tiers(Path(folder), info, 32, policy=policy) as client:
        longest = min(info.max_model_len, client.engine.kv_capacity_tokens + 1)
        asked = []
        for index, (conversation, length, priority, salt) in enumerate(requests):
            prompt = words(conversation, min(length, longest - 1))
            tokens = min(40, longest - len(prompt))
            more = {"priority": priority, "cache_salt": salt}
            asked.append(request(f"r{index}", prompt, tokens, **more))
        for one in asked:  # one after another: all of it comes to the disk
            client.add(one)
            client.drain()
            demote(client)
        again = [replace(one, id=f"{one.id} again") for one in asked]
        client.add(*again)
        silent = 0
        while client.engine.has_unfinished:
            silent = 0 if client.step() else silent + 1
            assert silent <= 2 * info.max_model_len
        check(client, info, *asked, *again)
