"""Talking in a terminal: reading lines, writing pieces as they come, Ctrl-C stops the answer."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from invar.cli.conversation import AnswerError, Conversation
from invar.cli.engine_options import say
from invar.cli.rewrite import SWITCH_WORDS

HELP = "/bye ends (or Ctrl-D), /clear forgets what was said, Ctrl-C stops an answer"
HISTORY_LINES = 1000
INTERRUPTED = 130  # the shell's exit code for Ctrl-C


@dataclass(frozen=True)
class Terminal:
    colors: bool

    @classmethod
    def open(cls, color: str) -> Terminal:
        """``color``: on, off or auto, which means only on a terminal and without NO_COLOR."""
        if color not in SWITCH_WORDS:
            raise ValueError(f"--color {color[:20]}: not one of auto, on, off")
        # A model may say what the terminal's encoding has no character for.
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")
        wanted = color in ("on", "1", "true", "enabled")
        if color == "auto":
            wanted = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        return cls(wanted)

    @property
    def prompt(self) -> str:
        # \001 and \002 tell readline that what is between them takes no room.
        return "\001\033[1;32m\002>>> \001\033[0m\002" if self.colors else ">>> "


class StopFlag:
    """Set by Ctrl-C while an answer runs: the engine is left alone in mid-step."""

    def __init__(self) -> None:
        self.is_set = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        self.is_set = False
        before = signal.signal(signal.SIGINT, self._set)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _set(self, number: int, frame: FrameType | None) -> None:
        if self.is_set:
            raise KeyboardInterrupt  # a second Ctrl-C does not wait for the step
        self.is_set = True


def one_answer(conversation: Conversation, text: str) -> int:
    """Writes one answer to stdout; returns the exit code."""
    stop = StopFlag()
    try:
        with stop.listening():
            write(conversation.answer(text, lambda: stop.is_set))
    except AnswerError as error:
        say(f"invar: {error}")
        return 1
    return INTERRUPTED if stop.is_set else 0


def write(pieces: Iterator[str]) -> None:
    """Each piece is out before the next token is computed."""
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()


def chat(conversation: Conversation, terminal: Terminal) -> None:
    """Reads lines and answers them until /bye or the end of input."""
    say(HELP)
    if not conversation.chats:
        say("This model has no chat template: it goes on with each text, without memory.")
    stop = StopFlag()
    with history():
        while True:
            try:
                line = input(terminal.prompt).strip()
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print()
                continue
            if line == "/bye":
                return
            if line == "/clear":
                conversation.clear()
            elif line.startswith("/") and line[1:].isalpha():
                say(HELP)
            elif line:
                reply(conversation, stop, line)


def reply(conversation: Conversation, stop: StopFlag, line: str) -> None:
    try:
        with stop.listening():
            write(conversation.answer(line, lambda: stop.is_set))
    except AnswerError as error:
        say(f"invar: {error} (/clear forgets what was said)")
    except KeyboardInterrupt:
        print()


@contextmanager
def history() -> Iterator[None]:
    """Lines of earlier chats under the arrow keys, where there is a readline and a home."""
    try:
        import readline
    except ImportError:
        yield
        return
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    path = state / "invar" / "history"
    try:
        readline.read_history_file(path)
    except OSError:
        readline.clear_history()
    readline.set_history_length(HISTORY_LINES)
    try:
        yield
    finally:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(path)
        except OSError as error:
            say(f"invar: the history cannot be kept: {error}")
