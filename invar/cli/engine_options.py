"""What `run` and `serve` share: from options to a loaded model."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from invar.config import NOTICE, EngineConfig

if TYPE_CHECKING:
    from invar.engine.loader import LoadedModel


def engine_config(args: argparse.Namespace, **options: Any) -> EngineConfig:
    """Of the shared options and some of a command's own; None leaves a default as it is."""
    from invar.engine.sampling_defaults import overriding

    options |= {
        "model": chosen_model(args),
        "num_threads": or_default("--threads", args.threads),
        "max_model_len": or_default("--max-model-len", args.max_model_len),
        "max_num_batched_tokens": or_default(
            "--max-num-batched-tokens", args.max_num_batched_tokens
        ),
        "gpu_memory_utilization": args.gpu_memory_utilization,
        "kv_cache_memory_bytes": args.kv_cache_memory_bytes,
        "kv_cache_dtype": args.kv_cache_dtype,
        "revision": args.revision,
        "load_format": args.load_format,
        "tokenizer": args.tokenizer,
        "tokenizer_revision": args.tokenizer_revision,
        "chat_template": args.chat_template and template_text(args.chat_template),
        "generation_config": args.generation_config,
        "override_generation_config": json_object(
            "--override-generation-config", args.override_generation_config
        ),
    }
    given = {name: value for name, value in options.items() if value is not None}
    for item in args.engine_option or ():
        name, _, value = item.partition("=")
        given[name.replace("-", "_")] = json.loads(value)
    with as_typed(args.typed):
        config = EngineConfig.from_args(**given)
    overriding(config)  # before a model is read
    return config


def json_object(flag: str, given: str | None) -> dict[str, Any] | None:
    """Raises ValueError where a flag's value is no JSON object."""
    if given is None:
        return None
    try:
        found = json.loads(given)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f'{flag}: {given[:60]!r} is no JSON object such as {{"temperature": 0.5}}')
    return found


@contextmanager
def as_typed(flags: Mapping[str, str]) -> Iterator[None]:
    """Notices and errors of the configuration name the flag that was typed."""
    notices = NoticesAsTyped(flags)
    logger = logging.getLogger("invar")
    logger.addFilter(notices)
    try:
        yield
    except ValueError as error:
        name = re.match(r"\w*", str(error))[0]  # type: ignore[index]  # it matches always
        raise ValueError(flags.get(name, name) + str(error)[len(name) :]) from None
    finally:
        logger.removeFilter(notices)


class NoticesAsTyped(logging.Filter):
    """Takes notices about flags from the log and says them as those of other flags are said."""

    def __init__(self, flags: Mapping[str, str]) -> None:
        super().__init__()
        self._flags = flags

    def filter(self, record: logging.LogRecord) -> bool:
        if record.msg != NOTICE or not isinstance(record.args, tuple):
            return True
        name, value, reason = record.args
        flag = self._flags.get(str(name))
        if flag is None:
            return True
        typed = flag if isinstance(value, bool) else f"{flag} {value}"
        say(f"invar: {typed} has nothing to do here: {reason}")
        return False


def chosen_model(args: argparse.Namespace) -> str | None:
    model, option = args.model, args.option_model
    if model is not None and option is not None and model != option:
        raise ValueError(f"two models were named: {option} and {model}")
    chosen: str | None = option if model is None else model
    return chosen


def template_text(given: str) -> str:
    """A template is the path of a file, or the text itself (it then has a brace)."""
    if "{" in given:
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"--chat-template {given}: {error.strerror}; give the path of a jinja2 file"
        ) from None


def fetch(config: EngineConfig) -> Path:
    """The model's file, pulled if need be, saying how far it is."""
    from invar.cli.pull import Reporter
    from invar.weights import sources

    with Reporter() as reporter:
        wanted = sources.Wanted(config.revision, config.load_format)
        return sources.resolve(config.model, reporter, wanted)


def load(config: EngineConfig) -> LoadedModel:
    """Fetches the model and builds its engine."""
    from invar.engine.loader import load_engine

    fetch(config)
    model = load_engine(config)
    gc.freeze()  # it stays: no collection need go through its vocabulary
    gc.enable()
    return model


def or_default(name: str, value: int | None, marks: tuple[int, ...] = (0, -1)) -> int | None:
    """None for the numbers with which llama.cpp leaves an option at its default.

    Raises ValueError for any other negative number.
    """
    if value is None or value in marks:
        return None
    if value < 0:
        shown = " or ".join(map(str, marks))
        raise ValueError(f"{name}: {value} is negative; {shown} leaves it at its default")
    return value


def say(text: str) -> None:
    """A line for whoever watches; stdout belongs to the answer."""
    print(text, file=sys.stderr, flush=True)
