"""Prompts to token ids, and whether they fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from invar.api.errors import bad_request, context_overflow
from invar.api.fields import ChatFields, Message, TokenizeFields
from invar.api.limits import MAX_TOKEN_CHARACTERS, check_count, checked_token_ids
from invar.api.server import Server
from invar.api.threads import beside_loop
from invar.text.chat_template import require_template
from invar.text.errors import ChatTemplateError, TokenizerError
from invar.text.reply_detection import PROMPT_END, THINKING_SWITCHES, wants_thoughts
from invar.text.tools import NO_TOOLS, ToolError, ToolUse, tool_use

# Variables of a template that have a field of their own, or that would replace the template.
RESERVED_VARIABLES = frozenset(
    {
        "tokenizer",
        "messages",
        "tools",
        "now",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "tokenize",
    }
)

TokenIds = npt.NDArray[np.int32]
Encoded = TypeVar("Encoded")


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation for the model, and what is to be known to read its reply."""

    ids: TokenIds
    end: str  # the last of it as text
    continued: str  # the message that the reply goes on with
    tools: ToolUse = NO_TOOLS
    thinks: bool = True  # the request has not switched thoughts off

    def __len__(self) -> int:
        return len(self.ids)


async def chat_prompt(
    server: Server,
    messages: list[dict[str, Any]],
    fields: ChatFields | TokenizeFields,
    body_bytes: int,
) -> ChatPrompt:
    """The conversation as the model's template writes it. Users' text never becomes control ids.

    ``messages`` are what the template is given, ``fields.messages`` what is checked of them.
    """
    checked = fields.messages or []
    check_messages(server, checked)
    try:
        template = require_template(server.model.chat_template)
    except ChatTemplateError as error:
        raise bad_request(f"{error}.", "messages") from None
    if fields.add_special_tokens:
        raise bad_request(
            "add_special_tokens cannot be honoured with messages: the chat template writes them.",
            "add_special_tokens",
            "unsupported_parameter",
        )
    if fields.continue_final_message and fields.add_generation_prompt:
        raise bad_request(
            "continue_final_message and add_generation_prompt exclude each other.",
            "continue_final_message",
        )
    continues = bool(fields.continue_final_message)
    generates = not continues if fields.add_generation_prompt is None else False
    generates = generates or bool(fields.add_generation_prompt)
    variables = dict(fields.chat_template_kwargs or {})
    for name in RESERVED_VARIABLES & variables.keys():
        raise bad_request(
            f"chat_template_kwargs cannot set {name}.", f"chat_template_kwargs.{name}"
        )
    tools = tools_of(fields)
    effort = getattr(fields, "reasoning_effort", None)
    if effort is not None:
        variables.setdefault("reasoning_effort", effort)
        for name in THINKING_SWITCHES:
            if effort == "none" and name in template.source:
                variables.setdefault(name, False)
    server.field_counts.take_idle(
        [f"chat_template_kwargs.{name}" for name in variables if name not in template.source]
    )

    replies = server.model.replies

    def encode() -> tuple[str, TokenIds]:
        told = template_messages(messages)
        shown: Sequence[Mapping[str, Any]] | None = tools.shown or None
        if replies is not None:
            told, shown = replies.prompt.fitted(told, tools.shown)
        return template.encode_with_text(
            server.model.tokenizer,
            told,
            tools=shown,
            add_generation_prompt=generates,
            continue_final_message=continues,
            **variables,
        )

    characters = sum(content_length(message) for message in checked)
    text, ids = await encoded(server, encode, characters, "messages", body_bytes)
    continued = final_text(checked) if continues else ""
    return ChatPrompt(ids, text[-PROMPT_END:], continued, tools, wants_thoughts(variables))


def tools_of(fields: ChatFields | TokenizeFields) -> ToolUse:
    try:
        if isinstance(fields, ChatFields):
            return tool_use(fields.tools, fields.tool_choice, fields.parallel_tool_calls)
        return tool_use(fields.tools, None, None)
    except ToolError as error:
        raise bad_request(str(error), error.field) from None


def final_text(messages: list[Message]) -> str:
    content = messages[-1].content
    if isinstance(content, list):
        return "".join(part.text or "" for part in content)
    return content or ""


async def text_prompt(
    server: Server, text: str, param: str, *, add_special_tokens: bool = True, beside: int = 0
) -> TokenIds:
    """Raw text: spellings of special tokens are special tokens, as in the peers.

    ``beside``: characters of all texts of the call.
    """

    def encode() -> TokenIds:
        return server.model.tokenizer.encode(
            text, add_special_tokens=add_special_tokens, parse_special=True
        )

    return await encoded(server, encode, len(text), param, max(beside, len(text)))


