"""`invar`: finds the command, rewrites what was typed, and imports only what that command uses."""

from __future__ import annotations

import difflib
import gc
import importlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from invar.cli.parser import CommandParser

# Name → module with `parser() -> CommandParser` and `execute(args) -> int`, imported when used.
COMMANDS = {
    "run": "invar.cli.run",
    "serve": "invar.cli.serve",
    "pull": "invar.cli.pull",
    "inspect": "invar.cli.inspect",
    "bench": "invar.cli.bench",
}
HELP = {
    "run": "answer a prompt in the terminal, or chat",
    "serve": "serve a model over HTTP, with OpenAI's API",
    "pull": "bring a model into the cache",
    "inspect": "show a model's metadata, tensors and memory",
    "bench": "measure the engine or its kernels",
}

USAGE_ERROR = 2  # exit code of a command line that cannot be understood


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of the command."""
    # Numpy's BLAS starts its threads on import, which costs 60 ms; no command multiplies with it.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Starting makes many objects and hardly any garbage; looking for it costs 60 ms. With a model
    # loaded, `engine_options.load` lets collections go on.
    gc.disable()
    try:
        code = run_words(list(sys.argv[1:] if argv is None else argv))
    finally:
        gc.enable()
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        discard_output()
        # Whoever read the answer has seen enough; another error has been said already.
        if not isinstance(error, BrokenPipeError) and code == 0:
            return fail(f"stdout: {error.strerror}", 1)
    return code


def discard_output() -> None:
    """What is still in stdout's buffer goes nowhere; Python must not complain at its own exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run_words(words: list[str]) -> int:
    if sys.stdout is None:  # closed by whoever started it
        return fail("stdout is closed; >/dev/null will do", USAGE_ERROR)
    try:
        return dispatch(words)
    except BrokenPipeError:
        return 0
    except KeyboardInterrupt:
        return 130
    except known_errors() as error:
        return fail(error_text(error), 1)


def dispatch(words: list[str]) -> int:
    if words[0:1] == ["help"] and len(words) > 1:
        words = [words[1], "--help"]
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if words[0] in ("--version", "-V", "version"):
        from invar.observe.build import version_text

        print(f"invar {version_text()}")
        return 0
    name, rest = words[0], words[1:]
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; nearest: {near[0]}" if near else ""
        return fail(f"{name[:80]}: unknown command{hint} (see invar --help)", USAGE_ERROR)
    return run_command(name, rest)


def run_command(name: str, rest: list[str]) -> int:
    from invar.cli.rewrite import CommandLineError

    command = importlib.import_module(COMMANDS[name])
    try:
        parser = command.parser()
        code = command.execute(parser.parse_args(understood(name, rest, parser)))
    except CommandLineError as error:
        return fail(str(error), USAGE_ERROR)
    except SystemExit as ending:  # --help
        return ending.code if isinstance(ending.code, int) else int(bool(ending.code))
    return int(code)


def understood(name: str, rest: list[str], parser: CommandParser) -> list[str]:
    """What was typed in our own spellings; says what has nothing to do here."""
    from invar.cli.rewrite import rewrite

    rewritten = rewrite(name, rest, parser.own)
    for notice in rewritten.notices:
        print(f"invar: {notice}", file=sys.stderr)
    parser.set_defaults(typed=rewritten.typed)
    return rewritten.argv


def known_errors() -> tuple[type[Exception], ...]:
    """Errors whose text is written for whoever typed the command; others keep their traceback."""
    from invar.weights.model_cache import ModelSourceError

    return (ValueError, TypeError, OSError, ModelSourceError, MemoryError)


def error_text(error: Exception) -> str:
    """An error of the system without its number, and with the file that it is about."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror


def fail(message: str, code: int) -> int:
    print(f"invar: {message}", file=sys.stderr)
    return code


def overview() -> str:
    lines = ["invar: serves large language models; the answer depends on the request alone", ""]
    lines += ["usage: invar COMMAND [OPTIONS]   (invar COMMAND --help says more)", ""]
    lines += [f"  {name:<9}{text}" for name, text in HELP.items()]
    lines += ["", '  invar run -p "Hello"     answers with the default model']
    lines += ["  invar serve              serves it on 127.0.0.1:8000"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
