"""The page store: what was written is found, what was damaged is not, and nothing grows."""

from __future__ import annotations

import errno
import logging
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from cli.commands import environment

from engine.stored_pages import (
    BOTH,
    LAYOUT,
    SIZE,
    content,
    found,
    num_found,
    pages,
    put,
    put_all,
)
from invar.engine import page_file, page_store
from invar.engine.page_file import Page, PageFile, PageFileError, PageLayout
from invar.engine.page_store import PageStore, open_store
from invar.engine.stored_prefix import root_of


@contextmanager
def opened(folder: Path, size: int = SIZE, layout: PageLayout = LAYOUT) -> Iterator[PageStore]:
    store = PageStore(folder, layout, size)
    yield store
    store.close()


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.kv"))


def test_what_is_written_is_found_by_the_next_process(tmp_path: Path) -> None:
    some = pages(20)
    with opened(tmp_path) as store:
        put_all(store, some)
        assert num_found(store, some) == store.num_pages == store.pages_written == 20
    with opened(tmp_path) as store:
        assert num_found(store, some) == store.pages_read == 20
        assert not found(store, pages(21)[20])
        put_all(store, pages(21)[20:])
    assert len(files(tmp_path)) == 2, "a file with free slots goes on"
    with opened(tmp_path) as store:
        assert num_found(store, pages(21)) == 21


def test_a_page_of_some_groups_is_completed(tmp_path: Path) -> None:
    part, whole = pages(1, groups=1)[0], pages(1)[0]
    with opened(tmp_path) as store:
        put_all(store, [part])
        assert store.groups_of(part.key) == 1
        assert found(store, part)
        assert not found(store, whole)
        put_all(store, [whole, part])
        assert store.pages_written == 2
        assert found(store, whole)
    with opened(tmp_path) as store:
        assert found(store, whole)


def test_a_key_alone_finds_nothing(tmp_path: Path) -> None:
    """Whoever asks under the same key for other tokens, or behind others, gets nothing."""
    page = pages(1)[0]
    for other in (
        Page(page.key, root_of("salt"), page.ids, BOTH),
        Page(page.key, page.parent, page.ids[4:] + page.ids[:4], BOTH),
    ):
        with opened(tmp_path) as store:
            put_all(store, [page])
            assert found(store, page)
            assert store.read(other, np.zeros(LAYOUT.slot_bytes, np.uint8), wait=True) is None


def test_nothing_waits_for_the_disk(tmp_path: Path) -> None:
    """A page that is not in memory is not there yet, and comes after it was asked for."""
    page = pages(1)[0]
    with opened(tmp_path) as store:
        put_all(store, [page])
    with opened(tmp_path) as store:
        fd = os.open(files(tmp_path)[0], os.O_RDWR)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
        out = np.zeros(LAYOUT.slot_bytes, np.uint8)
        store.prefetch(page.key)
        while not (there := store.read(page, out, wait=False)):
            assert there is False
        assert (out[: LAYOUT.page_bytes[0]] == content(page)[: LAYOUT.page_bytes[0]]).all()


# ---------------------------------------------------------------------------------------- damage


