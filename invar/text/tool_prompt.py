"""Conversations with tools for templates that know none: told in words and JSON, as Hermes does.

https://github.com/NousResearch/Hermes-Function-Calling#prompt-format-for-function-calling
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from invar.text.chat_template import ChatTemplate, ChatTemplateError

NOW = datetime(2024, 1, 1)
PROBE = "invarprobe"
PROBE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "description": "A text."},
        "count": {"type": "integer", "description": "A number."},
    },
    "required": ["text"],
    "additionalProperties": False,
}
PROBE_TOOL = {
    "type": "function",
    "function": {"name": PROBE, "description": "A probe.", "parameters": PROBE_SCHEMA},
}
PROBE_ARGUMENTS: dict[str, Any] = {"text": "invarvalue", "count": 7}
QUESTION = {"role": "user", "content": "invarquestion"}
INSTRUCTION = """\
You may call functions to help the user. Their signatures, each a JSON object on a line of its own:
<tools>
{tools}
</tools>
To call one, answer with a JSON object that has its name and arguments, between tags:
<tool_call>
{{"name": "<name of the function>", "arguments": {{<its arguments>}}}}
</tool_call>"""


def probe_call(content: str | None = "") -> dict[str, Any]:
    """An assistant's turn with one call."""
    function = {"name": PROBE, "arguments": PROBE_ARGUMENTS}
    call = {"id": "invarcall", "type": "function", "function": function}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def probed(
    template: ChatTemplate, messages: Sequence[Mapping[str, Any]], generate: bool = False
) -> str:
    """What the template makes of it, "" if it refuses."""
    try:
        return template.render(
            messages, tools=[PROBE_TOOL], add_generation_prompt=generate, now=NOW
        )
    except ChatTemplateError:
        return ""


class ToolPrompt:
    """What a template can show of tools; the rest is told in words."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    @functools.cached_property
    def shows_tools(self) -> bool:
        return PROBE in probed(self._template, [QUESTION], generate=True)

    @functools.cached_property
    def shows_calls(self) -> bool:
        return "invarvalue" in probed(self._template, [QUESTION, probe_call()])

    @functools.cached_property
    def shows_results(self) -> bool:
        """A template that knows no tools may still write their role, which the model never saw."""
        if not (self.shows_tools or self.shows_calls):
            return False
        result = {"role": "tool", "tool_call_id": "invarcall", "name": PROBE, "content": "invarend"}
        return "invarend" in probed(self._template, [QUESTION, probe_call(), result])

    @functools.cached_property
    def takes_system(self) -> bool:
        messages = [{"role": "system", "content": "invarsystem"}, QUESTION]
        return "invarsystem" in probed(self._template, messages, generate=True)

    def fitted(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[list[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None]:
        """The messages and tools to be given to the template."""
        fitted = list(messages)
        if any(one.get("tool_calls") for one in fitted) and not self.shows_calls:
            fitted = [with_calls_in_text(one) if one.get("tool_calls") else one for one in fitted]
        if any(one.get("role") == "tool" for one in fitted) and not self.shows_results:
            fitted = results_as_turns(fitted)
        if not tools:
            return fitted, None
        if self.shows_tools:
            return fitted, tools
        lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        text = INSTRUCTION.format(tools=lines)
        first = 0 if self.takes_system else first_of(fitted, "user")
        if self.takes_system and (not fitted or fitted[0].get("role") != "system"):
            return [{"role": "system", "content": text}, *fitted], None
        fitted[first] = {
            **fitted[first],
            "content": joined(fitted[first].get("content"), text, in_front=not self.takes_system),
        }
        return fitted, None


def first_of(messages: Sequence[Mapping[str, Any]], role: str) -> int:
    found = [index for index, one in enumerate(messages) if one.get("role") == role]
    return found[0] if found else 0


def joined(content: Any, text: str, *, in_front: bool) -> Any:
    """A content with a text beside it."""
    if isinstance(content, list):
        part = {"type": "text", "text": text}
        return [part, *content] if in_front else [*content, part]
    texts = [text, content or ""] if in_front else [content or "", text]
    return "\n\n".join(filter(None, texts))


def with_calls_in_text(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = function.get("arguments") or {}
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        name = json.dumps(function["name"], ensure_ascii=False)
        calls.append(f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>')
    told = {name: value for name, value in message.items() if name != "tool_calls"}
    content = message.get("content")
    return told | {"content": joined(content, "\n".join(calls), in_front=False)}


def results_as_turns(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Results become a turn of the user; those that follow each other, one turn."""
    turns: list[Mapping[str, Any]] = []
    open_turn = False
    for message in messages:
        if message.get("role") != "tool":
            open_turn = False
            turns.append(message)
            continue
        content = message.get("content") or ""
        if isinstance(content, list):
            content = "\n".join(part.get("text") or "" for part in content)
        text = f"<tool_response>\n{content}\n</tool_response>"
        if open_turn:
            turns[-1] = {"role": "user", "content": f"{turns[-1]['content']}\n{text}"}
        else:
            turns.append({"role": "user", "content": text})
        open_turn = True
    return turns
