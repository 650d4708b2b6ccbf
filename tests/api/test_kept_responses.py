"""Responses that are kept: the store, conversations, GET, DELETE, cancel, background."""

from __future__ import annotations

import asyncio
import hashlib
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from invar.api import response_store
from invar.api.keys import ApiKey, KeyRing, KeySettings, key_ring
from invar.api.response_store import KeptResponses, ResponseStore

from .scripted import RunningServer, Script, endless, failing, running, says
from .test_responses import count, error_of, send, streamed, text_of


@contextmanager
def keeping(script: Script, folder: Path, **options: Any) -> Iterator[RunningServer]:
    kept = KeptResponses(ResponseStore(str(folder)))
    with running(script, responses=kept, **options) as server:
        yield server


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with keeping(says("Hello", " world", "!"), tmp_path_factory.mktemp("kept")) as server:
        yield server


def test_official_client(kept: RunningServer) -> None:
    client = kept.client.responses
    first = client.create(model="scripted", input="Hi", metadata={"a": "b"})
    assert first.store  # by default, as the dialect says
    found = client.retrieve(first.id)
    assert found.output_text == "Hello world!"
    assert found.to_dict() == first.to_dict()
    assert [item.id for item in client.input_items.list(first.id)] == [f"item_{first.id}_0"]
    second = client.create(model="scripted", input="Q9", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    client.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.retrieve(first.id)
    with pytest.raises(openai.BadRequestError) as gone:
        client.create(model="scripted", input="Q9", previous_response_id=second.id)
    assert gone.value.code == "previous_response_not_found"


def test_what_came_before_is_the_conversation(kept: RunningServer) -> None:
    first = send(kept, input="one", instructions="ab").json()
    again = {"input": [{"role": "user", "content": "two"}], "stream": True}
    second = streamed(send(kept, **again, previous_response_id=first["id"]))[-1]["response"]
    send(kept, input="Q9", previous_response_id=second["id"], instructions="zz")
    chat = [
        {"role": "system", "content": "zz"},  # instructions are those of the request alone
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "Hello world!"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "Hello world!"},
        {"role": "user", "content": "Q9"},
    ]
    tokens = kept.chat_ids(chat)
    assert kept.engine.seen[-1].prompt_token_ids.tolist() == tokens
    counted = count(kept, input="Q9", previous_response_id=second["id"], instructions="zz")
    assert counted == len(tokens)


def test_what_is_not_to_be_kept_is_not(kept: RunningServer) -> None:
    body = send(kept, store=False).json()
    assert body["store"] is False
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        answer = kept.http.request(method, f"/v1/responses/{body['id']}{path}")
        assert error_of(answer, 404)["code"] == "response_not_found"


def test_a_server_that_keeps_nothing_says_so(hello: RunningServer) -> None:
    body = send(hello).json()
    assert body["store"] is False
    assert (
        "--response-store"
        in error_of(hello.http.get(f"/v1/responses/{body['id']}"), 404)["message"]
    )


def test_responses_belong_to_a_key(tmp_path: Path) -> None:
    with keeping(says("Hello"), tmp_path, keys=key_ring(["one", "two"], None)) as server:
        server.http.headers["authorization"] = "Bearer one"
        body = send(server).json()
        path = f"/v1/responses/{body['id']}"
        assert server.http.get(path).json() == body
        server.http.headers["authorization"] = "Bearer two"
        assert error_of(server.http.get(path), 404)
        assert error_of(server.http.delete(path), 404)
        assert error_of(server.http.post(path + "/cancel"), 404)
        refused = error_of(send(server, previous_response_id=body["id"]))
        assert refused["code"] == "previous_response_not_found"


def test_they_outlive_the_server_and_are_private(tmp_path: Path) -> None:
    with keeping(says("Hello"), tmp_path / "kept") as server:
        body = send(server, input="a secret").json()
    assert (tmp_path / "kept").stat().st_mode & 0o777 == 0o700
    for file in (tmp_path / "kept").iterdir():
        assert file.stat().st_mode & 0o077 == 0
    with keeping(says("Hello"), tmp_path / "kept") as server:
        path = f"/v1/responses/{body['id']}"
        assert server.http.get(path).json() == body
        assert server.http.delete(path).json()["deleted"] is True
    # What was deleted is overwritten.
    assert b"a secret" not in (tmp_path / "kept/responses.sqlite").read_bytes()


