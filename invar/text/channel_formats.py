"""Replies in which every part has a head that says whom it is for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from invar.grammar.thoughts import Thoughts
from invar.text.call_formats import say_json
from invar.text.call_writing import CallWriter, Writing
from invar.text.reply import CallFormat, Reply, ReplyFormat, attempt
from invar.text.scanner import Reading, stops

MAX_HEAD = 256  # characters
CHANNEL, MESSAGE, START = "<|channel|>", "<|message|>", "<|start|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
FUNCTIONS = "to=functions."
NEXT = ">>>"
HEAD = re.compile(
    r"\s*(assistant)?(\s*to=[\w.\-]+)?(\s*<\|channel\|>\s*\w*)?(\s*to=[\w.\-]+)?"
    r"(\s*<\|constrain\|>)?(\s*\w+)?\s*"
)
WHERE = re.compile(r"<\|channel\|>\s*(\w+)")
RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.\-]+)")

FINAL = re.compile(r"<\|channel\|>final[\w ]*(<\|constrain\|>\w*)?<\|message\|>")
TO_FINAL = "<|channel|>final<|message|>"
HARMONY_THOUGHTS = Thoughts(
    FINAL.pattern,
    (
        (r"\A|<\|start\|>assistant", TO_FINAL),
        (r"<\|start\|>", "assistant" + TO_FINAL),
        (r"<\|(end|call|return)\|>", "<|start|>assistant" + TO_FINAL),
        (r"<\|channel\|>final[\w ]*(<\|constrain\|>\w*)?", MESSAGE),
        # In any other head, which gets a message without words.
        (
            r"<\|channel\|>[\w =.\-]*(<\|constrain\|>\w*)?",
            f"{MESSAGE}<|end|><|start|>assistant{TO_FINAL}",
        ),
        ("", "<|end|><|start|>assistant" + TO_FINAL),
    ),
)
TO_NEXT = "<|end|><|start|>assistant"
BEFORE_CALLS = Thoughts(
    r"<\|end\|><\|start\|>assistant",
    (
        (r"\A", f"{CHANNEL}analysis{MESSAGE}{TO_NEXT}"),
        (r"<\|end\|>", "<|start|>assistant"),
        (r"<\|end\|><\|start\|>", "assistant"),
        (r"<\|channel\|>[\w =.\-]*(<\|constrain\|>\w*)?", f"{MESSAGE}{TO_NEXT}"),
        ("", TO_NEXT),
    ),
)


@dataclass(frozen=True)
class HarmonyFormat(ReplyFormat, CallWriter):
    """gpt-oss: thoughts in the channel analysis, calls in messages to a function.

    https://github.com/openai/harmony/blob/main/docs/format.md
    """

    ends: ClassVar[tuple[str, ...]] = ENDS
    head: ClassVar[re.Pattern[str]] = HEAD

    @property
    def markers(self) -> tuple[str, ...]:
        return (CHANNEL, MESSAGE, START, "<|constrain|>", *self.ends)

    def thoughts(self, prompt_end: str, continued: str, takes_calls: bool) -> Thoughts | None:
        """All that stands before the content of the channel final."""
        return None if FINAL.search(prompt_end.rpartition(START)[2]) else HARMONY_THOUGHTS

    def thoughts_before_calls(self, prompt_end: str, continued: str) -> Thoughts | None:
        """The messages before that of the first call."""
        return BEFORE_CALLS

    @property
    def writers(self) -> tuple[CallWriter, ...]:
        return (self,)

    @property
    def begins(self) -> tuple[str, ...]:
        return (FUNCTIONS,)

    def usual_begin(self, prompt_end: str) -> str:
        return f"{CHANNEL}commentary {FUNCTIONS}"

    def writing(self, begin: str) -> Writing:
        """A message to a function ends a reply."""
        return Writing(f"{begin}$name <|constrain|>json{MESSAGE}$arguments", repeats=False)

    def read(self, reply: Reply, prompt_end: str) -> Reading[None]:
        """A prompt ends behind ``<|start|>assistant``, perhaps in the middle of a message."""
        head, begun, _ = prompt_end.rpartition(START)[2].partition(MESSAGE)
        if begun:
            head = yield from self._body(reply, head)
        while (yield from reply.scanner.character()):
            pieces: list[str] = []
            mark = reply.scanner.mark()
            end = yield from reply.scanner.until(
                stops(MESSAGE, START, *self.ends), pieces.append, MAX_HEAD
            )
            text = "".join(pieces)
            whole = end is not None or not (yield from reply.scanner.character())
            if not whole or not self.head.fullmatch(head + text):
                # A model that has left the protocol.
                reply.scanner.rewind(mark)
                reply.scanner.release()
                if head == CHANNEL:
                    reply.say_content(head)
                end = yield from reply.scanner.until(
                    stops(CHANNEL, START, *self.ends), reply.say_content
                )
                head = CHANNEL if end == CHANNEL else ""
                continue
            reply.scanner.release()
            head = (yield from self._body(reply, head + text)) if end == MESSAGE else ""

    def _body(self, reply: Reply, head: str) -> Reading[str]:
        """A message up to its end. Returns what the next head begins with."""
        channel, recipient = WHERE.search(head), RECIPIENT.search(head)
        scanner, ends = reply.scanner, stops(*self.ends, START, CHANNEL)
        if recipient is not None and reply.takes_calls:
            call = reply.start_call(recipient[1])
            end = yield from scanner.until(ends, lambda text: reply.say_arguments(call, text))
            if end is not None or not reply.cut:
                reply.end_call(call)
        elif channel is not None and channel[1] == "analysis":
            reply.begin_reasoning()
            end = yield from scanner.until(ends, reply.say_reasoning)
            reply.end_reasoning()
        else:
            end = yield from scanner.until(ends, reply.say_content)
        return CHANNEL if end == CHANNEL else ""


ADDRESSED_HEAD = re.compile(r"\s*(assistant)?(\s*to=[\w.\-]+)?\s*")
ADDRESSEE = re.compile(r"\bto=([\w.\-]+)")
TO_USER = " to=user<|message|>"
ADDRESSED_THOUGHTS = Thoughts(
    r"to=user<\|message\|>",
    (
        (r"\A|<\|start\|>assistant", TO_USER),
        (r"<\|start\|>", "assistant" + TO_USER),
        (r"<\|eom\|>", "<|start|>assistant" + TO_USER),
        (r"to=user", MESSAGE),
        (r"(\A|assistant)\s*to=[\w.\-]*", f"{MESSAGE}<|eom|><|start|>assistant{TO_USER}"),
        ("", "<|eom|><|start|>assistant" + TO_USER),
    ),
)


@dataclass(frozen=True)
class AddressedFormat(HarmonyFormat):
    """Muse Glimmer: messages to itself are thoughts, those to a tool hold its call in tags.

    https://github.com/ggml-org/llama.cpp/blob/master/models/templates/muse-glimmer.jinja
    """

    calls: CallFormat

    ends: ClassVar[tuple[str, ...]] = ("<|eom|>", "<|eot|>")
    head: ClassVar[re.Pattern[str]] = ADDRESSED_HEAD

    @property
    def markers(self) -> tuple[str, ...]:
        return (MESSAGE, START, *self.ends, *self.calls.openers, *self.calls.closers)

    def thoughts(self, prompt_end: str, continued: str, takes_calls: bool) -> Thoughts | None:
        begun = TO_USER.lstrip() in prompt_end.rpartition(START)[2]
        return None if begun else ADDRESSED_THOUGHTS

    @property
    def writers(self) -> tuple[CallWriter, ...]:
        return ()

    def _body(self, reply: Reply, head: str) -> Reading[str]:
        recipient, scanner = ADDRESSEE.search(head), reply.scanner
        whom = "user" if recipient is None else recipient[1]
        if whom == "self":
            reply.begin_reasoning()
            yield from scanner.until(stops(*self.ends, START), reply.say_reasoning)
            reply.end_reasoning()
            return ""
        openers = self.calls.openers if whom != "user" and reply.takes_calls else ()
        while True:
            end = yield from scanner.until(stops(*self.ends, START, *openers), reply.say_content)
            if end is None or end not in openers:
                return ""
            if not (yield from attempt(reply, [self.calls], end)):
                reply.say_content(end)


@dataclass(frozen=True)
class RecipientFormat(ReplyFormat, CallWriter):
    """Functionary 3.2: ``>>>`` a tool's name, or "all" for who asks, a line break and what is said.

    https://github.com/MeetKai/functionary/blob/main/functionary/prompt_template/prompt_template_v3.py
    """

    @property
    def markers(self) -> tuple[str, ...]:
        return (NEXT,)

    @property
    def writers(self) -> tuple[CallWriter, ...]:
        return (self,)

    @property
    def begins(self) -> tuple[str, ...]:
        return (NEXT,)

    @property
    def speaks(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("all\n",)

    def usual_begin(self, prompt_end: str) -> str:
        return "" if prompt_end.endswith(NEXT) else NEXT

    def writing(self, begin: str) -> Writing:
        return Writing("$name\n$arguments", begin=begin, joint=NEXT)

    def read(self, reply: Reply, prompt_end: str) -> Reading[None]:
        next_part = stops(NEXT)
        begun = prompt_end.endswith(NEXT)
        while begun or (yield from reply.scanner.until(next_part, reply.say_content)):
            begun = False
            pieces: list[str] = []
            mark = reply.scanner.mark()
            end = yield from reply.scanner.until(stops("\n"), pieces.append, MAX_HEAD)
            name = "".join(pieces).strip()
            if end is not None and name in reply.tools:
                call = reply.start_call(name)
                yield from reply.scanner.skip()
                if (yield from say_json(reply, call, NEXT)):
                    reply.end_call(call)
            elif end is None or name != "all":
                reply.scanner.rewind(mark)
            reply.scanner.release()
