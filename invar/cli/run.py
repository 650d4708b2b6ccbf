"""`invar run`: one answer, or a chat, in this process and without a server."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from invar.cli.engine_options import engine_config, load, make_app, positive, say
from invar.observe.logs import set_up_logging

app = make_app()

# llama.cpp's defaults of the sampler, which suit small models.
TEMPERATURE, TOP_K, TOP_P, MIN_P = 0.8, 40, 0.95, 0.05


@app.command()
def run(
    model: Annotated[str | None, typer.Argument(help="Path or name; smollm2 if absent")] = None,
    option_model: Annotated[str | None, typer.Option("--model", "-m", help="The same")] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="Answer this and end; - reads stdin")
    ] = None,
    file: Annotated[str | None, typer.Option("--file", "-f", help="Prompt from a file")] = None,
    system: Annotated[str | None, typer.Option("--system", help="System message (-sys)")] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", "-n", help="Longest answer; -1 is no limit")
    ] = None,
    temperature: Annotated[
        float, typer.Option("--temperature", help="0 is greedy (--temp)")
    ] = TEMPERATURE,
    top_k: Annotated[int, typer.Option("--top-k", help="0 is off")] = TOP_K,
    top_p: Annotated[float, typer.Option("--top-p", help="1 is off")] = TOP_P,
    min_p: Annotated[float, typer.Option("--min-p", help="0 is off")] = MIN_P,
    repetition_penalty: Annotated[float, typer.Option("--repetition-penalty")] = 1.0,
    presence_penalty: Annotated[float, typer.Option("--presence-penalty")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option("--frequency-penalty")] = 0.0,
    seed: Annotated[int | None, typer.Option("--seed", help="The same seed, the same text")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on to the limit")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text; no chat template")] = False,
    threads: Annotated[
        int | None, typer.Option("--threads", "-t", help="Threads; all cores if absent")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option("--max-model-len", "-c", help="Context in tokens")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option("--max-num-batched-tokens", help="Tokens a step")
    ] = None,
    max_num_seqs: Annotated[int | None, typer.Option("--max-num-seqs", hidden=True)] = None,
    gpu_memory_utilization: Annotated[
        float | None, typer.Option("--gpu-memory-utilization", help="Fraction of free memory")
    ] = None,
    tokenizer: Annotated[str | None, typer.Option("--tokenizer", hidden=True)] = None,
    chat_template: Annotated[
        str | None, typer.Option("--chat-template", help="A jinja2 file in place of the model's")
    ] = None,
    color: Annotated[str, typer.Option("--color", help="auto, on or off")] = "auto",
    log_level: Annotated[str, typer.Option("--log-level")] = "warning",
    engine_option: Annotated[list[str] | None, typer.Option(hidden=True)] = None,
) -> None:
    """Answer a prompt in the terminal, or chat if there is none (/bye or Ctrl-D ends).

    Ctrl-C stops the answer. What is piped in is the prompt. llama.cpp's spellings work too.
    """
    from invar.engine.sampling_params import SamplingParams

    set_up_logging(log_level, plain=True)
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        ignore_eos=ignore_eos,
        max_tokens=positive(max_tokens),
    )
    config = engine_config(
        model,
        option_model,
        engine_option,
        num_threads=positive(threads),
        max_model_len=positive(max_model_len),
        max_num_batched_tokens=positive(max_num_batched_tokens),
        # One person talks to one engine: the memory of more rows is not wanted.
        max_num_seqs=max_num_seqs or 1,
        gpu_memory_utilization=gpu_memory_utilization,
        tokenizer=tokenizer,
        chat_template=chat_template,
    )
    text = given_prompt(prompt, file)
    from invar.cli.conversation import Conversation
    from invar.cli.terminal import Terminal, chat, one_answer

    terminal = Terminal.open(color)
    loaded = load(config)
    try:
        conversation = Conversation(loaded, params, system=system, raw=raw)
        if text is None:
            chat(conversation, terminal)
        else:
            code = one_answer(conversation, terminal, text)
            raise typer.Exit(code)
    finally:
        loaded.engine.close()


def given_prompt(prompt: str | None, file: str | None) -> str | None:
    """The prompt that was typed, named or piped in; None if there is a person to talk to."""
    if file is not None:
        with open(file, encoding="utf-8") as source:
            return source.read()
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin.isatty():
        return None
    text = sys.stdin.read().strip("\n")
    if not text:
        say("invar: nothing to answer: no -p, and stdin is empty")
        raise typer.Exit(2)
    return text
