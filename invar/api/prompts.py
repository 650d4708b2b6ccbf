"""Prompts to token ids, and whether they fit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from invar.api.errors import bad_request, context_overflow
from invar.api.fields import ChatFields, Message, TokenizeFields
from invar.api.limits import MAX_TOKEN_CHARACTERS, check_count, check_token_ids
from invar.api.server import Server
from invar.text.errors import ChatTemplateError, TokenizerError

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


async def chat_prompt(
    server: Server, raw: dict[str, Any], fields: ChatFields | TokenizeFields
) -> TokenIds:
    """The conversation as the model's template writes it. Users' text never becomes control ids."""
    messages = fields.messages or []
    check_messages(server, messages)
    template = server.model.chat_template
    if template is None:
        raise bad_request(
            "This model has no chat template. Start the server with --chat-template FILE, or use "
            "/v1/completions.",
            "messages",
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
    effort = getattr(fields, "reasoning_effort", None)
    if effort is not None:
        variables.setdefault("reasoning_effort", effort)

    def encode() -> TokenIds:
        return template.encode(
            server.model.tokenizer,
            template_messages(raw["messages"]),
            add_generation_prompt=generates,
            continue_final_message=continues,
            **variables,
        )

    characters = sum(content_length(message) for message in messages)
    return await encoded(server, encode, characters, "messages", characters)


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
    server: Server, encode: Callable[[], TokenIds], characters: int, param: str, of_call: int
) -> TokenIds:
    """Runs a tokeniser call, on a thread where the whole call would hold up other clients."""
    longest = server.model.max_model_len * MAX_TOKEN_CHARACTERS
    if characters > longest:
        raise context_overflow(
            f"This model's maximum context length is {server.model.max_model_len} tokens. However, "
            f"you requested a prompt of {characters} characters, which cannot fit.",
            param,
        )
    try:
        if of_call > server.limits.inline_tokenize_characters:
            return await asyncio.to_thread(encode)
        return encode()
    except (ChatTemplateError, TokenizerError) as error:
        raise bad_request(str(error), param) from None


async def completion_prompts(
    server: Server, prompt: str | list[str | int | list[int]], add_special_tokens: bool
) -> list[TokenIds]:
    """One array of ids per prompt: text, a list of texts, ids, or a list of lists of ids."""
    if isinstance(prompt, list) and prompt and all(isinstance(item, int) for item in prompt):
        return [given_ids(server, prompt, "prompt")]
    prompts = [prompt] if isinstance(prompt, str) else prompt
    check_count("prompt", prompts, server.limits.prompts)
    if not prompts:
        raise bad_request("prompt is an empty list; send at least one prompt.", "prompt")
    # All texts together count: a thousand short ones hold the event loop up like a long one.
    characters = sum(len(item) for item in prompts if isinstance(item, str))
    ids = []
    for index, item in enumerate(prompts):
        param = "prompt" if isinstance(prompt, str) else f"prompt[{index}]"
        if isinstance(item, int):
            raise bad_request("prompt mixes token ids with other prompts.", param)
        if isinstance(item, list):
            ids.append(given_ids(server, item, param))
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
    check_token_ids(param, ids, server.model.vocab_size)
    return np.array(ids, dtype=np.int32)


def check_messages(server: Server, messages: list[Message]) -> None:
    if not messages:
        raise bad_request("messages is empty; send at least one message.", "messages")
    check_count("messages", messages, server.limits.messages)
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


def template_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
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
