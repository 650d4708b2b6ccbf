"""`invar run`: one answer, or a chat, in this process and without a server."""

from __future__ import annotations

import argparse
import io
import os
import shlex
import sys
from typing import TYPE_CHECKING, Any, TextIO

from invar.cli.engine_options import chosen_model, engine_config, load, or_default, say
from invar.cli.parser import CommandParser, add_engine_options, decimal, whole
from invar.cli.rewrite import CommandLineError
from invar.observe.logs import set_up_logging

if TYPE_CHECKING:
    from invar.engine.sampling_defaults import SamplingDefaults
    from invar.engine.sampling_params import SamplingParams

DESCRIPTION = """\
Answers a prompt in the terminal, or chats if there is none (/bye or Ctrl-D ends). What is piped in
is the prompt; beside -p it is read where -f - asks for it. Ctrl-C stops the answer. llama.cpp's
spellings work too."""

# llama.cpp's defaults of the sampler, which suit small models; the model's own come before them.
DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
OF_SAMPLER = (*DEFAULTS, "repetition_penalty", "presence_penalty", "frequency_penalty", "seed")

PROMPT_HINT = "; a prompt goes after -p, in quotes"


def parser() -> CommandParser:
    parser = CommandParser("run", DESCRIPTION, surplus=PROMPT_HINT)
    parser.model()
    parser.value("--prompt", "-p", help="answer this and end; - reads stdin")
    parser.value("--file", "-f", metavar="FILE", help="the prompt from a file; goes after -p")
    parser.value("--system", "-sys", help="system message")
    parser.value(
        "--max-tokens",
        "-n",
        type=whole,
        help="longest answer in tokens; absent or -1: until it ends or the context is full",
    )
    usual = "; the model's own, or {}"
    for name, kind, off in (("top-k", whole, 0), ("top-p", decimal, 1), ("min-p", decimal, 0)):
        default = usual.format(DEFAULTS[name.replace("-", "_")])
        parser.value(f"--{name}", type=kind, help=f"{off}: off{default}")
    default = usual.format(DEFAULTS["temperature"])
    parser.value("--temperature", "--temp", type=decimal, help=f"0: greedy{default}")
    parser.value("--repetition-penalty", type=decimal, help=f"1: off{usual.format(1)}")
    parser.value("--presence-penalty", type=decimal, default=0.0, help="0: off")
    parser.value("--frequency-penalty", type=decimal, default=0.0, help="0: off")
    parser.value("--seed", type=whole, help="the same seed, the same text")
    parser.value("--grammar", help="of the answer: Lark or GBNF")
    parser.value("--grammar-file", metavar="FILE", help="the same from a file")
    parser.value("--json-schema", "-j", help="the answer is JSON that it allows; {} allows any")
    parser.value("--json-schema-file", "-jf", metavar="FILE", help="the same from a file")
    parser.value(
        "--reasoning-budget", type=whole, help="most tokens of thoughts; absent or -1: any number"
    )
    parser.flag("--ignore-eos", help="go on to the limit")
    parser.flag("--raw", help="go on with the text; no chat template")
    add_engine_options(parser)
    parser.value("--color", default="auto", help="auto, on or off")
    parser.value("--log-level", default="warning", help="debug, info, warning or error")
    return parser


def execute(args: argparse.Namespace) -> int:
    from invar.engine.sampling_defaults import SamplingDefaults

    set_up_logging(args.log_level, plain=True)
    form_option, form = wanted_form(args)
    wanted_params(args, form, SamplingDefaults())  # what is wrong is said before a model is read
    refuse_text_as_model(chosen_model(args))
    # One person talks to one engine: the memory of more rows is not wanted.
    rows = or_default("--max-num-seqs", args.max_num_seqs)
    config = engine_config(args, max_num_seqs=1 if rows is None else rows)
    text = given_prompt(args.prompt, args.file)
    from invar.cli.conversation import Conversation
    from invar.cli.terminal import Terminal, chat, one_answer

    terminal = Terminal.open(args.color)
    loaded = load(config)
    try:
        params = wanted_params(args, form, loaded.defaults)
        if loaded.defaults.line is not None:
            say(f"invar: sampling, where no option says: {loaded.defaults.line}")
        try:
            conversation = Conversation(loaded, params, system=args.system, raw=args.raw)
        except ValueError as error:
            raise ValueError(str(error).replace("structured_outputs", form_option, 1)) from None
        for warning in conversation.warnings:
            say(f"invar: {form_option}: {warning}")
        if text is not None:
            return one_answer(conversation, text)
        chat(conversation, terminal)
        return 0
    finally:
        loaded.close()


