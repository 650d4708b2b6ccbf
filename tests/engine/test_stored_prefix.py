"""Prefixes on disk: found by the next engine, read in its place, and never trusted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.helpers import Client, make_engine, request, words
from engine.scripted_runner import HashRunner, Rules, lone_answer, runner_info
from invar.backends.runner import RunnerInfo
from invar.engine import scheduler, stored_prefix
from invar.engine.engine import Engine
from invar.engine.page_file import Bytes, Page, PageLayout
from invar.engine.page_store import PageStore
from invar.engine.request import EngineRequest
from invar.engine.stored_prefix import LONG_PREFIX_TOKENS

INFO = runner_info(max_model_len=1024, slabs=200)
WINDOW = runner_info(max_model_len=1024, slabs=200, window=50)
LONG = LONG_PREFIX_TOKENS


class Restarts:
    """Engines one after another over one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.engines: list[Engine] = []

    def __call__(self, info: RunnerInfo = INFO, fingerprint: str = "", **options: bool) -> Client:
        self.stop()
        layout = PageLayout(fingerprint, [group.page_bytes for group in info.groups])
        store = PageStore(self.folder, layout, 1 << 24)
        self.engines.append(make_engine(info, store=store, **options))
        return Client(self.engines[-1])

    def stop(self) -> None:
        for engine in self.engines:
            engine.close()
        self.engines.clear()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Restarts]:
    restarts = Restarts(tmp_path)
    yield restarts
    restarts.stop()


def turn(client: Client, name: str, prompt: list[int], info: RunnerInfo = INFO, **more: str) -> int:
    """Runs a request, whose answer must be right: the tokens it found computed."""
    one = request(name, prompt, 4, **more)
    client.add(one)
    client.drain()
    settle(client)
    assert not client.errors
    assert client.answers[name] == lone_answer(info, Rules(), one)
    return client.cached[name]


def settle(client: Client) -> None:
    """What is on its way to the disk arrives."""
    assert client.engine.page_store is not None
    client.engine.page_store.flush()


def rows_of(client: Client) -> int:
    assert isinstance(client.engine.runner, HashRunner)
    return sum(len(batch.token_ids) for batch in client.engine.runner.batches)


# ---------------------------------------------------------------------------- what is worth storing


def test_a_long_prefix_is_found_after_a_restart(start: Restarts) -> None:
    prompt = words(1, LONG + 50)
    assert turn(start(), "first", prompt) == 0
    client = start()
    assert turn(client, "again", prompt) == LONG + 32
    assert rows_of(client) == 18 + 3, "what was read was computed again"
    stats = client.engine.stats()
    assert stats.store_tokens == LONG + 32
    assert stats.store_pages_read == LONG // 32 + 1
    assert stats.cache_hits == LONG + 32
    # What has been read is in memory now, and nothing of it is written again.
    assert turn(client, "more", prompt) == LONG + 49
    assert client.engine.stats().store_pages_read == LONG // 32 + 1
    assert client.engine.stats().store_pages_written == 0


def test_a_short_prefix_is_stored_once_it_is_used_again(start: Restarts) -> None:
    prompt = words(1, 100)
    assert turn(start(), "first", prompt) == 0
    client = start()
    assert turn(client, "second", prompt) == 0
    assert turn(client, "third", [*prompt[:70], 5, 6, 7]) == 70
    client = start()
    assert turn(client, "fourth", prompt) == 64


@pytest.mark.parametrize("length", [1, 31, 32, 33, 63, 64, 65])
def test_at_least_the_last_token_is_computed(start: Restarts, length: int) -> None:
    client = start()
    for name in ("a", "b", "c"):
        turn(client, name, words(1, LONG + length))
    assert turn(start(), "d", words(1, LONG + length)) == LONG + (length - 1) // 32 * 32


def test_answers_are_stored_too_and_prompts_branch_anywhere(start: Restarts) -> None:
    client = start()
    prompt = words(1, LONG - 16)
    one = request("one", prompt, 80)
    client.add(one)
    client.drain()
    talk = [*prompt, *client.answers["one"].token_ids]
    client = start()
    assert turn(client, "two", [*talk, *words(2, 40)]) == (len(talk) - 1) // 32 * 32
    client = start()
    assert turn(client, "three", [*talk[:100], 96 - talk[100], *words(3, 40)]) == 96


def test_scored_prompts_are_computed(start: Restarts) -> None:
    prompt = words(1, LONG)
    turn(start(), "first", prompt)
    client = start()
    one = request("scored", prompt, 4, prompt_logprobs=1)
    client.add(one)
    assert client.drain()["scored"] == lone_answer(INFO, Rules(), one)
    assert client.cached["scored"] == 0


