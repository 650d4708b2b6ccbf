"""How far a list of prompts is, on stderr."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager, nullcontext


class Bar:
    """A progress bar over prompts, on stderr."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self.progress = Progress(
            TextColumn("Prompts"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[speed]}"),
            console=Console(stderr=True),
        )
        self.task = self.progress.add_task("prompts", total=total, speed="")
        self.started = time.monotonic()
        self.tokens = 0

    def advance(self, tokens: int) -> None:
        self.tokens += tokens
        speed = self.tokens / (time.monotonic() - self.started)
        self.progress.update(self.task, advance=1, speed=f"{speed:,.0f} tokens/s")

    def __enter__(self) -> Bar:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()


def progress_bar(total: int, wanted: bool) -> AbstractContextManager[Bar | None]:
    """A bar for more than one prompt, on a terminal only."""
    if not wanted or total < 2 or not sys.stderr.isatty():
        return nullcontext()
    return Bar(total)