async def encoded(
    server: Server, encode: Callable[[], Encoded], characters: int, param: str, of_call: int
) -> Encoded:
    """Runs a tokeniser call. ``of_call``: characters of all texts of the HTTP request."""
    longest = server.model.max_model_len * MAX_TOKEN_CHARACTERS
    if characters > longest:
        raise context_overflow(
            f"This model's maximum context length is {server.model.max_model_len} tokens. However, "
            f"you requested a prompt of {characters} characters, and the prompt is too long.",
            param,
        )
    try:
        return await beside_loop(of_call, encode)
    except (ChatTemplateError, TokenizerError) as error:
        raise bad_request(str(error), param) from None


async def completion_prompts(
    server: Server, prompt: str | list[str | int | list[int]], add_special_tokens: bool
) -> list[TokenIds]:
    """One array of ids per prompt: text, a list of texts, ids, or a list of lists of ids."""
    if isinstance(prompt, list) and prompt and all(isinstance(item, int) for item in prompt):
        return [given_ids(server, prompt, "prompt")]
    prompts = [prompt] if isinstance(prompt, str) else prompt
    check_count("prompt", prompts, server.limits.prompts)  # a few ids before something else
    if not prompts:
        raise bad_request("prompt is an empty list; send at least one prompt.", "prompt")
    # All texts together count: a thousand short ones hold the event loop up like a long one.
    characters = sum(len(item) for item in prompts if not isinstance(item, int))
    ids = []
    for index, item in enumerate(prompts):
        param = "prompt" if isinstance(prompt, str) else f"prompt[{index}]"
        if isinstance(item, int):
            raise bad_request("prompt mixes token ids with other prompts.", param)
        if isinstance(item, list):
            ids.append(await beside_loop(characters, partial(given_ids, server, item, param)))
            continue
        tokens = await text_prompt(
            server, item, param, add_special_tokens=add_special_tokens, beside=characters
        )
        if not len(tokens):
            raise bad_request(
                f"{param} is empty and this model has no token that begins a text.", param
            )
        ids.append(tokens)
    return ids


def given_ids(server: Server, ids: list[Any], param: str) -> TokenIds:
    if not ids:
        raise bad_request(f"{param} is empty; send at least one token.", param)
    return checked_token_ids(param, ids, server.model.vocab_size)


def check_prompt_sizes(server: Server, raw: dict[str, Any]) -> None:
    """Prompts that are too many or too long, by their lengths alone: nothing is looked at."""
    prompt, max_tokens = raw.get("prompt"), raw.get("max_tokens")
    if not isinstance(prompt, list) or not prompt:
        return
    is_one = isinstance(prompt[0], int)
    if not is_one:
        check_count("prompt", prompt, server.limits.prompts)
    for ids in [prompt] if is_one else prompt:
        if isinstance(ids, list) and len(ids) > server.model.max_model_len:
            asked = type(max_tokens) is int and 0 <= max_tokens < 2**31
            check_fits(server, len(ids), max_tokens if asked else None, "prompt")


def check_messages(server: Server, messages: list[Message]) -> None:
    if not messages:
        raise bad_request("messages is empty; send at least one message.", "messages")
    parts = sum(len(m.content) for m in messages if isinstance(m.content, list))
    if parts > server.limits.messages:
        raise bad_request(
            f"messages have {parts} parts; at most {server.limits.messages} are allowed.",
            "messages",
        )
    for index, message in enumerate(messages):
        if isinstance(message.content, str) or message.content is None:
            continue
        for place, part in enumerate(message.content):
            path = f"messages[{index}].content[{place}]"
            if part.type not in ("text", "input_text", "output_text"):
                raise bad_request(
                    f"{path}: this model takes parts of type text only.", f"{path}.type"
                )
            if part.text is None:
                raise bad_request(f"{path}: a part of type text needs text.", f"{path}.text")


def template_messages(messages: list[dict[str, Any]]) -> list[Mapping[str, Any]]:
    """OpenAI's newer name for the system role, which templates do not know."""
    return [
        {**message, "role": "system"} if message["role"] == "developer" else message
        for message in messages
    ]


def content_length(message: Message) -> int:
    if isinstance(message.content, list):
        return sum(len(part.text or "") for part in message.content)
    return len(message.content or "")


def check_fits(server: Server, prompt_tokens: int, max_tokens: int | None, param: str) -> None:
    """Nothing is cut silently: prompt and answer fit, or the client hears both numbers.

    Clients recognise the overflow by the first sentence (LiteLLM looks for its words).
    """
    context = server.model.max_model_len
    wanted = 1 if max_tokens is None else max_tokens
    if prompt_tokens + wanted > context:
        completion = "at least 1" if max_tokens is None else str(max_tokens)
        raise context_overflow(
            f"This model's maximum context length is {context} tokens. However, you requested "
            f"{prompt_tokens + wanted} tokens ({prompt_tokens} in the {param}, {completion} in the "
            f"completion). Please reduce the length of the {param} or completion.",
            param,
        )
