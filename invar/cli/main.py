"""`invar`: finds the command, rewrites what was typed, and imports only what that command uses."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

# name → (module with a typer `app`, one line of help)
COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("invar.cli.run", "Answer a prompt in the terminal, or chat"),
    "serve": ("invar.cli.serve", "Serve a model over HTTP, OpenAI's API"),
    "pull": ("invar.cli.pull", "Bring a model into the cache"),
    "inspect": ("invar.cli.inspect", "Show a model's metadata, tensors and memory"),
    "bench": ("invar.cli.bench", "Measure the engine"),
}
REWRITTEN = ("run", "serve")  # commands that take the peers' spellings

USAGE_ERROR = 2  # exit code of a command line that cannot be understood


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of the command."""
    words = list(sys.argv[1:] if argv is None else argv)
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
    app: typer.Typer = importlib.import_module(COMMANDS[name][0]).app
    if name in REWRITTEN:
        from invar.cli.rewrite import CommandLineError, rewrite

        try:
            rewritten = rewrite(name, rest, own_options(app))
        except CommandLineError as error:
            return fail(str(error), USAGE_ERROR)
        for notice in rewritten.notices:
            print(f"invar: {notice}", file=sys.stderr)
        rest = rewritten.argv
    try:
        app(args=rest, prog_name=f"invar {name}")
    except SystemExit as ending:
        return ending.code if isinstance(ending.code, int) else int(bool(ending.code))
    except BrokenPipeError:
        # Whoever read the answer has seen enough; Python must not complain at its own exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except known_errors() as error:
        return fail(str(error), 1)
    return 0


def own_options(app: typer.Typer) -> dict[str, bool]:
    """Spellings of a command's own options, and whether a value follows."""
    import typer

    own = {"--help": False}
    for parameter in typer.main.get_command(app).params:
        if parameter.param_type_name == "option":
            takes_value = not getattr(parameter, "is_flag", False)
            for spelling in (*parameter.opts, *parameter.secondary_opts):
                own[spelling] = takes_value
    return own


def known_errors() -> tuple[type[Exception], ...]:
    """Errors whose text is written for whoever typed the command; others keep their traceback."""
    from invar.weights.model_cache import ModelSourceError

    return (ValueError, TypeError, OSError, ModelSourceError, MemoryError)


def fail(message: str, code: int) -> int:
    print(f"invar: {message}", file=sys.stderr)
    return code


def overview() -> str:
    lines = ["invar: serves large language models; the answer depends on the request alone", ""]
    lines += ["usage: invar COMMAND [OPTIONS]   (invar COMMAND --help says more)", ""]
    lines += [f"  {name:<9}{text}" for name, (_, text) in COMMANDS.items()]
    lines += ["", '  invar run -p "Hello"     answers with the default model']
    lines += ["  invar serve              serves it on 127.0.0.1:8000"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
