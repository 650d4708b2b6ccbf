"""`invar run`: one answer, or a chat, in this process and without a server."""

from __future__ import annotations

import argparse
import sys

from invar.cli.engine_options import engine_config, load, or_default
from invar.cli.parser import CommandParser, add_engine_options
from invar.cli.rewrite import CommandLineError
from invar.observe.logs import set_up_logging

DESCRIPTION = """\
Answers a prompt in the terminal, or chats if there is none (/bye or Ctrl-D ends). What is piped in
is the prompt. Ctrl-C stops the answer. llama.cpp's spellings work too."""

# llama.cpp's defaults of the sampler, which suit small models.
TEMPERATURE, TOP_K, TOP_P, MIN_P = 0.8, 40, 0.95, 0.05


def parser() -> CommandParser:
    parser = CommandParser("run", DESCRIPTION)
    parser.model()
    parser.value("--prompt", "-p", help="answer this and end; - reads stdin")
    parser.value("--file", "-f", metavar="FILE", help="the prompt from a file")
    parser.value("--system", "-sys", help="system message")
    parser.value("--max-tokens", "-n", type=int, help="longest answer; -1: no limit")
    parser.value("--temperature", "--temp", type=float, default=TEMPERATURE, help="0: greedy")
    parser.value("--top-k", type=int, default=TOP_K, help="0: off")
    parser.value("--top-p", type=float, default=TOP_P, help="1: off")
    parser.value("--min-p", type=float, default=MIN_P, help="0: off")
    parser.value("--repetition-penalty", type=float, default=1.0, help="1: off")
    parser.value("--presence-penalty", type=float, default=0.0, help="0: off")
    parser.value("--frequency-penalty", type=float, default=0.0, help="0: off")
    parser.value("--seed", type=int, help="the same seed, the same text")
    parser.flag("--ignore-eos", help="go on to the limit")
    parser.flag("--raw", help="go on with the text; no chat template")
    add_engine_options(parser)
    parser.value("--color", default="auto", help="auto, on or off")
    parser.value("--log-level", default="warning", help="debug, info, warning or error")
    return parser


def execute(args: argparse.Namespace) -> int:
    from invar.engine.sampling_params import SamplingParams

    set_up_logging(args.log_level, plain=True)
    params = SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        seed=args.seed,
        ignore_eos=args.ignore_eos,
        max_tokens=or_default("--max-tokens", args.max_tokens, marks=(-1,)),
    )
    # One person talks to one engine: the memory of more rows is not wanted.
    rows = or_default("--max-num-seqs", args.max_num_seqs)
    config = engine_config(args, max_num_seqs=1 if rows is None else rows)
    text = given_prompt(args.prompt, args.file)
    from invar.cli.conversation import Conversation
    from invar.cli.terminal import Terminal, chat, one_answer

    terminal = Terminal.open(args.color)
    loaded = load(config)
    try:
        conversation = Conversation(loaded, params, system=args.system, raw=args.raw)
        if text is not None:
            return one_answer(conversation, text)
        chat(conversation, terminal)
        return 0
    finally:
        loaded.close()


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
        raise CommandLineError("nothing to answer: no -p, and stdin is empty")
    return text
