"""Responses that are kept (``store: true``): a bounded SQLite file, private to the server's user.

One thread owns the connection, so that the event loop never waits for a disk. Several processes
may share the file.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from invar.api.errors import ApiError
from invar.private_folder import make_private

logger = logging.getLogger("invar.api")

DEFAULT_BYTES = 256 << 20
MAX_ROWS = 20_000
MAX_AGE_S = 30 * 24 * 3600  # OpenAI keeps responses for 30 days
SILENT_S = 30.0  # a background response that nobody has run for so long has lost its process

OURS = re.compile(r"responses\.sqlite(-wal|-shm)?")

FORMAT = 1  # of the file
# What is looked through for every response is small; the texts lie beside it.
SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,      -- who may read it: a digest of the API key, or empty
    previous TEXT,
    bytes INTEGER NOT NULL,   -- of its bodies
    created REAL NOT NULL,
    used REAL NOT NULL,       -- last read or, while it runs, last sign of life
    running INTEGER NOT NULL  -- in the background
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS bodies (
    id TEXT PRIMARY KEY REFERENCES responses ON DELETE CASCADE,
    items BLOB NOT NULL,      -- the input of the request, JSON
    response BLOB NOT NULL    -- the answer, JSON
);
CREATE TABLE IF NOT EXISTS total (rows INTEGER NOT NULL, bytes INTEGER NOT NULL);
INSERT INTO total SELECT 0, 0 WHERE NOT EXISTS (SELECT 1 FROM total);
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON responses BEGIN
    UPDATE total SET rows = rows + 1, bytes = bytes + new.bytes; END;
CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON responses BEGIN
    UPDATE total SET rows = rows - 1, bytes = bytes - old.bytes; END;
CREATE TRIGGER IF NOT EXISTS resized AFTER UPDATE OF bytes ON responses BEGIN
    UPDATE total SET bytes = bytes + new.bytes - old.bytes; END;
CREATE INDEX IF NOT EXISTS by_use ON responses (used);
CREATE INDEX IF NOT EXISTS by_age ON responses (created);
"""
T = TypeVar("T")


@dataclass(frozen=True)
class Kept:
    """A response in the store with the input items of its request."""

    id: str
    previous: str | None
    items: list[dict[str, Any]]
    response: dict[str, Any]
    used: float
    running: bool

    @property
    def lost(self) -> bool:
        """It was running in the background, and its process has ended."""
        return self.running and time.time() - self.used > SILENT_S