def test_pages_of_input_items(kept: RunningServer) -> None:
    items = [{"type": "message", "role": "user", "content": f"{i}"} for i in range(5)]
    path = f"/v1/responses/{send(kept, input=items).json()['id']}/input_items"
    page = kept.http.get(path, params={"limit": 2}).json()
    assert [item["content"] for item in page["data"]] == ["4", "3"]
    assert page["has_more"] is True
    page = kept.http.get(path, params={"limit": 9, "after": page["last_id"]}).json()
    assert [item["content"] for item in page["data"]] == ["2", "1", "0"]
    assert page["has_more"] is False
    up = kept.http.get(path, params={"order": "asc"}).json()["data"]
    assert [item["content"] for item in up] == ["0", "1", "2", "3", "4"]
    for params in ({"limit": 0}, {"limit": "x"}, {"order": "up"}, {"after": "nothing"}):
        error_of(kept.http.get(path, params=params))


def ended(server: RunningServer, name: str) -> dict[str, Any]:
    end = time.monotonic() + 10
    while time.monotonic() < end:
        body: dict[str, Any] = server.http.get(f"/v1/responses/{name}").json()
        if body["status"] not in ("queued", "in_progress"):
            return body
        time.sleep(0.01)
    raise AssertionError("it has not ended")


def test_in_the_background(kept: RunningServer) -> None:
    begun = send(kept, background=True).json()
    assert begun["status"] == "in_progress"
    assert begun["background"] is True
    body = ended(kept, begun["id"])
    assert (body["status"], text_of(body)) == ("completed", "Hello world!")
    # What has ended stays as it is.
    assert kept.http.post(f"/v1/responses/{begun['id']}/cancel").json() == body
    plain = send(kept).json()
    error_of(kept.http.post(f"/v1/responses/{plain['id']}/cancel"))
    assert error_of(send(kept, background=True, stream=True))["param"] == "background"
    assert error_of(kept.http.get(f"/v1/responses/{plain['id']}?stream=true"))


def test_a_background_response_counts_for_its_key(tmp_path: Path) -> None:
    settings = KeySettings(tokens_per_minute=100)
    ring = KeyRing([ApiKey("one", hashlib.sha256(b"secret").digest(), settings)])
    with keeping(says("Hello", " world", "!"), tmp_path, keys=ring) as server:
        server.http.headers["authorization"] = "Bearer secret"
        begun = send(server, background=True, max_output_tokens=50).json()
        used = ended(server, begun["id"])["usage"]["total_tokens"]
        left = int(server.http.get("/v1/models").headers["x-ratelimit-remaining-tokens"])
        assert 100 - used <= left <= 100 - used + 10


def test_a_background_response_that_fails(tmp_path: Path) -> None:
    with keeping(failing(1), tmp_path) as server:
        body = ended(server, send(server, background=True).json()["id"])
    assert body["status"] == "failed"
    assert "not finite" in body["error"]["message"]


@pytest.mark.parametrize("how", ["cancel", "delete"])
def test_a_background_response_is_cancelled(how: str, tmp_path: Path) -> None:
    with keeping(endless(pause_s=0.02), tmp_path, max_model_len=10**6) as server:
        begun = send(server, background=True, input="Q9 Q9 Q9").json()
        path = f"/v1/responses/{begun['id']}"
        refused = error_of(send(server, previous_response_id=begun["id"]))
        assert "not ended" in refused["message"]
        if how == "cancel":
            assert server.http.post(path + "/cancel").json()["status"] == "cancelled"
            assert server.http.get(path).json()["status"] == "cancelled"
            assert server.http.post(path + "/cancel").json()["status"] == "cancelled"
        else:
            assert server.http.delete(path).json()["deleted"] is True
        steps = server.engine.steps
        assert server.idle(10)
        assert server.engine.steps - steps <= 4
        if how == "delete":
            assert server.http.get(path).status_code == 404
            for file in tmp_path.iterdir():
                assert b"Q9 Q9" not in file.read_bytes()
                assert begun["id"].encode() not in file.read_bytes()


