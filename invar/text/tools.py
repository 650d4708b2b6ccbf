"""Tools of a request: what is checked, what the model is shown, and which calls are looked for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from invar.text.call_writing import WrittenTool

# OpenAI allows fewer characters; what names there are in the wild does no harm.
NAME = re.compile(r"[\w.\-/:]{1,128}")
Mode = Literal["none", "auto", "required", "named"]  # named: one call, of this tool
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


class ToolError(ValueError):
    """What is wrong with a request's tools, and in which field."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


class Function(msgspec.Struct, kw_only=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    type: str
    function: Function


@dataclass(frozen=True)
class ToolUse:
    """What a request says of tools.

    ``shown``: tools as templates know them; ``schemas``: name → JSON Schema of the arguments, of
    those that may be called, None where calls are not looked for.
    """

    shown: tuple[dict[str, Any], ...] = ()
    schemas: Mapping[str, Mapping[str, Any]] | None = None
    must_call: bool = False
    parallel: bool = True
    strict: frozenset[str] = frozenset()

    @property
    def written(self) -> list[WrittenTool]:
        """Those that may be called, as `invar.text.call_writing` takes them."""
        schemas = self.schemas or {}
        return [WrittenTool(name, schemas[name], name in self.strict) for name in schemas]


NO_TOOLS = ToolUse()


def tool_use(
    tools: Sequence[Tool] | None,
    choice: str | Mapping[str, Any] | None,
    parallel: bool | None,
) -> ToolUse:
    """In the words of chat completions. An empty list is none. Raises ToolError."""
    functions = checked(tools or ())
    mode, names = chosen(choice, functions)
    if mode == "none":
        return NO_TOOLS
    schemas = {name: functions[name].parameters or NO_PARAMETERS for name in names}
    return ToolUse(
        tuple(shown(functions[name]) for name in names),
        schemas,
        mode in ("required", "named"),
        parallel is not False and mode != "named",
        frozenset(name for name in names if functions[name].strict),
    )


def checked(tools: Sequence[Tool]) -> dict[str, Function]:
    functions: dict[str, Function] = {}
    for index, tool in enumerate(tools):
        where, place = f"tools[{index}]", f"tools[{index}].function.name"
        if tool.type != "function":
            raise ToolError(f"{where}: tools of type function are known.", f"{where}.type")
        name = tool.function.name
        if not NAME.fullmatch(name):
            raise ToolError(f"{where}: a name has 1 to 128 letters, digits and _ . - / :", place)
        if name in functions:
            raise ToolError(f"{where}: there is another tool of this name.", place)
        functions[name] = tool.function
    return functions


def chosen(
    choice: str | Mapping[str, Any] | None, functions: Mapping[str, Function]
) -> tuple[Mode, list[str]]:
    """How many calls there must be, and of which tools."""
    every = list(functions)
    if isinstance(choice, Mapping):
        mode, names = chosen_by_name(choice)
        for name in names:
            if name not in functions:
                raise ToolError("tool_choice names a tool that is not in tools.", "tool_choice")
        return mode, names
    if choice not in (None, "none", "auto", "required"):
        raise ToolError(
            "tool_choice must be none, auto, required or an object that names a tool.",
            "tool_choice",
        )
    if choice == "required":
        if not functions:
            raise ToolError("tool_choice required needs tools.", "tool_choice")
        return "required", every
    return ("auto", every) if functions and choice != "none" else ("none", [])


def chosen_by_name(
    choice: Mapping[str, Any],
) -> tuple[Mode, list[str]]:
    """A tool that must be called, or those that may be; in chat's shape or that of Responses."""
    kind = choice.get("type")
    if kind == "function":
        return "named", [function_name(choice)]
    if kind == "allowed_tools":
        inner = choice.get("allowed_tools", choice)
        mode = inner.get("mode", "auto") if isinstance(inner, Mapping) else None
        listed = inner.get("tools") if isinstance(inner, Mapping) else None
        if mode in ("auto", "required") and isinstance(listed, list) and listed:
            return mode, list(dict.fromkeys(function_name(one) for one in listed))
        raise ToolError(
            "tool_choice: allowed_tools has a mode, auto or required, and tools.", "tool_choice"
        )
    raise ToolError("tool_choice: types function and allowed_tools are known.", "tool_choice")


def function_name(named: Any) -> str:
    inner = named.get("function", named) if isinstance(named, Mapping) else None
    name = inner.get("name") if isinstance(inner, Mapping) else None
    if not isinstance(name, str):
        raise ToolError("tool_choice: a tool is named by function.name.", "tool_choice")
    return name


def shown(function: Function) -> dict[str, Any]:
    described: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        described["description"] = function.description
    described["parameters"] = function.parameters or dict(NO_PARAMETERS)
    return {"type": "function", "function": described}
