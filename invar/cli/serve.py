"""`invar serve`: a model over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from invar.cli.engine_options import engine_config, load, make_app, positive
from invar.observe.logs import set_up_logging

if TYPE_CHECKING:
    from invar.api.server import Server
    from invar.engine.loader import LoadedModel

app = make_app()


@app.command()
def serve(
    model: Annotated[str | None, typer.Argument(help="Path or name; smollm2 if absent")] = None,
    option_model: Annotated[str | None, typer.Option("--model", "-m", help="The same")] = None,
    host: Annotated[str, typer.Option("--host", help="0.0.0.0 listens to others too")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option("--port", help="0 takes a free one")] = 8000,
    served_model_name: Annotated[
        list[str] | None, typer.Option("--served-model-name", help="Name in the API; repeatable")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option("--max-model-len", "-c", help="Tokens of a request, with answer")
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option("--max-num-seqs", help="Requests that run together")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option("--max-num-batched-tokens", help="Tokens a step")
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None, typer.Option("--gpu-memory-utilization", help="Fraction of free memory")
    ] = None,
    kv_cache_memory_bytes: Annotated[
        int | None, typer.Option("--kv-cache-memory-bytes", help="Memory of KV itself")
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", "-t", help="Threads; all cores if absent")
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Of requests without a seed of their own")
    ] = None,
    scheduling_policy: Annotated[
        str | None, typer.Option("--scheduling-policy", help="fcfs or priority")
    ] = None,
    max_logprobs: Annotated[int | None, typer.Option("--max-logprobs")] = None,
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", help="Another file to take it from")
    ] = None,
    chat_template: Annotated[
        str | None, typer.Option("--chat-template", help="A jinja2 file in place of the model's")
    ] = None,
    api_key: Annotated[
        list[str] | None, typer.Option("--api-key", help="Key clients must send; repeatable")
    ] = None,
    allowed_origins: Annotated[
        str, typer.Option("--allowed-origins", help="For browsers: *, or a JSON list")
    ] = "*",
    strict_fields: Annotated[
        bool, typer.Option("--strict-fields", help="Refuse request fields nobody knows")
    ] = False,
    shutdown_timeout: Annotated[
        int, typer.Option("--shutdown-timeout", help="Seconds for running requests at the end")
    ] = 10,
    access_log: Annotated[
        bool, typer.Option("--access-log/--no-access-log", help="One line a request")
    ] = True,
    log_level: Annotated[str, typer.Option("--log-level")] = "info",
    engine_option: Annotated[list[str] | None, typer.Option(hidden=True)] = None,
) -> None:
    """Serve a model over HTTP with OpenAI's API. vLLM's and SGLang's flags work too."""
    set_up_logging(log_level)
    config = engine_config(
        model,
        option_model,
        engine_option,
        served_model_name=tuple(served_model_name) if served_model_name else None,
        max_model_len=positive(max_model_len),
        max_num_seqs=positive(max_num_seqs),
        max_num_batched_tokens=positive(max_num_batched_tokens),
        gpu_memory_utilization=gpu_memory_utilization,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        num_threads=positive(threads),
        seed=seed,
        scheduling_policy=scheduling_policy,
        max_logprobs=max_logprobs,
        tokenizer=tokenizer,
        chat_template=chat_template,
    )
    from invar.cli.listening import announce, listen, run_server

    # Before the model is read, so that a port in use is said at once.
    listener = listen(host, port)
    loaded = load(config)
    from invar.api.app import create_app

    server = http_server(loaded, strict_fields=strict_fields, api_keys=tuple(api_key or ()))
    announce(loaded, server.model.names, listener)
    run_server(
        create_app(server, allowed_origins=origins(allowed_origins)),
        listener,
        shutdown_timeout_s=shutdown_timeout,
        access_log=access_log,
    )
    loaded.close()


def http_server(loaded: LoadedModel, *, strict_fields: bool, api_keys: tuple[str, ...]) -> Server:
    """The state of the HTTP side around a loaded model."""
    from invar.api.limits import Limits
    from invar.api.server import ServedModel, Server
    from invar.observe.metrics import Metrics
    from invar.serving.async_engine import AsyncEngine
    from invar.serving.worker import EngineThread

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
        AsyncEngine(EngineThread(loaded.engine), metrics),
        metrics,
        limits=Limits(logprobs=loaded.config.max_logprobs),
        strict_fields=strict_fields,
        takes_priorities=loaded.config.scheduling_policy == "priority",
        api_keys=api_keys,
    )


def origins(given: str) -> tuple[str, ...]:
    """vLLM writes a JSON list."""
    import json

    if not given.startswith("["):
        return tuple(given.split(","))
    try:
        return tuple(map(str, json.loads(given)))
    except ValueError:
        raise ValueError(f"--allowed-origins {given[:60]}: no JSON list") from None
