"""Which format a model's replies have: its chat template writes a call; what reads it is it."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from invar.grammar.thoughts import Thoughts
from invar.text.call_writing import CallWriter, Hand, WrittenTool, calls_only, text_with_calls
from invar.text.chat_template import ChatTemplate
from invar.text.model_formats import (
    ALIASES,
    CALL_FORMATS,
    HERMES,
    REASONING,
    REASONING_ALIASES,
    REASONING_SIGNS,
    SIGNS,
    WHOLE_FORMATS,
)
from invar.text.reply import (
    CallFormat,
    MarkedFormat,
    ReasoningMarkers,
    Reply,
    ReplyFormat,
    ReplyMessage,
)
from invar.text.tokenizer import Tokenizer
from invar.text.tool_prompt import (
    PROBE,
    PROBE_ARGUMENTS,
    PROBE_SCHEMA,
    QUESTION,
    ToolPrompt,
    probe_call,
    probed,
)

NO_REASONING = "none"
PROMPT_END = 256  # characters at the end of a prompt in which a template may begin the reply
THINKING_SWITCHES = ("enable_thinking", "thinking")  # variables of templates


class Held(Enum):
    """How a reply is held to tools."""

    CALLS = "calls"  # nothing but calls
    CALLS_OR_FORM = "calls or form"  # or an answer in a form
    TEXT = "text"  # what begins as a call is one


@dataclass(frozen=True)
class ModelReplies:
    """How a model is shown tools, and how its replies are read."""

    form: ReplyFormat
    prompt: ToolPrompt
    tool_parser: str  # the name of its format
    writer: CallWriter | None  # of calls that must be made; None: a reply cannot be held to them
    control: Mapping[str, int]  # control tokens that are markers of the format, by their spellings
    thinking_budget: int | None = None  # tokens of thoughts, where a request names none

    @property
    def shown_ids(self) -> frozenset[int]:
        return frozenset(self.control.values())

    @property
    def has_reasoning(self) -> bool:
        return not isinstance(self.form, MarkedFormat) or self.form.reasoning is not None

    def thoughts(
        self,
        prompt: str,
        *,
        continued: str = "",
        thinks: bool = True,
        takes_calls: bool = False,
        held: Held | None = None,
    ) -> Thoughts | None:
        """Those that may stand before the answer to a prompt, of which the end is enough.

        ``held``: it is held to tools, and what begins a call ends thoughts. ``thinks``: the request
        has not switched them off. Those that the prompt has begun all the same are ended at once.
        """
        end = prompt[-PROMPT_END:]
        if held is Held.CALLS:
            thoughts = self.form.thoughts_before_calls(end, continued)
        else:
            thoughts = self.form.thoughts(end, continued, takes_calls)
        if held is not None and thoughts is not None:
            thoughts = replace(thoughts, openers=self._call_begins(end, held))
        if thoughts is None or not (thinks or thoughts.have_begun):
            return None
        return replace(thoughts, budget=self.thinking_budget if thinks else 0)

    def _call_begins(self, prompt_end: str, held: Held) -> tuple[str, ...]:
        if held is Held.TEXT:
            begins = [begin for one in self.form.writers for begin in one.begins]
        else:
            begins = [] if self.writer is None else [self.writer.usual_begin(prompt_end)]
        return tuple(filter(None, begins))

    def answer_form(
        self, tools: Sequence[WrittenTool], held: Held, *, parallel: bool, prompt_end: str
    ) -> tuple[dict[str, Any], list[str]]:
        """A structural tag of replies that call these tools, and what of them is not enforced.

        Raises ValueError for what this model's form of calls cannot say.
        """
        hand = Hand(self.control)
        if self.writer is None:
            raise ValueError(f"calls as {self.tool_parser} writes them cannot be held to tools")
        if held is not Held.TEXT:
            spec = calls_only(self.writer, tools, hand, parallel=parallel, prompt_end=prompt_end)
        else:
            begins = self._call_begins(prompt_end, held)
            spec = text_with_calls(
                self.form.writers,
                self.form.markers,
                tools,
                hand,
                parallel=parallel,
                begun=next((begin for begin in begins if prompt_end.endswith(begin)), ""),
            )
        return spec, hand.ignored


def wants_thoughts(variables: Mapping[str, Any]) -> bool:
    """What a request says to a template of thoughts: they are asked for unless it says no."""
    switches = (variables.get(name) for name in THINKING_SWITCHES)
    return variables.get("reasoning_effort") != "none" and False not in switches


def model_replies(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    *,
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
    thinking_budget: int | None = None,
) -> tuple[ModelReplies, str | None]:
    """The model's format, and what is to be said of a forced one that its template speaks against.

    Raises ValueError for a name of a parser that is not known.
    """
    prompt = ToolPrompt(template)
    spellings = tokenizer.marker_spellings
    found = detected(template, spellings)
    name = found if tool_parser is None else parser_name(tool_parser)
    notice = None
    if tool_parser is not None and found is not None and found != name:
        notice = f"--tool-call-parser {tool_parser}: the chat template writes calls as {found} does"
    name = name or "hermes"
    form = whole_form(name, reasoning_markers(template, spellings, reasoning_parser, name), prompt)
    markers = form.markers
    control = {
        tokenizer.token_text(token_id): token_id
        for token_id in tokenizer.control_ids
        if any(tokenizer.token_text(token_id) in marker for marker in markers)
    }
    writer = usual_writer(form, prompt, template, spellings)
    return ModelReplies(form, prompt, name, writer, control, thinking_budget), notice


def usual_writer(
    form: ReplyFormat, prompt: ToolPrompt, template: ChatTemplate, spellings: Collection[str]
) -> CallWriter | None:
    """That of several which reads back what the template writes, or whose marker it knows."""
    if not prompt.shows_tools and HERMES in form.writers:
        return HERMES
    if len(form.writers) > 1:
        replies = list(written_calls(template))
        for one in form.writers:
            alone = MarkedFormat(None, (one,)) if isinstance(one, CallFormat) else form
            if any(read_back(alone, reply) is not None for reply in replies):
                return one
        for one in form.writers:
            if any(
                begin and (begin in template.source or begin in spellings) for begin in one.begins
            ):
                return one
    return form.writers[0] if form.writers else None


def whole_form(name: str, reasoning: ReasoningMarkers | None, prompt: ToolPrompt) -> ReplyFormat:
    if name in WHOLE_FORMATS:
        return WHOLE_FORMATS[name]
    calls = CALL_FORMATS[name]
    if not prompt.shows_tools and HERMES not in calls:
        calls = (*calls, HERMES)  # the form that the words of `tool_prompt` ask for
    return MarkedFormat(reasoning, calls)


def parser_name(given: str) -> str:
    name = ALIASES.get(given, given)
    return checked(name, given, {*CALL_FORMATS, *WHOLE_FORMATS}, ALIASES, "--tool-call-parser")


def checked(
    name: str, given: str, own: Collection[str], aliases: Collection[str], option: str
) -> str:
    if name in own:
        return name
    known = sorted({*own, *aliases})
    near = difflib.get_close_matches(given, known, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise ValueError(f"{option} {given[:60]}: no such parser.{hint} Known: {', '.join(known)}")


def reasoning_markers(
    template: ChatTemplate, spellings: Collection[str], given: str | None, call_format: str = ""
) -> ReasoningMarkers | None:
    """Those asked for, those that go with the format of calls, or what the template betrays."""
    if given is not None:
        return REASONING.get(reasoning_name(given))
    if call_format in REASONING:
        return REASONING[call_format]
    for name, sign in REASONING_SIGNS:
        if sign in template.source or sign in spellings:
            return REASONING[name]
    return None


def reasoning_name(given: str) -> str:
    name = REASONING_ALIASES.get(given, given)
    # The thoughts of some formats are read with their calls, whatever is asked for.
    own = {*REASONING, *WHOLE_FORMATS, "openai_gptoss", "gpt-oss", NO_REASONING}
    return checked(name, given, own, REASONING_ALIASES, "--reasoning-parser")


def check_parsers(tool_parser: str | None, reasoning_parser: str | None) -> None:
    """Raises ValueError for a name that is not known, before the model is read."""
    if tool_parser is not None:
        parser_name(tool_parser)
    if reasoning_parser is not None:
        reasoning_name(reasoning_parser)


def detected(template: ChatTemplate, spellings: Collection[str]) -> str | None:
    """The name of the format that reads back what the template writes, or that its texts betray."""
    replies = list(written_calls(template))
    found: dict[str, int] = {}
    for name, form in candidates():
        left = [size for reply in replies if (size := read_back(form, reply)) is not None]
        if left:
            found[name] = min(left)
    if found:
        return min(found, key=lambda name: found[name])  # the first of those
    return next(
        (name for name, sign in SIGNS if sign in template.source or sign in spellings), None
    )


def candidates() -> Iterator[tuple[str, ReplyFormat]]:
    yield from WHOLE_FORMATS.items()
    for name, calls in CALL_FORMATS.items():
        yield name, MarkedFormat(None, calls)


def written_calls(template: ChatTemplate) -> Iterator[tuple[str, str]]:
    """Turns with one call as the template writes them into a history, each with what is before it.

    A turn begins where the prompt for it ends; where that prompt opens more (thoughts), further
    in front.
    """
    for content in ("", None):
        whole = probed(template, [QUESTION, probe_call(content)])
        if "invarvalue" not in whole:
            continue
        for generates in (True, False):
            prompt = probed(template, [QUESTION], generate=generates)
            common = 0
            while common < min(len(prompt), len(whole)) and prompt[common] == whole[common]:
                common += 1
            yield prompt[:common], whole[common:]


def read_back(form: ReplyFormat, written: tuple[str, str]) -> int | None:
    """Whether a format finds the call: how many characters of its turn it takes for content."""
    prompt, text = written
    message = read(form, text, {PROBE: PROBE_SCHEMA}, prompt)
    if [call.name for call in message.calls] != [PROBE]:
        return None
    try:
        same = json.loads(message.calls[0].arguments) == PROBE_ARGUMENTS
    except ValueError:
        return None
    return len(message.content) if same else None


def read(
    form: ReplyFormat | None,
    text: str,
    tools: Mapping[str, Mapping[str, object]] | None,
    prompt_end: str = "",
    pieces: int | None = None,
) -> ReplyMessage:
    """The message of a reply that came whole, or in pieces of so many characters."""
    reply, message = Reply(form, tools=tools, prompt_end=prompt_end), ReplyMessage()
    size = pieces or max(1, len(text))
    for start in range(0, len(text), size):
        message.take(reply.push(text[start : start + size]))
    message.take(reply.finish())
    return message