def test_requests_that_come_together_read_once(start: Restarts) -> None:
    prompt = words(1, LONG + 64)
    turn(start(), "first", prompt)
    client = start()
    some = [request(f"r{n}", [*prompt, *words(n, 9)], 4) for n in range(4)]
    client.add(*some)
    answers = client.drain()
    assert answers == {one.id: lone_answer(INFO, Rules(), one) for one in some}
    assert client.engine.stats().store_pages_read == LONG // 32 + 2
    assert {client.cached[one.id] for one in some} == {LONG + 64}


# ----------------------------------------------------------------------------------------- windows


def test_windows_are_read_where_they_are_needed(start: Restarts) -> None:
    prompt = words(1, LONG + 70)
    assert turn(start(WINDOW), "first", prompt, WINDOW) == 0
    client = start(WINDOW)
    assert turn(client, "again", prompt, WINDOW) == LONG + 64
    written = client.engine.runner.batches  # type: ignore[attr-defined]
    assert sum(len(batch.token_ids) for batch in written) == 6 + 3
    node = next(iter(client.engine.memory.tree.nodes()))
    assert node.first == [0, (LONG + 64 - 50 + 1) // 32], "pages behind the window were read"
    # A prompt that leaves the first one behind the window in memory finds its own on disk.
    assert turn(client, "branch", [*prompt[:100], 96 - prompt[100], 7], WINDOW) in (0, 96)


def test_a_window_that_lacks_is_not_used(start: Restarts) -> None:
    """Only prefixes whose last window is stored are read."""
    prompt = words(1, LONG + 70)
    client = start(WINDOW)
    store = client.engine.page_store
    assert store is not None
    put = store.put
    lacking = {6, 7}

    def put_some(page: Page, fill: object) -> bool:
        index = put_some.count = getattr(put_some, "count", -1) + 1  # type: ignore[attr-defined]
        groups = 0b01 if index in lacking else 0b11
        return put(Page(page.key, page.parent, page.ids, groups), fill)  # type: ignore[arg-type]

    store.put = put_some  # type: ignore[method-assign, assignment]
    turn(client, "first", prompt, WINDOW)
    for length, reused in (
        (LONG + 70, LONG + 64),  # behind its window
        (300, 192),  # 288 needs page 7; computed now, it is stored
        (290, 288),
    ):
        assert turn(start(WINDOW), f"r{length}", prompt[:length], WINDOW) == reused


# -------------------------------------------------------------------------------------------- swap


def test_evicted_pages_come_back(start: Restarts) -> None:
    """Memory for one long request: another one in between takes all its pages."""
    info = runner_info(max_model_len=1024, slabs=14)
    client = start(info)
    prompt, other = words(1, LONG + 70), words(2, LONG + 70)
    for name, one, reused in (("a", prompt, 0), ("b", other, 0), ("c", prompt, LONG + 64)):
        assert turn(client, name, one, info) == reused
    assert client.engine.stats().cache_evictions > 0
    assert turn(client, "d", other, info) == LONG + 64


def test_a_preempted_request_comes_back_from_disk(start: Restarts) -> None:
    client = start()
    one = request("one", words(1, 100), 60)
    client.add(one)
    for _ in range(30):
        client.step()
    state = client.engine.states["one"]
    computed = state.num_computed_tokens
    client.engine.scheduler.preempt(state)
    settle(client)
    client.engine.memory.tree.clear()
    client.engine.check_integrity()
    rows = rows_of(client)
    assert client.drain()["one"] == lone_answer(INFO, Rules(), one)
    assert rows_of(client) - rows <= 60 - 30 + computed % 32 + 3
    assert client.cached["one"] == 0, "its own pages are no reuse"


# --------------------------------------------------------------------------------- who finds what


def test_b48_salts_share_nothing_on_disk(start: Restarts) -> None:
    prompt = words(1, LONG + 50)
    client = start(store_salted=True)
    assert turn(client, "a", prompt, cache_salt="A") == 0
    client = start(store_salted=True)
    assert turn(client, "none", prompt) == 0
    assert turn(client, "b", prompt, cache_salt="B") == 0
    assert turn(client, "bytes", prompt, cache_salt="salt:A") == 0
    assert turn(client, "again", prompt, cache_salt="A") == LONG + 32
    client = start(store_salted=True)
    for name, salt in (("c", "A"), ("d", "B")):
        assert turn(client, name, prompt, cache_salt=salt) == LONG + 32
    assert turn(client, "e", prompt) == LONG + 32


def test_salted_prefixes_are_not_stored_unasked(start: Restarts) -> None:
    client = start()
    prompt = words(1, LONG + 50)
    for name in ("a", "b"):
        turn(client, name, prompt, cache_salt="A")
    assert client.engine.stats().store_pages_written == 0
    # Nor read: what was stored while it was asked for stays where it is.
    turn(start(store_salted=True), "c", prompt, cache_salt="A")
    assert turn(start(), "d", prompt, cache_salt="A") == 0


def test_another_build_finds_nothing(start: Restarts) -> None:
    prompt = words(1, LONG + 50)
    turn(start(), "a", prompt)
    assert turn(start(fingerprint="other weights"), "b", prompt) == 0
    assert turn(start(), "c", prompt) == LONG + 32


def test_after_a_reset_nothing_is_found(start: Restarts) -> None:
    prompt = words(1, LONG + 50)
    client = start()
    turn(client, "a", prompt)
    client.engine.reset_prefix_cache()
    assert turn(client, "b", prompt) == 0
    client.engine.reset_prefix_cache()
    client = start()
    assert turn(client, "c", prompt) == 0
    assert turn(client, "d", prompt) == LONG + 49


def test_what_runs_over_a_reset_is_not_stored(start: Restarts) -> None:
    client = start()
    one = request("one", words(1, LONG + 50), 4)
    client.add(one)
    client.step()
    client.engine.reset_prefix_cache()
    client.drain()
    settle(client)
    assert client.engine.page_store is not None
    assert client.engine.page_store.num_pages == 0


# -------------------------------------------------------------------------------- reading and time


def test_a_reset_while_pages_are_read(start: Restarts, monkeypatch: pytest.MonkeyPatch) -> None:
    client, one = reading(start, monkeypatch)
    client.engine.reset_prefix_cache()
    client.engine.check_integrity()
    assert client.drain()["one"] == lone_answer(INFO, Rules(), one)
    assert client.cached["one"] == 0


def test_a_cancel_and_a_preemption_while_pages_are_read(
    start: Restarts, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, one = reading(start, monkeypatch)
    client.engine.scheduler.preempt(client.engine.states["one"])
    client.engine.check_integrity()
    client.step()
    assert client.engine.memory.is_fetching(client.engine.states["one"].slot or 0)
    client.abort("one")
    client.drain()
    assert turn(client, "again", one.prompt_token_ids.tolist()) == LONG + 64


def test_a_damaged_page_is_computed(start: Restarts, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a prefix that is being read, while another request decodes."""
    client, one = reading(start, monkeypatch)
    store = client.engine.page_store
    assert store is not None
    path = next(store.folder.glob("*.kv"))
    data = bytearray(path.read_bytes())
    data[store.layout.table_bytes(store.slots) + 7 * store.layout.slot_bytes + 9] ^= 1
    path.write_bytes(data)
    assert client.drain()["one"] == lone_answer(INFO, Rules(), one)
    assert client.cached["one"] == 7 * 32


def test_reading_holds_nobody_up(start: Restarts, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page a step here: the other request gets a token in each of them."""
    client, one = reading(start, monkeypatch)
    before = len(client.answers["other"].token_ids)
    steps = 0
    while "one" not in client.answers:
        client.step()
        steps += 1
    assert steps >= LONG // 32
    assert len(client.answers["other"].token_ids) >= before + steps
    assert client.cached["one"] == LONG + 64
    client.drain()
    assert client.answers["one"] == lone_answer(INFO, Rules(), one)


def test_a_disk_that_never_has_it_ready_is_waited_for(
    start: Restarts, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, one = reading(start, monkeypatch)
    monkeypatch.setattr(stored_prefix, "PATIENCE", 2)
    store = client.engine.page_store
    assert store is not None
    read = store.read

    def slow(page: Page, out: Bytes, *, wait: bool) -> bool | None:
        return wait and read(page, out, wait=wait)

    monkeypatch.setattr(store, "read", slow)
    for _ in range(3 * LONG // 32 + 9):
        client.step()
    assert client.cached["one"] == LONG + 64
    assert client.drain()["one"] == lone_answer(INFO, Rules(), one)


def reading(start: Restarts, monkeypatch: pytest.MonkeyPatch) -> tuple[Client, EngineRequest]:
    """A client in which "other" decodes and "one" has read a page or two."""
    one = request("one", words(1, LONG + 70), 8)
    turn(start(), "before", one.prompt_token_ids.tolist())
    monkeypatch.setattr(scheduler, "FETCH_S", 0.0)
    client = start()
    client.add(request("other", words(2, 9), 60))
    client.step()
    client.add(one)
    client.step()
    client.step()
    slot = client.engine.states["one"].slot
    assert slot is not None
    assert client.engine.memory.is_fetching(slot)
    return client, one
