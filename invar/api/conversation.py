"""What every dialect of conversations comes to, and how it becomes a running call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from invar.api.calls import Call, start_call
from invar.api.fields import ChatFields
from invar.api.prompts import chat_prompt, check_fits
from invar.api.sampling import choice_requests, prepare_sampling, tenant_of
from invar.api.server import Server


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
    ready = prepare_sampling(server, fields, conversation.logprobs, max_tokens)
    prompt = await chat_prompt(server, conversation.messages, fields, conversation.body_bytes)
    least = None if conversation.ends_at_window else max_tokens
    check_fits(server, len(prompt), least, "messages")
    choices = choice_requests(server, fields, ready, prompt, tenant_of(server, request, fields))
    return start_call(server, request, prefix, fields, [prompt], choices)
