"""The parser of a command: argparse, with errors in one line.

Not typer: since 0.29 it imports pydantic to convert the first option, 0.15 s of main-thread time
before the first token of `invar run`; and what peers' users type is rewritten by `rewrite.py`
before anything is parsed.
"""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any, NoReturn

from invar.cli.rewrite import CommandLineError, Own

# vLLM's `human_readable_int`: small letters count in tens, capital ones in twos.
UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


def whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number") from None


def count(text: str) -> int:
    """A whole number, as 8192, 8k (8,000), 8K (8,192) or 25.6k."""
    if re.fullmatch(r"\d+(\.\d+)?[kmgKMG]", text):
        return int(float(text[:-1]) * UNITS[text[-1]])
    return whole(text)


def positive(text: str) -> int:
    number = whole(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def port_number(text: str) -> int:
    number = whole(text)
    if not 0 <= number <= 65535:
        raise argparse.ArgumentTypeError(f"{number} is outside 0 … 65535")
    return number


def byte_size(text: str) -> int:
    """Bytes, as 4294967296, 4GiB, 4GB (4,000,000,000) or 4G (4 GiB)."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:([KMGT])(iB|B)?|B)?", text, re.IGNORECASE)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no size such as 4GiB")
    number, unit, kind = found.groups()
    power = "KMGT".index(unit.upper()) + 1 if unit else 0
    return int(float(number) * (1000 if (kind or "").upper() == "B" else 1024) ** power)


def decimal(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number") from None


WHOLE = (whole, count, positive, port_number)
METAVARS: dict[object, str] = {**dict.fromkeys(WHOLE, "N"), decimal: "F", byte_size: "SIZE"}


class CommandParser(argparse.ArgumentParser):
    """Remembers every spelling of an option, and whether a value follows it."""

    def __init__(
        self, command: str, description: str, *, words: str = "[MODEL]", surplus: str = ""
    ) -> None:
        """``words``: what the command takes besides options; ``surplus``: a hint if it is more."""
        self.own: dict[str, Own] = {}
        self._surplus = surplus
        super().__init__(
            prog=f"invar {command}",
            usage=f"invar {command} {words} [OPTIONS]",
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.set_defaults(typed={})  # engine option → flag that set it, as `rewrite` has seen it

    def add_argument(self, *spellings: str, **settings: Any) -> argparse.Action:
        action = super().add_argument(*spellings, **settings)
        for spelling in action.option_strings:
            self.own[spelling] = Own(action.option_strings[0], action.nargs != 0)
        return action

    def model(self) -> None:
        """The model, which can be named in two ways."""
        self.add_argument(
            "model", nargs="?", metavar="MODEL", help="path or name; smollm2 if absent"
        )
        self.add_argument("--model", "-m", dest="option_model", metavar="MODEL", help="the same")

    def value(self, *spellings: str, help: str = "", default: Any = None, **settings: Any) -> None:
        """An option with a value; its default stands in the help where there is one."""
        shown = help if default is None or help == argparse.SUPPRESS else f"{help} ({default})"
        settings.setdefault("metavar", METAVARS.get(settings.get("type", str), "TEXT"))
        self.add_argument(*spellings, help=shown.strip(), default=default, **settings)

    def flag(self, *spellings: str, help: str) -> None:
        self.add_argument(*spellings, help=help, action="store_true")

    def print_help(self, file: Any = None) -> None:
        """Unlike argparse's own, it does not hide that nothing could be written."""
        (file or sys.stdout).write(self.format_help())

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument (\S+): ", r"\1: ", message)
        surplus = message.removeprefix("unrecognized arguments: ")
        if surplus != message:
            message = f"{surplus[:80]}: more words than the command takes{self._surplus}"
        raise CommandLineError(f"{message} (see {self.prog} --help)")


def add_kv_format(parser: CommandParser) -> None:
    parser.value("--kv-cache-dtype", metavar="NAME", help="of K and V: bf16, fp16 or int8 (bf16)")


def add_engine_options(parser: CommandParser) -> None:
    """Options of the engine that `run` and `serve` share, under vLLM's names."""
    parser.value("--max-model-len", "-c", type=count, help="tokens, prompt and answer")
    parser.value("--max-num-batched-tokens", type=count, help="tokens a step")
    parser.value("--max-num-seqs", type=whole, help="requests that run together")
    parser.value("--threads", "-t", type=whole, help="threads; all cores if absent, 0 or -1")
    parser.value("--gpu-memory-utilization", type=decimal, help="fraction of free memory")
    parser.value("--kv-cache-memory-bytes", type=count, help="memory of KV itself")
    add_kv_format(parser)
    parser.value("--revision", metavar="NAME", help="of a hub's repository: branch, tag or commit")
    parser.value("--load-format", metavar="NAME", help="auto, safetensors or gguf (auto)")
    parser.value("--tokenizer", metavar="MODEL", help="another file to take the tokenizer from")
    parser.value("--tokenizer-revision", metavar="NAME", help="of that one's repository")
    parser.value("--chat-template", metavar="FILE", help="jinja2, in place of the model's own")
    parser.value(
        "--generation-config",
        metavar="auto|vllm|PATH",
        help="defaults of sampling: auto the model's own, vllm none of them, or of another file",
    )
    parser.value(
        "--override-generation-config", metavar="JSON", help='before those: {"temperature": 0.5}'
    )
    parser.value("--engine-option", action="append", help=argparse.SUPPRESS)
