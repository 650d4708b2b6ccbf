"""`invar serve`: a model over HTTP."""

from __future__ import annotations

import argparse
import logging
import os
import signal
from typing import TYPE_CHECKING

from invar.cli.engine_options import engine_config, fetch, or_default
from invar.cli.http_side import (
    http_options,
    http_server,
    kept_responses,
    load_text,
    origins,
    serve_http,
)
from invar.cli.parser import (
    CommandParser,
    add_engine_options,
    byte_size,
    count,
    decimal,
    port_number,
    positive,
    whole,
)
from invar.observe.catalogue import FOLDER_VARIABLE
from invar.observe.logs import set_up_logging
from invar.weights.model_cache import cache_root

if TYPE_CHECKING:
    from invar.config import EngineConfig

logger = logging.getLogger("invar.api")

DESCRIPTION = "Serves a model over HTTP with OpenAI's API. The flags of vLLM and SGLang work too."

OPEN_DOOR = (
    "listening beyond this machine without an API key: whoever reaches the port can use the model "
    "(--api-key or --api-key-file asks for one)"
)

EXIT_ENGINE_DEAD = 70  # EX_SOFTWARE: the engine could not be kept up


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
    parser.value(
        "--response-store", metavar="DIR", help="where /v1/responses are kept; off: they are not"
    )
    parser.value("--response-store-size", type=byte_size, help="most of it, as 256MiB")
    parser.value("--api-key", action="append", metavar="KEY", help="clients send it; repeatable")
    parser.value(
        "--api-key-file", metavar="FILE", help="a key a line, or .yaml or .json with limits"
    )
    parser.flag("--open-metrics", help="/metrics without a key")
    parser.value("--max-num-queued-reqs", type=whole, help="more that wait are turned away")
    parser.value("--max-num-queued-tokens", type=count, help="of prompts that wait")
    parser.value(
        "--sse-keep-alive-interval", type=decimal, default=15.0, help="seconds; 0: no comments"
    )
    parser.value(
        "--stream-stall-timeout",
        type=decimal,
        default=60.0,
        help="seconds until a stream that nobody reads is cancelled",
    )
    parser.value("--ssl-keyfile", metavar="FILE", help="of TLS: the private key, as PEM")
    parser.value("--ssl-certfile", metavar="FILE", help="of TLS: the certificate and its chain")
    parser.value("--ssl-ca-certs", metavar="FILE", help="clients need a certificate of these")
    parser.value(
        "--ssl-cert-reqs", type=whole, help="with them: 0 none is asked for, 1 may be sent, 2 must"
    )
    parser.value("--allowed-origins", default="*", help="for browsers: *, or a JSON list")
    parser.value(
        "--tool-call-parser", metavar="NAME", help="of calls; by default as the chat template"
    )
    parser.value("--reasoning-parser", metavar="NAME", help="of thoughts; none: they are content")
    parser.value(
        "--reasoning-budget",
        type=whole,
        help="most tokens of thoughts where a request names no budget; -1: any number",
    )
    parser.flag("--strict-fields", help="refuse request fields nobody knows")
    parser.value(
        "--drain-timeout",
        "--shutdown-timeout",
        type=decimal,
        default=30.0,
        help="seconds for running requests at SIGTERM",
    )
    parser.flag("--no-access-log", help="without one line a request")
    parser.value("--otlp-traces-endpoint", metavar="URL", help="a collector of traces, over HTTP")
    parser.value(
        "--api-server-count", type=positive, default=1, help="HTTP processes before the engine"
    )
    parser.value("--log-level", default="info", help="debug, info, warning or error")
    return parser


def execute(args: argparse.Namespace) -> int:
    set_up_logging(args.log_level)
    if os.environ.pop(FOLDER_VARIABLE, None) is not None:
        logger.warning("%s has nothing to do here: it is set for each run anew", FOLDER_VARIABLE)
    origins(args.allowed_origins)
    config = serve_config(args)
    from invar.cli.listening import EarlyEnd, announce, is_loopback, listen, on_signal
    from invar.cli.tls import tls_options
    from invar.serving.supervisor import Supervisor

    # Before the model is read, so that a port in use is said at once.
    http, tls = http_options(args), tls_options(args)
    listener = listen(args.host, args.port)
    if not http.keys and not is_loopback(listener):
        logger.warning("%s", OPEN_DOOR)
    early_end = EarlyEnd()
    path = fetch(config)
    early_end.hold()  # or the supervisor's folder would be left
    supervisor = Supervisor(
        config, clients=args.api_server_count, log_level=args.log_level, on_dead=end_this_process
    )
    try:
        early_end.release()
        text = load_text(config)  # while the engine loads
        early_end.check()
        facts = supervisor.wait_ready()
        early_end.hold()
        responses = kept_responses(args.response_store, args.response_store_size)
        announce(
            config,
            path,
            facts,
            listener,
            chats=text.chat_template is not None,
            sampling=text.defaults.line,
            needs_key=bool(http.keys),
            tls=tls,
        )
        early_end.release()  # from here on those that serve look after signals
        if args.api_server_count > 1:
            from invar.cli.api_processes import ApiProcesses

            if responses is not None:
                responses.store.close()  # each of them opens it for itself
            code = ApiProcesses(args, config, facts, http, listener, supervisor).run()
        else:
            from invar.serving.client import EngineClient

            port = EngineClient(supervisor.run_folder)
            server = http_server(config, facts, text, port, http)
            server.responses = responses
            code = serve_http(args, server, listener, tls)
    finally:
        on_signal(signal.SIG_IGN)
        supervisor.close()
    return code if supervisor.dead is None else EXIT_ENGINE_DEAD


def serve_config(args: argparse.Namespace) -> EngineConfig:
    names = args.served_model_name
    return engine_config(
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


def end_this_process() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def store_folder(given: str | None) -> str | None:
    """Where prefixes are kept: beside the models unless another folder, or none, was asked for."""
    if given == "off":
        return None
    return str(cache_root() / "kv") if given is None else given
