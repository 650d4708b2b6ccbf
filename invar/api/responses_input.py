"""OpenAI's request bodies for /v1/responses: fields, checks, and input items as messages.

https://platform.openai.com/docs/api-reference/responses
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from invar.api.body import FieldCounts, needed, parse_fields
from invar.api.errors import bad_request
from invar.api.fields import ChatFields, Message, StreamOptions
from invar.api.limits import Limits, check_items
from invar.api.refusals import FieldRules, Refusal
from invar.text.tools import Function, Tool

LOGPROBS = "message.output_text.logprobs"
# Of kinds of output that no answer here has.
WITHOUT_EFFECT_IN_INCLUDE = frozenset(
    {
        "reasoning.encrypted_content",
        "file_search_call.results",
        "web_search_call.results",
        "web_search_call.action.sources",
        "message.input_image.image_url",
        "computer_call_output.output.image_url",
        "code_interpreter_call.outputs",
    }
)
TEXT_PARTS = frozenset({"input_text", "output_text", "text", "reasoning_text", "refusal"})


class Part(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None
    refusal: str | None = None


class Item(msgspec.Struct, kw_only=True):
    """Any item of an input; which fields a type needs is checked where it is used."""

    type: str | None = None
    role: str | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[Part] | None = None


class Text(msgspec.Struct, kw_only=True):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class Reasoning(msgspec.Struct, kw_only=True):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class InputFields(msgspec.Struct, kw_only=True):
    """What a prompt depends on: all that /v1/responses/input_tokens takes."""

    model: str | None = None
    input: str | list[Item] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    reasoning: Reasoning | None = None
    text: Text | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


class ResponsesFields(InputFields, kw_only=True):
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    background: bool | None = None
    include: list[str] | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    # Beyond the dialect, as on the other routes.
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    cache_salt: str | None = None
    priority: int | None = None
    structured_outputs: dict[str, Any] | None = None
    thinking_token_budget: int | None = None


Fields = TypeVar("Fields", bound=InputFields)


RULES = FieldRules(
    {
        "prompt": Refusal("this server keeps no prompts; send instructions and input"),
        "conversation": Refusal("this server keeps responses; send previous_response_id"),
        "context_management": Refusal("the server takes nothing out of a conversation", ([],)),
        "truncation": Refusal("nothing is cut out of a conversation", ("disabled",)),
        "moderation": Refusal("this server moderates nothing"),
        "response_format": Refusal("text.format says it here", ({"type": "text"},)),
    },
    frozenset(
        {
            "service_tier",
            "safety_identifier",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "client_metadata",
            "max_tool_calls",
            "request_id",
        }
    ),
    frozenset(),
    lambda fields: None,
)


def parse_input(
    raw: dict[str, Any], kind: type[Fields], counts: FieldCounts, limits: Limits
) -> Fields:
    """The fields, checked as far as they go without the model. Raises a 400."""
    fields = parse_fields(raw, kind, counts, RULES)
    if isinstance(fields.input, list):
        lists = [parts for item in fields.input for parts in (item.content, item.output)]
        parts = sum(len(parts) for parts in lists if isinstance(parts, list))
        check_items("input", parts, limits.messages)
    # Tools that OpenAI runs itself are left out, since the model may answer without them.
    others = {str(tool.get("type"))[:40] for tool in fields.tools or ()} - {"function"}
    counts.take_idle([f"tools.{name}" for name in sorted(others)])
    if fields.text is not None and fields.text.verbosity is not None:
        counts.take_idle(["text.verbosity"])
    if fields.reasoning is not None and fields.reasoning.summary is not None:
        counts.take_idle(["reasoning.summary"])
    if isinstance(fields, ResponsesFields):
        for name in fields.include or ():
            if name in WITHOUT_EFFECT_IN_INCLUDE:
                counts.take_idle([f"include.{name}"])
            elif name != LOGPROBS:
                raise bad_request(
                    f"include: known are {LOGPROBS} and others of OpenAI's.", "include"
                )
    return fields


def input_items(raw: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The input as items, as they came: what the store keeps."""
    given = raw.get("input")
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    return list(given or [])


def conversation_messages(
    fields: InputFields, before: Sequence[Mapping[str, Any]], items: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The items of this request and those ``before`` it, as messages of a chat template."""
    messages: list[dict[str, Any]] = []
    if fields.instructions:
        messages.append({"role": "system", "content": fields.instructions})
    thoughts = ""
    for index, item in enumerate(msgspec.convert([*before, *items], list[Item]), -len(before)):
        where = f"input[{index}]"
        if item.type == "reasoning":
            thoughts += joined(text_parts(item.content, f"{where}.content"))
            continue
        message = message_of(item, where)
        if thoughts and message["role"] == "assistant":
            message["reasoning_content"], thoughts = thoughts, ""
        last = messages[-1] if messages else {}
        if "tool_calls" in message and last.get("role") == "assistant":
            # A turn of text and calls is one message there.
            last.setdefault("tool_calls", []).extend(message["tool_calls"])
        else:
            messages.append(message)
    return messages


def message_of(item: Item, where: str) -> dict[str, Any]:
    if item.type in (None, "message"):
        role = needed(item, "role", where)
        parts = text_parts(item.content, f"{where}.content")
        return {"role": role, "content": joined(parts) if role == "assistant" else parts}
    if item.type in ("function_call", "custom_tool_call"):
        name, call_id = needed(item, "name", where), needed(item, "call_id", where)
        if item.type == "function_call":
            arguments: Any = needed(item, "arguments", where)
        else:
            arguments = {"input": needed(item, "input", where)}
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if item.type in ("function_call_output", "custom_tool_call_output"):
        content = joined(text_parts(item.output, f"{where}.output"))
        return {"role": "tool", "tool_call_id": needed(item, "call_id", where), "content": content}
    raise bad_request(
        f"{where}: this model takes messages, reasoning, and calls of functions with their "
        f"outputs.",
        f"{where}.type",
    )


def text_parts(content: str | list[Part] | None, where: str) -> str | list[dict[str, Any]]:
    """A text as it is, parts in the shape of the chat route."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = []
    for index, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if text is None or part.type not in TEXT_PARTS:
            raise bad_request(
                f"{where}[{index}]: this model takes parts of text only.", f"{where}[{index}]"
            )
        parts.append({"type": "text", "text": text})
    return parts


def joined(content: str | list[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def chat_tools(tools: Sequence[Mapping[str, Any]]) -> list[Tool]:
    """Functions in the words of chat. Raises a 400."""
    found = []
    for index, tool in enumerate(tools):
        if tool.get("type") != "function":
            continue
        try:
            function = msgspec.convert(tool, Function)
        except msgspec.ValidationError as error:
            raise bad_request(f"tools[{index}]: {error}.", f"tools[{index}]") from None
        found.append(Tool(type="function", function=function))
    return found


def chat_fields(fields: InputFields, messages: list[dict[str, Any]]) -> ChatFields:
    """The call in the words that all dialects come to."""
    common: dict[str, Any] = {
        "model": fields.model,
        "messages": msgspec.convert(messages, list[Message]),
        "reasoning_effort": fields.reasoning.effort if fields.reasoning is not None else None,
        "response_format": fields.text.format if fields.text is not None else None,
        "tools": chat_tools(fields.tools or []),
    }
    same = ChatFields.__struct_fields__
    common |= {
        name: getattr(fields, name)
        for name in fields.__struct_fields__
        if name in same and name not in (*common, "top_logprobs", "tools")
    }
    return ChatFields(**common)