def test_the_end_of_the_server_ends_background_responses(tmp_path: Path) -> None:
    with keeping(endless(), tmp_path, max_model_len=10**6) as server:
        begun = send(server, background=True).json()
    with keeping(says("Hello"), tmp_path) as server:
        body = server.http.get(f"/v1/responses/{begun['id']}").json()
    assert body["status"] == "failed"
    assert "shutting down" in body["error"]["message"]


def test_a_background_response_whose_process_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with keeping(says("Hello"), tmp_path) as server:
        response = send(server).json() | {"status": "in_progress", "id": "resp-gone"}
        kept = server.server.responses
        assert kept is not None
        asyncio.run(kept.store.put("", response, [], running=True))
        assert server.http.get("/v1/responses/resp-gone").json()["status"] == "in_progress"
        monkeypatch.setattr(response_store, "SILENT_S", 0.0)
        assert server.http.get("/v1/responses/resp-gone").json()["status"] == "failed"


def test_a_clock_that_jumps_loses_no_background_response(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with keeping(endless(pause_s=0.02), tmp_path, max_model_len=10**6) as server:
        path = f"/v1/responses/{send(server, background=True).json()['id']}"
        monkeypatch.setattr(response_store, "SILENT_S", -1e6)
        assert server.http.get(path).json()["status"] == "in_progress"
        assert server.http.post(path + "/cancel").json()["status"] == "cancelled"


# ------------------------------------------------------------------------------------- the store


def response(name: str, previous: str | None = None, text: str = "") -> dict[str, Any]:
    return {"id": name, "previous_response_id": previous, "output": [], "text": text}


async def names(store: ResponseStore, count: int) -> list[int]:
    return [i for i in range(count) if await store.get("", f"r{i}") is not None]


def test_the_store_is_bounded_in_rows_and_bytes(tmp_path: Path) -> None:
    async def fill(store: ResponseStore, text: str) -> list[int]:
        for i in range(10):
            assert await store.put("", response(f"r{i}", text=text), [])
            await store.get("", "r0")  # what is used stays
        found = await names(store, 10)
        store.close()
        return found

    assert asyncio.run(fill(ResponseStore(str(tmp_path / "rows"), max_rows=4), "")) == [0, 7, 8, 9]
    by_bytes = ResponseStore(str(tmp_path / "bytes"), max_bytes=5000)
    assert asyncio.run(fill(by_bytes, "x" * 1500)) == [0, 8, 9]


def test_the_file_is_bounded(tmp_path: Path) -> None:
    store = ResponseStore(str(tmp_path), max_bytes=200_000)

    async def fill() -> bool:
        for i in range(60):
            assert await store.put("", response(f"r{i}", text="x" * 40_000), [])
        return await store.put("", response("large", text="x" * 300_000), [])

    assert asyncio.run(fill()) is False
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 5_500_000
    store.close()


def test_responses_expire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ResponseStore(str(tmp_path))

    async def look() -> None:
        await store.put("", response("old"), [])
        assert await store.get("", "old") is not None
        monkeypatch.setattr(response_store, "MAX_AGE_S", -1.0)
        assert await store.get("", "old") is None
        assert await store.chain("", "old", 1000) is None
        await store.put("", response("new"), [])

    asyncio.run(look())
    store.close()
    with sqlite3.connect(tmp_path / "responses.sqlite") as db:
        assert db.execute("SELECT id FROM responses").fetchall() == [("new",)]


def test_the_sums_are_right_after_everything(tmp_path: Path) -> None:
    store = ResponseStore(str(tmp_path), max_bytes=4000)

    async def work() -> None:
        for i in range(40):
            await store.put(
                "", response(f"r{i}", text="x" * (i * 37 % 900)), [], running=i % 3 == 0
            )
            await store.finish("", response(f"r{i}", text="y" * (i * 53 % 700)))
            await store.delete("", f"r{i - i % 4}")

    asyncio.run(work())
    store.close()
    with sqlite3.connect(tmp_path / "responses.sqlite") as db:
        sums = db.execute("SELECT count(*), sum(bytes) FROM responses").fetchone()
        assert sums == db.execute("SELECT rows, bytes FROM total").fetchone()
        sql = "SELECT count(*), sum(length(items) + length(response)) FROM bodies"
        assert sums == db.execute(sql).fetchone()
        assert sums[0] > 3


def test_chains(tmp_path: Path) -> None:
    store = ResponseStore(str(tmp_path))

    async def look() -> None:
        await store.put("", response("a"), [{"role": "user"}])
        await store.put("", response("b", "a"), [])
        await store.put("", response("c", "b", "x" * 2000), [])
        chain = await store.chain("", "c", 10_000)
        assert chain is not None
        assert [kept.id for kept in chain] == ["a", "b", "c"]
        assert chain[0].items == [{"role": "user"}]
        assert await store.chain("another", "c", 10_000) is None
        with pytest.raises(ValueError, match="more than 1000 bytes"):
            await store.chain("", "c", 1000)

    asyncio.run(look())
    store.close()


def test_two_processes_share_a_file(tmp_path: Path) -> None:
    one, two = ResponseStore(str(tmp_path)), ResponseStore(str(tmp_path))

    async def look() -> None:
        await one.put("", response("a"), [], running=True)
        assert await two.beat("a")
        assert await two.finish("", response("a", text="x"))
        assert not await one.beat("a")
        assert not await one.finish("", response("a", text="y"))
        found = await one.get("", "a")
        assert found is not None
        assert found.response["text"] == "x"

    asyncio.run(look())
    one.close()
    two.close()


def test_a_file_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "responses.sqlite").write_bytes(b"no database at all" * 100)
    with pytest.raises(ValueError, match=r"responses\.sqlite: file is not a database"):
        ResponseStore(str(tmp_path))


