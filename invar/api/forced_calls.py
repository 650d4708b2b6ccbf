"""Calls that must be made, and those that are held to a schema: a grammar for the reply."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import dataclass
from typing import Any

from invar.api.errors import bad_request
from invar.api.fields import ChatFields
from invar.api.prompts import ChatPrompt
from invar.api.sampling import from_value_error
from invar.api.server import Server
from invar.api.structured import compiled
from invar.engine.door import ResolvedParams
from invar.grammar.structured_outputs import StructuredOutputs
from invar.text.call_writing import either
from invar.text.reply_detection import Held, ModelReplies


@dataclass(frozen=True)
class CalledTools:
    """Parameters with which a reply is held to the tools of its request."""

    ready: ResolvedParams
    held: Held
    warnings: tuple[str, ...]


async def called_tools(
    server: Server, fields: ChatFields, ready: ResolvedParams, prompt: ChatPrompt
) -> CalledTools | None:
    """None: the reply is free to call or not. Raises a 400."""
    tools, replies = prompt.tools, server.model.replies
    answer = ready.params.structured_outputs
    if replies is None:
        return None
    if tools.must_call:
        held = Held.CALLS
    elif answer is not None and tools.schemas and fields.response_format:
        if replies.writer is None and not tools.strict:
            return None  # the answer has its form, and there are no calls
        held = Held.CALLS_OR_FORM
    elif tools.strict:
        held = Held.TEXT
    else:
        return None
    field = "tool_choice" if tools.must_call else "tools"
    if answer is not None and fields.response_format is None:
        raise bad_request(
            "A grammar for the answer and tools that must be called, or that are strict, exclude "
            "each other; response_format may stand beside strict tools.",
            field,
        )
    if answer is not None and not answer.is_json and not tools.must_call:
        raise bad_request(
            "response_format: beside tools the types json_schema and json_object are known.",
            "response_format.type",
        )
    try:
        form, ignored = await asyncio.to_thread(_form, replies, prompt, held, answer)
        params = copy.copy(ready.params)
        params.structured_outputs = form
        await compiled(server.model.door, form)
        ready_for = await asyncio.to_thread(server.model.door.prepare, params)
    except RecursionError:
        raise bad_request(
            "tools: the parameters of a tool are nested too deeply.", "tools"
        ) from None
    except ValueError as error:
        raise from_value_error(_named(error), field) from None
    return CalledTools(ready_for, held, (*ignored, *ready_for.warnings))


def _form(
    replies: ModelReplies, prompt: ChatPrompt, held: Held, answer: StructuredOutputs | None
) -> tuple[StructuredOutputs, list[str]]:
    """``answer``: the form of a reply that calls nothing."""
    tools = prompt.tools
    other: dict[str, Any] | None = None
    if answer is not None and held is Held.CALLS_OR_FORM:
        schema = answer.json_schema()
        other = {"type": "json_schema", "json_schema": schema, "strict": answer.strict}
    tag, ignored = replies.answer_form(
        tools.written, held, parallel=tools.parallel, prompt_end=prompt.end
    )
    if other is not None:
        tag["format"] = either([tag["format"], other])
    return StructuredOutputs(structural_tag=tag), ignored


def _named(error: ValueError) -> ValueError:
    text = str(error)
    known = text.startswith(("structured_outputs: ", "max_tokens: "))
    return error if known else ValueError(f"structured_outputs: {text}")
