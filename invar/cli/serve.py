"""`invar serve`: a model over HTTP."""

from __future__ import annotations

import argparse
import json
import re
from typing import TYPE_CHECKING

from invar.cli.engine_options import engine_config, load, or_default
from invar.cli.parser import CommandParser, add_engine_options, byte_size, port_number, whole
from invar.observe.logs import set_up_logging
from invar.weights.model_cache import cache_root

if TYPE_CHECKING:
    from invar.api.server import Server
    from invar.engine.loader import LoadedModel
    from invar.serving.messages import EnginePort

DESCRIPTION = "Serves a model over HTTP with OpenAI's API. The flags of vLLM and SGLang work too."

# What a browser sends as Origin: a scheme, a host and perhaps a port, and no path.
ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+")


def parser() -> CommandParser:
    parser = CommandParser("serve", DESCRIPTION)
    parser.model()
    parser.value("--host", default="127.0.0.1", help="0.0.0.0 listens to others too")
    parser.value("--port", type=port_number, default=8000, help="0 takes a free one")
    parser.value(
        "--served-model-name", action="append", metavar="NAME", help="in the API; repeatable"
    )
    add_engine_options(parser)
    parser.value("--seed", type=whole, help="of requests without one of their own; -1: random")
    parser.value("--scheduling-policy", metavar="NAME", help="fcfs, priority, lpm or fair")
    parser.value("--max-logprobs", type=whole, help="most a request may ask for")
    parser.value(
        "--kv-store", metavar="DIR", help="prefixes of prompts kept on disk; off: nothing is"
    )
    parser.value("--kv-store-size", type=byte_size, help="most of it, as 4GiB")
    parser.flag("--kv-store-salted", help="also prefixes of requests with a cache_salt")
    parser.value("--api-key", action="append", metavar="KEY", help="clients send it; repeatable")
    parser.value("--allowed-origins", default="*", help="for browsers: *, or a JSON list")
    parser.flag("--strict-fields", help="refuse request fields nobody knows")
    parser.value("--shutdown-timeout", type=whole, default=10, help="seconds for running requests")
    parser.flag("--no-access-log", help="without one line a request")
    parser.value("--log-level", default="info", help="debug, info, warning or error")
    return parser


def execute(args: argparse.Namespace) -> int:
    set_up_logging(args.log_level)
    allowed_origins = origins(args.allowed_origins)
    names = args.served_model_name
    config = engine_config(
        args,
        served_model_name=tuple(names) if names else None,
        max_num_seqs=or_default("--max-num-seqs", args.max_num_seqs),
        seed=None if args.seed == -1 else args.seed,  # llama.cpp's spelling of "random"
        scheduling_policy=args.scheduling_policy,
        max_logprobs=args.max_logprobs,
        kv_store=store_folder(args.kv_store),
        kv_store_size=args.kv_store_size,
        kv_store_salted=args.kv_store_salted,
        paces_prompts=True,
    )
    from invar.cli.listening import announce, end_on_signal, listen, run_server

    # Before the model is read, so that a port in use is said at once.
    listener = listen(args.host, args.port)
    end_on_signal()
    loaded = load(config)
    from invar.api.app import create_app
    from invar.serving.worker import EngineThread

    port = EngineThread(loaded.engine)
    server = http_server(loaded, port, args.strict_fields, tuple(args.api_key or ()))
    announce(loaded, server.model.names, listener, needs_key=bool(args.api_key))
    run_server(
        create_app(server, allowed_origins=allowed_origins),
        listener,
        shutdown_timeout_s=args.shutdown_timeout,
        access_log=not args.no_access_log,
    )
    # Uvicorn skips its own end after a second Ctrl-C; the thread must be out of the memory first.
    port.close()
    loaded.close()
    return 0


def store_folder(given: str | None) -> str | None:
    """Where prefixes are kept: beside the models unless another folder, or none, was asked for."""
    if given == "off":
        return None
    return str(cache_root() / "kv") if given is None else given


def http_server(
    loaded: LoadedModel, port: EnginePort, strict_fields: bool, api_keys: tuple[str, ...]
) -> Server:
    """The state of the HTTP side around a loaded model."""
    from invar.api.limits import Limits
    from invar.api.server import ServedModel, Server
    from invar.observe.metrics import Metrics
    from invar.serving.async_engine import AsyncEngine

    names = loaded.config.names
    metrics = Metrics(names[0])
    return Server(
        ServedModel(
            names=names,
            tokenizer=loaded.tokenizer,
            chat_template=loaded.chat_template,
            door=loaded.door,
            fingerprint=loaded.info.fingerprint,
            root=loaded.config.model,
        ),
        AsyncEngine(port, metrics),
        metrics,
        limits=Limits(logprobs=loaded.config.max_logprobs),
        strict_fields=strict_fields,
        takes_priorities=loaded.config.scheduling_policy == "priority",
        api_keys=api_keys,
    )


def origins(given: str) -> tuple[str, ...]:
    """vLLM writes a JSON list; names with commas between them are taken too."""
    try:
        names = json.loads(given) if given.startswith("[") else given.split(",")
    except ValueError:
        raise ValueError(f"--allowed-origins {given[:60]}: no JSON list") from None
    for name in names:
        if not isinstance(name, str) or not ORIGIN.fullmatch(name):
            raise ValueError(
                f"--allowed-origins: {str(name)[:60]!r} is neither * nor an origin such as "
                f"https://example.org"
            )
    return tuple(names)