class ResponseStore:
    def __init__(self, folder: str, max_bytes: int = DEFAULT_BYTES, max_rows: int = MAX_ROWS):
        """Raises ValueError if the folder or its file cannot be used."""
        self.max_bytes = max_bytes
        self._max_rows = max_rows
        self._thread = ThreadPoolExecutor(1, "responses")
        self.path = Path(folder) / "responses.sqlite"
        try:
            self._db = self._thread.submit(self._open).result()
        except (OSError, ValueError, sqlite3.Error) as error:
            self._thread.shutdown()
            raise ValueError(f"responses cannot be kept in {self.path}: {error}") from None

    def _open(self) -> sqlite3.Connection:
        make_private(self.path.parent, OURS, "a store of responses")
        os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))
        db = sqlite3.connect(self.path, timeout=10, isolation_level=None)
        # What is deleted is overwritten; what the log may grow to is bounded too.
        for pragma in (
            "journal_mode = WAL",
            "synchronous = NORMAL",
            "secure_delete = ON",
            "foreign_keys = ON",
            f"journal_size_limit = {4 << 20}",
        ):
            db.execute(f"PRAGMA {pragma}")
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version != FORMAT and db.execute("SELECT 1 FROM sqlite_master").fetchone():
            db.close()
            raise ValueError(
                f"it has format {version}, and this version of Invar writes {FORMAT}; remove it, "
                f"or name another folder"
            )
        db.executescript(f"{SCHEMA} PRAGMA user_version = {FORMAT};")
        return db

    async def put(
        self,
        owner: str,
        response: dict[str, Any],
        items: list[dict[str, Any]],
        *,
        running: bool = False,
    ) -> bool:
        """Keeps a response, making room for it. False if it is too large, or the disk failed."""
        given, answer = msgspec.json.encode(items), msgspec.json.encode(response)
        size, now = len(given) + len(answer), time.time()
        name = response["id"]
        row = (name, owner, response["previous_response_id"], size, now, now, running)
        if size > self.max_bytes:
            return False

        def work(db: sqlite3.Connection) -> bool:
            db.execute("BEGIN IMMEDIATE")
            self._make_room(db, size, now)
            db.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            db.execute("INSERT INTO bodies VALUES (?, ?, ?)", (name, given, answer))
            db.execute("COMMIT")
            return True

        return await self._write(work)

    def _make_room(self, db: sqlite3.Connection, size: int, now: float) -> None:
        """The expired go, then the least recently used."""
        db.execute("DELETE FROM responses WHERE created < ?", (now - MAX_AGE_S,))
        rows, total = db.execute("SELECT rows, bytes FROM total").fetchone()
        oldest = db.execute("SELECT id, bytes FROM responses ORDER BY used")
        leaving = []
        while rows >= self._max_rows or total + size > self.max_bytes:
            name, freed = oldest.fetchone()
            leaving.append((name,))
            rows, total = rows - 1, total - freed
        oldest.close()
        db.executemany("DELETE FROM responses WHERE id = ?", leaving)

    async def finish(self, owner: str, response: dict[str, Any]) -> bool:
        """The end of a background response, unless it has ended already."""
        answer = msgspec.json.encode(response)

        def work(db: sqlite3.Connection) -> bool:
            db.execute("BEGIN IMMEDIATE")
            name = response["id"]
            found = changed(
                db,
                "UPDATE responses SET running = 0, used = ?, bytes = bytes + ? - "
                "(SELECT length(response) FROM bodies WHERE id = ?) "
                "WHERE id = ? AND owner = ? AND running",
                (time.time(), len(answer), name, name, owner),
            )
            if found:
                db.execute("UPDATE bodies SET response = ? WHERE id = ?", (answer, name))
            db.execute("COMMIT")
            return found

        return await self._write(work)

    async def beat(self, response_id: str) -> bool:
        """A sign of life of a background response; False if it has been ended elsewhere."""

        def work(db: sqlite3.Connection) -> bool:
            sql = "UPDATE responses SET used = ? WHERE id = ? AND running"
            return changed(db, sql, (time.time(), response_id))

        return await self._write(work, if_it_fails=True)

    async def get(self, owner: str, response_id: str) -> Kept | None:
        return await self._run(lambda db: self._read(db, owner, response_id))

    async def chain(self, owner: str, response_id: str, max_bytes: int) -> list[Kept] | None:
        """A response and all before it, the first one first; None if one of them is gone.

        Raises ValueError if they hold more than ``max_bytes``.
        """

        def work(db: sqlite3.Connection) -> list[Kept] | None:
            chain: list[Kept] = []
            name: str | None = response_id
            size = 0
            while name is not None:
                kept = self._read(db, owner, name)
                if kept is None:
                    return None
                chain.append(kept)
                sql = "SELECT bytes FROM responses WHERE id = ?"
                size += db.execute(sql, (name,)).fetchone()[0]
                if size > max_bytes:
                    raise ValueError(f"the responses before hold more than {max_bytes} bytes")
                name = kept.previous
            return chain[::-1]

        return await self._run(work)

    async def delete(self, owner: str, response_id: str) -> bool:
        def work(db: sqlite3.Connection) -> bool:
            sql = "DELETE FROM responses WHERE id = ? AND owner = ?"
            found = changed(db, sql, (response_id, owner))
            if found:
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # its text is in the log too
            return found

        return await self._run(work)

    def close(self) -> None:
        self._thread.submit(self._db.close).result()
        self._thread.shutdown()

    def _read(self, db: sqlite3.Connection, owner: str, response_id: str) -> Kept | None:
        """A look keeps what is looked at, unless it runs: then `used` is its sign of life."""
        now = time.time()
        found = db.execute(
            "SELECT id, previous, items, response, used, running FROM responses JOIN bodies "
            "USING (id) WHERE id = ? AND owner = ? AND created >= ?",
            (response_id, owner, now - MAX_AGE_S),
        ).fetchone()
        if found is None:
            return None
        name, previous, items, response, used, running = found
        if not running:
            sql = "UPDATE responses SET used = ? WHERE id = ?"
            self._guarded(lambda db: changed(db, sql, (now, response_id)), db, False)
        decode = msgspec.json.decode
        return Kept(name, previous, decode(items), decode(response), used, bool(running))

    async def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Raises a 503 where the file cannot be read or written."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, lambda: work(self._db))
        except sqlite3.Error as error:
            logger.error("responses cannot be reached in %s: %s", self.path, error)
            raise store_failed() from None

    async def _write(
        self, work: Callable[[sqlite3.Connection], bool], *, if_it_fails: bool = False
    ) -> bool:
        """An answer is worth more than its being kept: a failing disk costs a line in the log."""
        return await self._run(lambda db: self._guarded(work, db, if_it_fails))

    def _guarded(
        self,
        work: Callable[[sqlite3.Connection], bool],
        db: sqlite3.Connection,
        if_it_fails: bool,
    ) -> bool:
        try:
            return work(db)
        except sqlite3.Error as error:
            logger.error("a response could not be kept in %s: %s", self.path, error)
            if db.in_transaction:
                db.execute("ROLLBACK")
            return if_it_fails


def changed(db: sqlite3.Connection, sql: str, values: tuple[object, ...]) -> bool:
    return db.execute(sql, values).rowcount > 0


def store_failed() -> ApiError:
    return ApiError(
        503,
        "The responses that are kept cannot be reached now.",
        type="server_error",
        code="response_store_failed",
    )


@dataclass(frozen=True)
class InBackground:
    """A response that is computed while nobody waits for it."""

    task: asyncio.Task[None]
    cancel: Callable[[], None]


@dataclass
class KeptResponses:
    """The store, and the background responses that run in this process."""

    store: ResponseStore
    running: dict[str, InBackground] = field(default_factory=dict)

    def stop(self, response_id: str) -> None:
        """One that has been cancelled or deleted; another process sees it at its next beat."""
        one = self.running.get(response_id)
        if one is not None:
            one.cancel()

    async def close(self) -> None:
        tasks = [one.task for one in self.running.values()]
        await asyncio.gather(*tasks, return_exceptions=True)
        self.store.close()