def wanted_params(
    args: argparse.Namespace, form: dict[str, str] | None, defaults: SamplingDefaults
) -> SamplingParams:
    """What was typed, then the model's own, then llama.cpp's."""
    from invar.engine.sampling_params import SamplingParams

    typed = {name: getattr(args, name) for name in OF_SAMPLER if getattr(args, name) is not None}
    values: dict[str, Any] = DEFAULTS | dict(defaults.values) | typed
    values["max_tokens"] = longest_answer(args.max_tokens)
    if args.max_tokens is None or defaults.max_tokens is not None:
        values["max_tokens"] = defaults.within_limit(values["max_tokens"])
    values["thinking_token_budget"] = or_default(
        "--reasoning-budget", args.reasoning_budget, marks=(-1,)
    )
    return SamplingParams(**values, ignore_eos=args.ignore_eos, structured_outputs=form)


def wanted_form(args: argparse.Namespace) -> tuple[str, dict[str, str] | None]:
    """What the answer must look like, and the option that says so."""
    given = [
        (option, kind, value)
        for option, kind, value in (
            ("--grammar", "grammar", args.grammar),
            ("--grammar-file", "grammar", args.grammar_file),
            ("--json-schema", "json", args.json_schema),
            ("--json-schema-file", "json", args.json_schema_file),
        )
        if value is not None
    ]
    if not given:
        return "", None
    if len(given) > 1:
        raise CommandLineError(f"{given[0][0]} and {given[1][0]} exclude each other")
    option, kind, value = given[0]
    return option, {kind: file_text(option, value) if option.endswith("-file") else value}


def longest_answer(tokens: int | None) -> int | None:
    if tokens == 0:
        raise ValueError("--max-tokens: 0 generates nothing; give 1 or more, or -1 for no limit")
    return or_default("--max-tokens", tokens, marks=(-1,))


def refuse_text_as_model(model: str | None) -> None:
    """Ollama's users type the prompt as a bare word; no model that can be pulled has a blank."""
    if model is not None and any(map(str.isspace, model)) and not os.path.exists(model):
        raise CommandLineError(
            f"{model[:80]!r} is no model{PROMPT_HINT}: invar run -p {shlex.quote(model[:80])}"
        )


def given_prompt(prompt: str | None, file: str | None) -> str | None:
    """What was typed, then what a file has; stdin where `-` or nothing else was given.

    None if a person is to talk to. With a prompt at hand stdin is left alone: it may be a script's
    own, or a pipe that nobody ends. Raises CommandLineError if there is nothing to answer.
    """
    is_person = sys.stdin is not None and sys.stdin.isatty()
    parts = []
    if prompt is not None and prompt != "-":
        parts.append(typed_text(prompt))
    if file is not None and file != "-":
        parts.append(file_text("-f", file))
    if "-" in (prompt, file) or not (parts or is_person or sys.stdin is None):
        parts.append(decoded(sys.stdin.buffer.read(), "stdin").strip("\n"))
    elif is_person and not parts:
        return None
    elif waits_in_pipe(sys.stdin):
        say("invar: what is piped in is not read beside a prompt; -f - adds it")
    text = "\n".join(part for part in parts if part)
    if not text:
        raise CommandLineError(nothing_to_answer(prompt, file))
    return text


def waits_in_pipe(stdin: TextIO | None) -> bool:
    """Whether somebody has written to a pipe that is our stdin."""
    import select
    import stat

    if stdin is None or not stat.S_ISFIFO(os.fstat(stdin.fileno()).st_mode):
        return False
    # Readable is a pipe at its end, too; only what can be looked at was written.
    pipe = stdin.buffer
    assert isinstance(pipe, io.BufferedReader)
    return bool(select.select([pipe], [], [], 0)[0]) and bool(pipe.peek(1))


def nothing_to_answer(prompt: str | None, file: str | None) -> str:
    if prompt is not None and prompt != "-":
        return "-p: the prompt is empty; leave -p out to chat, or pipe a text in"
    if file is not None and file != "-":
        return f"-f {file}: the file is empty"
    return "nothing to answer: no -p, and stdin is empty"


def typed_text(prompt: str) -> str:
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise CommandLineError(f"-p: the prompt is not UTF-8 (character {error.start})") from None
    return prompt


def file_text(option: str, file: str) -> str:
    try:
        with open(file, "rb") as source:
            return decoded(source.read(), f"{option} {file}")
    except OSError as error:
        raise ValueError(f"{option} {file}: {error.strerror}") from None


def decoded(raw: bytes, source: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is not UTF-8 (byte {error.start})") from None
