"""What every dialect of conversations comes to, and how it becomes a running call."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from starlette.requests import Request

from invar.api.calls import Call, start_call
from invar.api.errors import ApiError, context_overflow
from invar.api.fields import ChatFields
from invar.api.forced_calls import CalledTools, called_tools
from invar.api.prompts import ChatPrompt, chat_prompt, check_fits
from invar.api.sampling import choice_requests, prepare_sampling, tenant_of
from invar.api.server import Server
from invar.grammar.thoughts import Thoughts
from invar.text.reply import MarkedFormat, Reply, ReplyFormat
from invar.text.tools import ToolUse


@dataclass(frozen=True)
class Conversation:
    """A dialect parses its body to this and writes the answer of the call; all else is shared."""

    fields: ChatFields
    messages: list[dict[str, Any]]  # as the template is given them
    body_bytes: int
    max_tokens: int | None
    logprobs: int | None = None  # alternatives of each position; None: no logprobs
    ends_at_window: bool = False  # where max_tokens is more than fits, in place of a refusal


async def start_conversation(
    server: Server, request: Request, prefix: str, conversation: Conversation
) -> Call:
    """Hands the conversation to the engine. Raises a 4xx for what is wrong with it."""
    fields, max_tokens = conversation.fields, conversation.max_tokens
    ready = await prepare_sampling(server, fields, conversation.logprobs, max_tokens)
    prompt = await chat_prompt(server, conversation.messages, fields, conversation.body_bytes)
    if conversation.ends_at_window:
        check_begins(server, len(prompt))
    else:
        check_fits(server, len(prompt), max_tokens, "messages")
    called = await called_tools(server, fields, ready, prompt)
    if called is not None:
        ready = called.ready
    form = reply_format(server, fields, prompt.tools)
    shown = server.model.replies.shown_ids if form and server.model.replies else frozenset()
    tenant = tenant_of(server, request, fields)
    choices = choice_requests(
        server,
        fields,
        ready,
        prompt.ids,
        tenant,
        shown_ids=shown,
        thoughts=thoughts_of(server, prompt, called),
    )
    new_reply = partial(
        Reply,
        form,
        tools=prompt.tools.schemas,
        prompt_end=prompt.end,
        continued=prompt.continued,
        parallel=prompt.tools.parallel,
        keeps_content=ready.grammar is not None and called is None,
    )
    return start_call(
        server,
        request,
        prefix,
        fields,
        [prompt.ids],
        choices,
        new_reply,
        warnings=ready.warnings if called is None else called.warnings,
    )


def reply_format(server: Server, fields: ChatFields, tools: ToolUse) -> ReplyFormat | None:
    """How the replies of this request are read; None: they are all content."""
    form = None if server.model.replies is None else server.model.replies.form
    if isinstance(form, MarkedFormat):
        if fields.separate_reasoning is False:
            form = replace(form, reasoning=None)
        if form.reasoning is None and tools.schemas is None:
            return None
    return form


def thoughts_of(server: Server, prompt: ChatPrompt, called: CalledTools | None) -> Thoughts | None:
    """Those that may stand before the answer, however the reply is told."""
    replies = server.model.replies
    if replies is None:
        return None
    return replies.thoughts(
        prompt.end,
        continued=prompt.continued,
        thinks=prompt.thinks,
        takes_calls=prompt.tools.schemas is not None,
        held=None if called is None else called.held,
    )


def check_begins(server: Server, prompt_tokens: int) -> None:
    """The prompt leaves room for an answer. Claude Code reads both numbers out of the sentence."""
    context = server.model.max_model_len
    if prompt_tokens >= context:
        raise context_overflow(
            f"prompt is too long: {prompt_tokens} tokens > {context - 1} maximum. This model's "
            f"maximum context length is {context} tokens.",
            "messages",
        )


@contextmanager
def in_words(names: Mapping[str, str]) -> Iterator[None]:
    """Errors name a field as the dialect does: ``names`` are those of chat and the dialect's."""
    try:
        yield
    except ApiError as error:
        for chat, own in names.items():
            field = rf"^{chat}(?=\b)"
            error.message = re.sub(field, own, error.message)
            error.param = error.param and re.sub(field, own, error.param)
        raise
