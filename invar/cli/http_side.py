"""An HTTP process of `invar serve`: its options, what it holds, and its run."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import math
import os
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from invar.cli.engine_options import or_default
from invar.cli.tables import size_text
from invar.weights.model_cache import cache_root

if TYPE_CHECKING:
    from socket import socket

    from invar.api.keys import KeyRing
    from invar.api.response_store import KeptResponses
    from invar.api.server import ServedModel, Server
    from invar.cli.tls import Tls
    from invar.config import EngineConfig
    from invar.engine.loader import TextSide
    from invar.observe.traces import Traces
    from invar.serving.messages import EngineFacts, EnginePort

logger = logging.getLogger("invar.api")

KEY_VARIABLES = ("INVAR_API_KEY", "VLLM_API_KEY")  # of the environment; the first that is set

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


def load_text(config: EngineConfig) -> TextSide:
    """All that an HTTP process has of the model; what it needs besides is imported with it."""
    import invar.api.app  # noqa: F401
    from invar.engine.loader import load_text_alone

    text = load_text_alone(config)
    gc.freeze()  # it stays: no collection need go through its vocabulary
    gc.enable()
    return text


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
    from invar.api.server import Server
    from invar.backends.runner import PAGE_TOKENS
    from invar.observe.access_log import AccessLog
    from invar.observe.metrics import Metrics
    from invar.serving.async_engine import AsyncEngine

    metrics = Metrics(config.names[0])
    metrics.show_queue_limits(http.max_queued_requests, http.max_queued_tokens)
    metrics.show_cache(
        block_size=PAGE_TOKENS,
        blocks=facts.kv_capacity_tokens // PAGE_TOKENS,
        dtype=config.kv_format,
        prefix_caching=config.enable_prefix_caching is not False,
    )
    log = AccessLog(sys.stderr.fileno(), metrics.count_dropped_line) if http.access_log else None
    return Server(
        served_model(config, facts, text, http),
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


def served_model(
    config: EngineConfig, facts: EngineFacts, text: TextSide, http: HttpOptions
) -> ServedModel:
    from invar.api.server import ServedModel
    from invar.engine.loader import door_of
    from invar.text.reply_detection import model_replies

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
    return ServedModel(
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
    )


def traces(url: str, model: str) -> Traces:
    from invar.observe.traces import Traces, otlp_exporter

    return Traces(otlp_exporter(url), model)


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
