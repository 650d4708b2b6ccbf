"""Conversations as chat templates expect them: plain JSON types in one normal form."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from invar.text.errors import ChatTemplateError

# Different names under which templates look for an earlier turn's reasoning.
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


def plain_copy(value: Any, where: str, change: Callable[[str], str] = str) -> Any:
    """A deep copy in plain JSON types with `change` applied to every string, keys too.

    Foreign objects are refused: a template must not reach attributes of live objects.
    """
    if isinstance(value, str):
        return change(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {
            change(str(key)): plain_copy(item, f"{where}.{key}", change)
            for key, item in value.items()
        }
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [plain_copy(item, f"{where}[{index}]", change) for index, item in enumerate(value)]
    raise ChatTemplateError(
        f"{where}: {type(value).__name__} is no JSON value; send text, numbers, lists and objects"
    )


def normal_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Check and copy messages: content never None, tool arguments as objects, no null fields."""
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise ChatTemplateError(
            f"messages: expected a list of messages, found {type(messages).__name__}"
        )
    if not messages:
        raise ChatTemplateError("messages: the list is empty; send at least one message")
    return [_normal_message(message, index) for index, message in enumerate(messages)]


def _normal_message(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise ChatTemplateError(f"{where}: expected an object, found {type(message).__name__}")
    copied: dict[str, Any] = plain_copy(message, where)
    if not isinstance(copied.get("role"), str) or not copied["role"]:
        raise ChatTemplateError(f"{where}.role: missing; expected 'system', 'user', 'assistant' …")
    content = copied.pop("content", None)
    normal = {key: value for key, value in copied.items() if value is not None}
    if content is not None and not isinstance(content, str | list):
        raise ChatTemplateError(
            f"{where}.content: expected text or a list of parts, found {type(content).__name__}"
        )
    normal["content"] = "" if content is None else content
    if "tool_calls" in normal:
        normal["tool_calls"] = _normal_tool_calls(normal["tool_calls"], f"{where}.tool_calls")
        if not normal["tool_calls"]:
            del normal["tool_calls"]
    reasoning = next((normal[name] for name in _REASONING_FIELDS if name in normal), None)
    if reasoning is not None:
        for name in _REASONING_FIELDS[:2]:
            normal.setdefault(name, reasoning)
    return normal


def _normal_tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise ChatTemplateError(f"{where}: expected a list, found {type(calls).__name__}")
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ChatTemplateError(f"{where}[{index}]: expected {{'function': {{'name': …}}}}")
        function["arguments"] = _argument_object(function.get("arguments"))
    return calls


def _argument_object(arguments: Any) -> Any:
    """Clients send arguments as a JSON string; templates want the object."""
    if arguments is None:
        return {}
    if not isinstance(arguments, str):
        return arguments
    if not arguments.strip():
        return {}
    try:
        parsed = json.loads(arguments)
    except ValueError:
        return arguments  # what a model wrote need not be JSON; show it as it was
    return parsed if isinstance(parsed, dict) else arguments


def arguments_as_text(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A copy with tool arguments as JSON strings, for the few templates that join them to text."""
    copied: list[dict[str, Any]] = plain_copy(messages, "messages")
    for message in copied:
        for call in message.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            if not isinstance(arguments, str):
                call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
    return copied


def content_as_text(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A copy with typed parts joined to one text, for templates that know only text."""
    copied = []
    for index, message in enumerate(messages):
        content = message["content"]
        if isinstance(content, list):
            content = _joined_parts(content, f"messages[{index}].content")
        copied.append({**message, "content": content})
    return copied


def content_as_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A copy with text as a list of one part, for templates that know only parts."""
    copied = []
    for message in messages:
        content = message["content"]
        if isinstance(content, str):
            content = [{"type": "text", "text": content}] if content else []
        copied.append({**message, "content": content})
    return copied


def _joined_parts(parts: list[Any], where: str) -> str:
    texts = []
    for index, part in enumerate(parts):
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise ChatTemplateError(
                f"{where}[{index}]: a part of type {kind!r} cannot be used; this model's template "
                "takes text only"
            )
    return "\n".join(texts)
