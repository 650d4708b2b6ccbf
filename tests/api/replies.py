"""A scripted model that writes any text, and a template with tools and thoughts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from invar.engine.request import EngineRequest

from .scripted import EOS, IDS, Script, Step, token

# Tools in the system turn, calls and results as Hermes and Qwen write them.
HERMES = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "<tool_call></tool_call><|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n"
    "{% endif %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
OPENS_THINK = HERMES.replace(
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}",
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}",
)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "Of a city.", "parameters": SCHEMA},
}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NOW]
PARIS = '{"city": "P{ar}\\"is 😀", "days": 3}'
ROME = '{"city":"Rome"}'


def call_text(arguments: str, name: str = "weather") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def ids_of(text: str) -> list[int]:
    ids: list[int] = []
    for character in text:
        if character in IDS or character == " ":
            ids.append(token(character))
        else:
            ids += [token(bytes([byte])) for byte in character.encode()]
    return ids


def writes(text: str, grouped: int = 1) -> Script:
    """This text, so many tokens a step; a character is a token, or a few."""
    ids = [*ids_of(text), token(EOS)]

    def script(request: EngineRequest) -> Iterator[Step]:
        for start in range(0, len(ids), grouped):
            yield ids[start : start + grouped]

    return script