def test_a_heading_is_not_trusted_with_memory(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put_all(store, pages(3))
    (path,) = files(tmp_path)
    with path.open("r+b") as file:
        heading = np.frombuffer(file.read(page_file.HEADING.itemsize), page_file.HEADING).copy()
        heading["slots"] = 1 << 50
        page_file.seal(heading)
        file.seek(0)
        file.write(heading.tobytes())
    with opened(tmp_path) as store:
        assert store.num_pages == 0


@pytest.mark.parametrize("region", ["magic", "identity", "slots", "heading's checksum"])
def test_a_damaged_heading_hides_the_file(
    tmp_path: Path, region: str, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path) as store:
        put_all(store, pages(3))
    offset = {"magic": 3, "identity": 20, "slots": 40, "heading's checksum": 50}[region]
    flip(files(tmp_path)[0], offset)
    with caplog.at_level(logging.WARNING), opened(tmp_path) as store:
        assert len(caplog.messages) == 1, caplog.messages
        assert "1 files are ignored" in caplog.messages[0]
        assert num_found(store, pages(3)) == 0
        put_all(store, pages(3))
        assert num_found(store, pages(3)) == 3


@pytest.mark.parametrize("field", LAYOUT.row.names)
def test_a_damaged_row_hides_its_page(tmp_path: Path, field: str) -> None:
    with opened(tmp_path) as store:
        put_all(store, pages(3))
    assert LAYOUT.row.fields is not None
    flip(files(tmp_path)[0], page_file.UNIT + LAYOUT.row.itemsize + LAYOUT.row.fields[field][1])
    with opened(tmp_path) as store:
        assert [found(store, page) for page in pages(3)] == [True, False, True]
        put_all(store, pages(4))
    with opened(tmp_path) as store:
        assert num_found(store, pages(4)) == 4


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("byte", [0, 1, 250, 499])
def test_damaged_bytes_hide_their_page(
    tmp_path: Path, group: int, byte: int, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path) as store:
        put_all(store, pages(3))
        slots = store.slots
    start = LAYOUT.table_bytes(slots) + LAYOUT.slot_bytes
    flip(files(tmp_path)[0], start + LAYOUT.spans[group].start + byte)
    with opened(tmp_path) as store:
        assert [found(store, page) for page in pages(3)] == [True, False, True]
        assert [message for message in caplog.messages if "damaged" in message]
        assert not store.groups_of(pages(2)[1].key), "it is still in the index"
        put_all(store, pages(3))
        assert num_found(store, pages(3)) == 3


def test_files_that_end_early(tmp_path: Path) -> None:
    """At every block, and in the middle of what is shorter: what lies before is found."""
    with opened(tmp_path) as store:
        put_all(store, pages(4))
        slots = store.slots
    whole = files(tmp_path)[0].read_bytes()
    start = LAYOUT.table_bytes(slots)
    for size in (0, 7, 60, 4095, 4096, 4200, start, *range(start + 1000, len(whole), 5000)):
        files(tmp_path)[0].write_bytes(whole[:size])
        with opened(tmp_path) as store:
            there = [found(store, page) for page in pages(4)]
            assert there == sorted(there, reverse=True)
            assert sum(there) >= (size - start) // LAYOUT.slot_bytes
        for path in files(tmp_path)[1:]:
            path.unlink()
    files(tmp_path)[0].write_bytes(whole)
    with opened(tmp_path) as store:
        assert num_found(store, pages(4)) == 4


def test_of_another_build(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path) as store:
        put_all(store, pages(3))
    for other in (PageLayout("another", LAYOUT.page_bytes), PageLayout("a build", (9000, 501))):
        with opened(tmp_path, layout=other) as store:
            assert store.num_pages == 0
            # A file that was copied into the folder is known by its heading.
            target = store.folder / "00000007.kv"
            target.write_bytes(files(tmp_path)[0].read_bytes())
            with pytest.raises(PageFileError, match="another model or version"):
                PageFile.open(target, other, writable=False)
        with opened(tmp_path, layout=other) as store:
            assert store.num_pages == 0
    assert all("are ignored" in message for message in caplog.messages)
    with opened(tmp_path) as store:
        assert num_found(store, pages(3)) == 3


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x40
    path.write_bytes(data)


def test_killed_while_it_writes(tmp_path: Path) -> None:
    """Whatever a killed process leaves is usable."""
    for kill_after in (1, 40, 90):
        process = subprocess.Popen(
            [sys.executable, "-m", "engine.stored_pages", str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
            env={**environment(), "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert process.stdout is not None
        for line in process.stdout:
            if int(line) >= kill_after:
                break
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        with opened(tmp_path) as store:
            there = [found(store, page) for page in pages(150)]
            assert there == sorted(there, reverse=True)
            put_all(store, pages(3, start=kill_after))
            assert num_found(store, pages(3, start=kill_after)) == 3
    assert sum(there) > 10


# ---------------------------------------------------------------------------------------- bounds


def test_the_size_is_kept_and_what_is_unused_goes_first(tmp_path: Path) -> None:
    size = 12 * LAYOUT.file_bytes(4)
    with opened(tmp_path, size) as store:
        for start in range(60):
            put_all(store, pages(4, start))
            assert found(store, pages(1)[0]), "a page in use has gone"
            assert store.bytes <= size
            assert sum(path.stat().st_size for path in files(tmp_path)) <= size
        assert not found(store, pages(1, 5)[0])
        assert num_found(store, pages(4, 59)) == 4
    smaller = size // 2
    with opened(tmp_path, smaller) as store:
        assert store.bytes <= smaller
        assert store.num_pages
    with pytest.raises(ValueError, match="hold no page"):
        PageStore(tmp_path, LAYOUT, LAYOUT.slot_bytes)


def test_pages_of_other_builds_make_room(tmp_path: Path) -> None:
    size = 12 * LAYOUT.file_bytes(4)
    other = PageLayout("another", LAYOUT.page_bytes)
    with opened(tmp_path, size) as store:
        put_all(store, pages(40))
        stopped = files(tmp_path)
    with opened(tmp_path, size, other) as store:
        assert store.bytes > 0
        put_all(store, pages(40))
        assert num_found(store, pages(40)) == 40
        assert sum(path.stat().st_size for path in files(tmp_path)) <= size
        assert len([path for path in stopped if path.exists()]) < len(stopped)
        # Those of a server that runs are not counted and not touched.
        with opened(tmp_path, size) as running:
            put_all(running, pages(40))
            put_all(store, pages(40, 500))
            assert num_found(running, pages(40)) == 40


def test_reset(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put_all(store, pages(10))
        put(store, pages(11)[10])
        store.reset()
        store.flush()
        assert not num_found(store, pages(11))
        assert not files(tmp_path)
        put_all(store, pages(2))
        assert num_found(store, pages(11)) == 2
    with opened(tmp_path) as store:
        assert num_found(store, pages(11)) == 2


# ------------------------------------------------------------------------------- folders and disks


def test_the_folder_is_private(tmp_path: Path) -> None:
    os.umask(mask := os.umask(0o022))
    folder = tmp_path / "kv"
    folder.mkdir(mode=0o755)
    with opened(folder) as store:
        put_all(store, pages(1))
        for path in (folder, store.folder):
            assert stat.S_IMODE(path.stat().st_mode) == 0o700
        for path in store.folder.iterdir():
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
    folder.chmod(0o755)
    with opened(folder):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert mask == os.umask(mask)


@pytest.mark.parametrize("fault", ["holds other files", "is a file", "inner is a link", "small"])
def test_no_store_is_one_line(tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture) -> None:
    folder, size = tmp_path / "kv", SIZE
    if fault == "holds other files":
        folder.mkdir()
        folder.chmod(0o755)
        (folder / "letter.txt").touch()
    elif fault == "is a file":
        folder.touch()
    elif fault == "inner is a link":
        folder.mkdir(mode=0o700)
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        (folder / LAYOUT.identity.hex()[:16]).symlink_to(tmp_path / "elsewhere")
    else:
        size = 5000
    assert open_store(folder, LAYOUT, size) is None
    assert len(caplog.messages) == 1
    assert "none is used" in caplog.messages[0]


def test_a_second_server_reads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path) as first:
        put_all(first, pages(3))
        with opened(tmp_path) as second:
            assert len([line for line in caplog.messages if "read only" in line]) == 1
            assert num_found(second, pages(3)) == 3
            assert not put(second, pages(4)[3])
            second.reset()
            assert not num_found(second, pages(3))
        assert num_found(first, pages(3)) == 3
        put_all(first, pages(5))
    with opened(tmp_path) as third:
        assert num_found(third, pages(5)) == 5


def test_a_folder_that_may_only_be_read(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put_all(store, pages(3))
        inner = store.folder
    inner.chmod(0o500)
    (inner / "lock").chmod(0o400)
    with not_root(tmp_path), opened(tmp_path) as store:
        assert num_found(store, pages(3)) == 3
        assert not put(store, pages(4)[3])
    inner.chmod(0o700)


@contextmanager
def not_root(folder: Path) -> Iterator[None]:
    """Permissions do not hold root: the folder is another user's, and so are we meanwhile."""
    if os.geteuid() != 0:
        yield
        return
    parents = [parent for parent in folder.parents if parent.stat().st_uid == 0]
    modes = [(parent, parent.stat().st_mode) for parent in parents]
    for path in [folder, *folder.rglob("*")]:
        os.chown(path, 65534, 65534)
    for parent in parents:
        parent.chmod(parent.stat().st_mode | 0o011)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)
        for parent, mode in modes:
            parent.chmod(mode)
        for path in [folder, *folder.rglob("*")]:
            os.chown(path, 0, 0)


def test_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path) as store:
        put_all(store, pages(3))

        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            put(store, pages(4)[3])
            store.flush()
        assert len(caplog.messages) == 1
        assert "No space left" in caplog.messages[0]
        assert num_found(store, pages(4)) == 3
        assert not put(store, pages(4)[3])
    with opened(tmp_path) as store:
        put_all(store, pages(4))
        assert num_found(store, pages(4)) == 4


def test_a_disk_that_works_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now, attempts = 0.0, 0
    monkeypatch.setattr(page_store.time, "monotonic", lambda: now)

    def broken(*_: object) -> int:
        nonlocal attempts
        attempts += 1
        raise OSError(errno.EIO, "Input/output error")

    with opened(tmp_path) as store:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", broken)
            for _ in range(24 * 60):
                put(store, pages(1)[0])
                store.flush()
                now += 60
        assert 40 < attempts < 60
        assert len(caplog.messages) == 1, "one line, however long it lasts"
        assert not files(tmp_path), "what could not be written lies around"
        now += page_store.LAST_RETRY_S
        put_all(store, pages(3))
        assert num_found(store, pages(3)) == 3
        assert caplog.messages[1:] == [f"KV store: pages are written to {store.folder} again"]


def test_the_writer_takes_what_it_has_buffers_for(tmp_path: Path) -> None:
    """Whoever puts pages never waits: what cannot be taken is refused, and can come again."""
    with opened(tmp_path) as store:
        writer = store.writer
        assert writer is not None
        number = writer.size // LAYOUT.slot_bytes
        with store._lock:  # the writer stands still
            buffers = [writer.buffer() for _ in range(number)]
            assert writer.buffer() is None
            assert not put(store, pages(1)[0])
        writer._free += [buffer for buffer in buffers if buffer is not None]
        put_all(store, pages(1))
        assert found(store, pages(1)[0])
