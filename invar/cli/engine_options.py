"""What `run` and `serve` share: from options to a loaded model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from invar.config import EngineConfig

if TYPE_CHECKING:
    from invar.engine.loader import LoadedModel


def make_app() -> typer.Typer:
    """A typer application without completion scripts and without rich, which costs start-up."""
    return typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def engine_config(
    model: str | None, option_model: str | None, named: list[str] | None, **options: Any
) -> EngineConfig:
    """``named``: engine options as name=JSON, under vLLM's names. None leaves the default."""
    if model is not None and option_model is not None and model != option_model:
        raise ValueError(f"two models were named: {model} and {option_model}")
    given = {name: value for name, value in options.items() if value is not None}
    chosen = model if model is not None else option_model
    if chosen is not None:
        given["model"] = chosen
    for item in named or ():
        name, _, value = item.partition("=")
        given[name.replace("-", "_")] = json.loads(value) if value else None
    if "chat_template" in given:
        given["chat_template"] = template_text(given["chat_template"])
    return EngineConfig.from_args(**given)


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


def load(config: EngineConfig) -> LoadedModel:
    """Pulls the model if need be and builds its engine."""
    from invar.engine.loader import load_engine

    return load_engine(config)


def positive(value: int | None) -> int | None:
    """llama.cpp writes 0 or −1 where an option is to be left at its default."""
    return value if value is not None and value > 0 else None


def say(text: str) -> None:
    """A line for whoever watches; stdout belongs to the answer."""
    print(text, file=sys.stderr, flush=True)