def test_a_file_of_another_format(tmp_path: Path) -> None:
    ResponseStore(str(tmp_path)).close()
    ResponseStore(str(tmp_path)).close()
    with sqlite3.connect(tmp_path / "responses.sqlite") as db:
        db.execute("PRAGMA user_version = 7")
    with pytest.raises(ValueError, match="it has format 7, and this version of Invar writes 1"):
        ResponseStore(str(tmp_path))


def test_a_folder_of_others_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "letter").touch()
    tmp_path.chmod(0o755)
    with pytest.raises(ValueError, match="a folder of its own"):
        ResponseStore(str(tmp_path))
    assert tmp_path.stat().st_mode & 0o777 == 0o755


def test_a_disk_that_fails_costs_no_answer(tmp_path: Path) -> None:
    with keeping(says("Hello"), tmp_path) as server:
        assert server.server.responses is not None
        store = server.server.responses.store
        asyncio.run(store._run(lambda db: db.execute("DROP TABLE responses")))
        body = send(server).json()
        assert body["store"] is False
        assert text_of(body) == "Hello"
        for fields in ({"background": True}, {"previous_response_id": body["id"]}):
            assert send(server, **fields).status_code == 503
        for method in ("GET", "DELETE"):
            answer = server.http.request(method, f"/v1/responses/{body['id']}")
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "response_store_failed"


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """What was kept can be read and deleted; what runs goes on."""
    with keeping(endless(pause_s=0.02), tmp_path, max_model_len=10**6) as server:
        assert server.server.responses is not None
        store = server.server.responses.store
        first = send(server, max_output_tokens=3).json()
        begun = send(server, background=True).json()
        asyncio.run(store._run(lambda db: db.execute("PRAGMA max_page_count = 1").fetchone()))
        for _ in range(20):  # until the pages that are there are full
            body = send(server, max_output_tokens=2, input="x" * 200).json()
        assert body["store"] is False
        assert send(server, input="x" * 5000, background=True).status_code == 503
        path = f"/v1/responses/{begun['id']}"
        assert server.http.get(path).json()["status"] == "in_progress"
        assert server.engine.running
        assert server.http.get(f"/v1/responses/{first['id']}").json() == first
        for name in (first["id"], begun["id"]):
            assert server.http.delete(f"/v1/responses/{name}").json()["deleted"] is True
        assert server.idle(10)
