"""`invar serve`: a model over HTTP."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import math
import os
import re
import signal
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from invar.cli.engine_options import engine_config, fetch, or_default
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
from invar.cli.tables import size_text
from invar.observe.catalogue import FOLDER_VARIABLE
from invar.observe.logs import set_up_logging
from invar.weights.model_cache import cache_root

if TYPE_CHECKING:
    from socket import socket

    from invar.api.keys import KeyRing
    from invar.api.response_store import KeptResponses
    from invar.api.server import Server
    from invar.cli.tls import Tls
    from invar.config import EngineConfig
    from invar.engine.loader import TextSide
    from invar.observe.traces import Traces
    from invar.serving.messages import EngineFacts, EnginePort

logger = logging.getLogger("invar.api")

DESCRIPTION = "Serves a model over HTTP with OpenAI's API. The flags of vLLM and SGLang work too."

KEY_VARIABLES = ("INVAR_API_KEY", "VLLM_API_KEY")  # of the environment; the first that is set
OPEN_DOOR = (
    "listening beyond this machine without an API key: whoever reaches the port can use the model "
    "(--api-key or --api-key-file asks for one)"
)

EXIT_ENGINE_DEAD = 70  # EX_SOFTWARE: the engine could not be kept up

# What a browser sends as Origin: a scheme, a host and perhaps a port, and no path.
ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+")


@dataclass(frozen=True)
class HttpOptions:
    """What the HTTP side is started with."""

    keys: KeyRing
    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None
    keep_alive_s: float = 15.0
    stall_timeout_s: float = 60.0
    strict_fields: bool = False
    open_metrics: bool = False
    access_log: bool = True
    traces_url: str | None = None  # of a collector
    tool_call_parser: str | None = None  # None: what the chat template writes
    reasoning_parser: str | None = None
    thinking_budget: int | None = None  # tokens of thoughts, of requests that name none


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


def load_text(config: EngineConfig) -> TextSide:
    """All that an HTTP process has of the model; what it needs besides is imported with it."""
    import invar.api.app  # noqa: F401
    from invar.engine.loader import load_text_alone

    text = load_text_alone(config)
    gc.freeze()  # it stays: no collection need go through its vocabulary
    gc.enable()
    return text


def serve_http(args: argparse.Namespace, server: Server, listener: socket, tls: Tls | None) -> int:
    """Until this process is told to end; returns how it ended, as `run_server` says."""
    from invar.api.app import create_app
    from invar.cli.listening import run_server

    return run_server(
        create_app(server, allowed_origins=origins(args.allowed_origins)),
        server,
        listener,
        tls=tls,
        drain_timeout_s=args.drain_timeout,
    )


def end_this_process() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def store_folder(given: str | None) -> str | None:
    """Where prefixes are kept: beside the models unless another folder, or none, was asked for."""
    if given == "off":
        return None
    return str(cache_root() / "kv") if given is None else given


def http_options(args: argparse.Namespace) -> HttpOptions:
    """Raises ValueError for one that is wrong."""
    from invar.api.keys import key_ring
    from invar.text.reply_detection import check_parsers

    check_parsers(args.tool_call_parser, args.reasoning_parser)
    given = args.api_key
    if given is None and args.api_key_file is None:
        given = [os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)][:1]
    for flag, value in (
        ("--drain-timeout", args.drain_timeout),
        ("--sse-keep-alive-interval", args.sse_keep_alive_interval),
        ("--max-num-queued-reqs", args.max_num_queued_reqs),
        ("--max-num-queued-tokens", args.max_num_queued_tokens),
    ):
        if value is not None and not 0 <= value < math.inf:
            raise ValueError(f"{flag}: {value} is not 0 or more")
    if not 0 < args.stream_stall_timeout < math.inf:
        raise ValueError(f"--stream-stall-timeout: {args.stream_stall_timeout} is not more than 0")
    return HttpOptions(
        key_ring(given or (), args.api_key_file),
        max_queued_requests=args.max_num_queued_reqs,
        max_queued_tokens=args.max_num_queued_tokens,
        keep_alive_s=args.sse_keep_alive_interval,
        stall_timeout_s=args.stream_stall_timeout,
        strict_fields=args.strict_fields,
        open_metrics=args.open_metrics,
        access_log=not args.no_access_log,
        traces_url=traces_url(args.otlp_traces_endpoint),
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        thinking_budget=or_default("--reasoning-budget", args.reasoning_budget, marks=(-1,)),
    )


def kept_responses(folder: str | None, size: int | None) -> KeptResponses | None:
    """The store of /v1/responses, announced, since it holds what users wrote.

    A folder that was named must do; in the place of the usual one there may be none.
    """
    from invar.api.response_store import DEFAULT_BYTES, MAX_AGE_S, KeptResponses, ResponseStore

    if folder == "off":
        print("  Responses: none are kept")
        return None
    try:
        chosen = str(cache_root() / "responses") if folder is None else folder
        store = ResponseStore(chosen, DEFAULT_BYTES if size is None else size)
    except ValueError as error:
        if folder is not None:
            raise
        print(f"  Responses: none are kept: {error}")
        return None
    print(
        f"  Responses: with store (OpenAI's default) kept in {chosen}, up to "
        f"{size_text(store.max_bytes)}, for {MAX_AGE_S // 86400} days (--response-store off)"
    )
    return KeptResponses(store)


def http_server(
    config: EngineConfig,
    facts: EngineFacts,
    text: TextSide,
    port: EnginePort,
    http: HttpOptions,
) -> Server:
    """The state of an HTTP process: what it has of the model, and its way to the engine."""
    from invar.api.limits import Limits
    from invar.api.server import ServedModel, Server
    from invar.backends.runner import PAGE_TOKENS
    from invar.engine.loader import door_of
    from invar.observe.access_log import AccessLog
    from invar.observe.metrics import Metrics
    from invar.serving.async_engine import AsyncEngine
    from invar.text.reply_detection import model_replies

    metrics = Metrics(config.names[0])
    metrics.show_queue_limits(http.max_queued_requests, http.max_queued_tokens)
    metrics.show_cache(
        block_size=PAGE_TOKENS,
        blocks=facts.kv_capacity_tokens // PAGE_TOKENS,
        dtype=config.kv_format,
        prefix_caching=config.enable_prefix_caching is not False,
    )
    tokenizer, chat_template = text.tokenizer, text.chat_template
    replies, notice = None, None
    if chat_template is not None:
        replies, notice = model_replies(
            chat_template,
            tokenizer,
            tool_parser=http.tool_call_parser,
            reasoning_parser=http.reasoning_parser,
            thinking_budget=http.thinking_budget,
        )
    if notice is not None:
        logger.warning("%s", notice)
    log = AccessLog(sys.stderr.fileno(), metrics.count_dropped_line) if http.access_log else None
    return Server(
        ServedModel(
            names=config.names,
            tokenizer=tokenizer,
            chat_template=chat_template,
            replies=replies,
            door=door_of(
                config,
                text,
                vocab_size=facts.vocab_size,
                max_model_len=facts.max_model_len,
                kv_capacity_tokens=facts.kv_capacity_tokens,
            ),
            fingerprint=facts.fingerprint,
            root=config.model,
            defaults=text.defaults,
        ),
        AsyncEngine(port, metrics),
        metrics,
        limits=Limits(
            logprobs=config.max_logprobs,
            keep_alive_s=http.keep_alive_s,
            stall_timeout_s=http.stall_timeout_s,
        ),
        strict_fields=http.strict_fields,
        takes_priorities=config.scheduling_policy == "priority",
        keys=http.keys,
        max_running=config.max_num_seqs,
        max_queued_requests=http.max_queued_requests,
        max_queued_tokens=http.max_queued_tokens,
        open_metrics=http.open_metrics,
        access_log=log,
        traces=None if http.traces_url is None else traces(http.traces_url, config.names[0]),
    )


def traces_url(endpoint: str | None) -> str | None:
    """Raises ValueError where traces cannot be sent."""
    if endpoint is None:
        return None
    try:
        from invar.observe.traces import otlp_url
    except ModuleNotFoundError as error:
        raise ValueError(
            f"--otlp-traces-endpoint: {error.name} is missing; pip install 'invar-llm[otel]'"
        ) from None
    return otlp_url(endpoint)


def traces(url: str, model: str) -> Traces:
    from invar.observe.traces import Traces, otlp_exporter

    return Traces(otlp_exporter(url), model)


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
