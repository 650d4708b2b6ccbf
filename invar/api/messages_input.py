"""Anthropic's request bodies (/v1/messages): fields, checks, and messages as templates know them.

https://docs.claude.com/en/api/messages
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from invar.api.body import FieldCounts, needed, parse_fields
from invar.api.errors import ApiError, bad_request
from invar.api.fields import ChatFields, Message
from invar.api.limits import Limits, check_items
from invar.api.refusals import FieldRules, Refusal, cannot
from invar.text.tools import Function, Tool

# A line with a hash of its own in every request of Claude Code, at the front of the system prompt:
# no two requests would share a prefix (vLLM drops it too).
BILLING_HEADER = "x-anthropic-billing-header:"


class Block(msgspec.Struct, kw_only=True):
    """Any block of content; which fields a type needs is checked where it is used."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None


class MessageOfAnthropic(msgspec.Struct, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Metadata(msgspec.Struct, kw_only=True):
    user_id: str | None = None


class Thinking(msgspec.Struct, kw_only=True):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None


class ToolChoice(msgspec.Struct, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class ToolOfAnthropic(msgspec.Struct, kw_only=True):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class CountFields(msgspec.Struct, kw_only=True):
    """What /v1/messages/count_tokens takes: all that a prompt depends on."""

    model: str
    messages: list[MessageOfAnthropic]
    system: str | list[Block] | None = None
    thinking: Thinking | None = None
    tools: list[ToolOfAnthropic] | None = None
    tool_choice: ToolChoice | None = None


class OutputConfig(msgspec.Struct, kw_only=True):
    format: dict[str, Any] | None = None
    effort: str | None = None


class MessagesFields(CountFields, kw_only=True):
    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None  # its older name
    # Beyond the dialect, as on the other routes.
    seed: int | None = None
    cache_salt: str | None = None
    priority: int | None = None


Fields = TypeVar("Fields", bound=CountFields)


def check_rules(fields: Mapping[str, Any]) -> None:
    context = fields.get("context_management")
    edits = context.get("edits") if isinstance(context, Mapping) else None
    for edit in edits if isinstance(edits, list) else []:
        # Thinking is never in an answer, so there is none to clear.
        kind = edit.get("type") if isinstance(edit, Mapping) else None
        if not isinstance(kind, str) or not kind.startswith("clear_thinking"):
            raise cannot("context_management", "the server takes nothing out of a conversation")


RULES = FieldRules(
    {
        "mcp_servers": Refusal("this server calls no other servers", ([],)),
        "container": Refusal("this server runs no code"),
    },
    frozenset(
        {
            "cache_control",  # every prefix is cached
            "service_tier",
            "speed",
            "inference_geo",
            "diagnostics",
            "user_profile_id",
            "workspace_id",
            "betas",
            "anthropic_version",
            "anthropic_beta",
        }
    ),
    frozenset({"context_management", "metadata"}),
    check_rules,
)


def parse_messages(
    raw: dict[str, Any], kind: type[Fields], counts: FieldCounts, limits: Limits
) -> tuple[Fields, list[dict[str, Any]]]:
    """The fields, and the conversation as chat templates know it. Raises a 400."""
    fields = parse_fields(raw, kind, counts, RULES)
    lists = [m.content for m in fields.messages if isinstance(m.content, list)]
    inner = [len(b.content) for blocks in lists for b in blocks if isinstance(b.content, list)]
    check_items("messages", sum(map(len, lists)) + sum(inner), limits.messages)
    messages = [part for part in [system_message(fields.system)] if part is not None]
    for index, message in enumerate(fields.messages):
        messages += converted(message, f"messages[{index}]")
    return fields, messages


def chat_tools(fields: CountFields, counts: FieldCounts) -> dict[str, Any]:
    """Tools and their choice in the words of chat. Those that Anthropic runs itself are left out,
    since the model may answer without them."""
    tools = []
    for index, tool in enumerate(fields.tools or ()):
        if tool.type not in (None, "custom"):
            counts.take_idle([f"tools.{tool.type}"])
            continue
        needed_schema = tool.input_schema
        if needed_schema is None:
            raise bad_request(
                f"tools[{index}]: a tool needs input_schema.", f"tools[{index}].input_schema"
            )
        function = Function(
            name=tool.name,
            description=tool.description,
            parameters=needed_schema,
            strict=tool.strict,
        )
        tools.append(Tool(type="function", function=function))
    choice: str | dict[str, str] | None = None
    given = fields.tool_choice
    if given is not None:
        choice = {"any": "required"}.get(given.type, given.type)
        if given.type == "tool":
            if given.name is None:
                raise bad_request("tool_choice: type tool needs name.", "tool_choice.name")
            choice = {"type": "function", "name": given.name}
    parallel = None if given is None else not given.disable_parallel_tool_use
    return {"tools": tools, "tool_choice": choice, "parallel_tool_calls": parallel}


def chat_fields(
    fields: CountFields, messages: list[dict[str, Any]], counts: FieldCounts
) -> ChatFields:
    """The call in the words that all dialects come to."""
    thinking = fields.thinking
    common: dict[str, Any] = {
        **chat_tools(fields, counts),
        "chat_template_kwargs": None
        if thinking is None
        else {"enable_thinking": thinking.type != "disabled"},
        "model": fields.model,
        "messages": msgspec.convert(messages, list[Message]),
        "continue_final_message": continues(messages) or None,
    }
    if isinstance(fields, MessagesFields):
        names = ("stream", "temperature", "top_p", "top_k", "seed", "cache_salt", "priority")
        common |= {name: getattr(fields, name) for name in names}
        common["stop"] = fields.stop_sequences
        if thinking is not None and thinking.type != "disabled":
            common["thinking_token_budget"] = thinking.budget_tokens
        common["response_format"] = answer_format(fields)
        common["user"] = fields.metadata.user_id if fields.metadata is not None else None
    return ChatFields(**common)


def answer_format(fields: MessagesFields) -> dict[str, Any] | None:
    """As chat has it. The dialect knows no form that is not strict."""
    output = fields.output_config
    form = fields.output_format if output is None or output.format is None else output.format
    return None if form is None else {"strict": True, **form}


def continues(messages: Sequence[Mapping[str, Any]]) -> bool:
    """An answer goes on where a last message of the assistant ends."""
    last = messages[-1] if messages else {}
    return last.get("role") == "assistant" and bool(last["content"]) and "tool_calls" not in last


def system_message(system: str | list[Block] | None) -> dict[str, Any] | None:
    if isinstance(system, list):
        for index, block in enumerate(system):
            if block.type != "text":
                raise bad_request("The system prompt takes text only.", f"system[{index}].type")
        texts = [needed(block, "text", f"system[{i}]") for i, block in enumerate(system)]
        system = "\n".join(text for text in texts if not text.startswith(BILLING_HEADER))
    return {"role": "system", "content": system} if system else None


def converted(message: MessageOfAnthropic, where: str) -> list[dict[str, Any]]:
    """One message as those of a template: results of tools are messages of their own there."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    if message.role == "assistant":
        return [assistant_message(message.content, where)]
    messages: list[dict[str, Any]] = []
    texts: list[dict[str, Any]] = []
    for index, block in enumerate(message.content):
        place = f"{where}.content[{index}]"
        if block.type == "tool_result" and message.role == "user":
            messages.append(tool_message(block, place))
        else:
            texts.append({"type": "text", "text": text_of(block, place)})
    if texts or not messages:
        messages.append({"role": message.role, "content": texts})
    return messages


def assistant_message(blocks: Sequence[Block], where: str) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for index, block in enumerate(blocks):
        place = f"{where}.content[{index}]"
        if block.type == "thinking":
            thoughts.append(needed(block, "thinking", place))
        elif block.type == "tool_use":
            name = needed(block, "name", place)
            function = {"name": name, "arguments": block.input or {}}
            calls.append({"id": needed(block, "id", place), "type": "function"} | {
                "function": function
            })  # fmt: skip
        elif block.type != "redacted_thinking":
            texts.append(text_of(block, place))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def tool_message(block: Block, where: str) -> dict[str, Any]:
    content = block.content or ""
    if isinstance(content, list):
        parts = enumerate(content)
        content = "\n".join(text_of(part, f"{where}.content[{index}]") for index, part in parts)
    called = needed(block, "tool_use_id", where)
    return {"role": "tool", "tool_call_id": called, "content": content}


def text_of(block: Block, where: str) -> str:
    if block.type != "text":
        raise unsupported(where)
    return needed(block, "text", where)


def unsupported(where: str) -> ApiError:
    return bad_request(
        f"{where}: this model takes text, and its history tool_use, tool_result and thinking.",
        f"{where}.type",
    )
