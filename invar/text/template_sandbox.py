"""The sandbox in which chat templates run: a template in a model file is code from a stranger.

The environment gives templates what `transformers` gives them, no more:
https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/utils/chat_template_utils.py
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment

from invar.text.errors import ChatTemplateError

# No prompt comes near this; a template that writes more is broken or hostile.
MAX_OUTPUT_CHARACTERS = 32 << 20
# Templates count messages and tools, not millions: all ranges of one rendering together.
MAX_RANGE_ITEMS = 100_000
# String methods that make much out of little; no template uses them.
_PADDING_METHODS = frozenset(("center", "expandtabs", "ljust", "rjust", "zfill"))
_SEARCHING_METHODS = frozenset(
    (
        *("count", "endswith", "find", "index", "lstrip", "partition", "removeprefix"),
        *("removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip"),
        *("split", "startswith", "strip"),
    )
)


class TemplateRefusal(jinja2.TemplateError):
    """The template called `raise_exception`: its own sentence for the caller."""


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks answers for training; only its body counts."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it as a variable of instances)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Limits:
    """Growth caps shared by both environments."""

    intercepted_binops = frozenset(("*", "+", "%", "**"))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr in _PADDING_METHODS:
            return False
        safe: bool = super().is_safe_attribute(obj, attr, value)  # type: ignore[misc]
        return safe

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator in ("*", "+", "**") and _grows_too_far(operator, left, right):
            raise jinja2.TemplateRuntimeError(f"the result of {operator!r} is too large")
        if operator == "%" and isinstance(left, str):
            raise jinja2.TemplateRuntimeError("'%' formatting of strings is not available")
        return super().call_binop(context, operator, left, right)  # type: ignore[misc]


class _ImmutableEnvironment(_Limits, ImmutableSandboxedEnvironment):
    pass


class _MutableEnvironment(_Limits, SandboxedEnvironment):
    pass


def _grows_too_far(operator: str, left: Any, right: Any) -> bool:
    if operator == "**":
        return not (_is_small_number(left) and _is_small_number(right))
    sized = [len(side) for side in (left, right) if isinstance(side, str | list | tuple)]
    if operator == "+":
        return sum(sized) > MAX_OUTPUT_CHARACTERS
    factors = [side for side in (left, right) if isinstance(side, int)]
    return bool(sized and factors) and sized[0] * factors[0] > MAX_OUTPUT_CHARACTERS


def _is_small_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) <= 64


class SandboxedTemplate:
    """One template, compiled once per environment."""

    def __init__(self, source: str) -> None:
        """Raises ChatTemplateError for a syntax error, with its line."""
        self.source = source
        self._compiled: dict[bool, jinja2.Template] = {}
        self._compile(mutable=False)

    def render(self, variables: dict[str, Any], *, now: datetime | None, mutable: bool) -> str:
        """Run the template. Raises whatever jinja2 or the template raises.

        `mutable` lets it change lists and dicts it was given (some call `list.append`).
        """
        template = self._compile(mutable=mutable)
        namespace = {
            **variables,
            "raise_exception": _refuse,
            "strftime_now": _clock(now),
            "range": _counted_range(),
        }
        parts: list[str] = []
        length = 0
        for part in template.generate(namespace):
            length += len(part)
            if length > MAX_OUTPUT_CHARACTERS:
                raise jinja2.TemplateRuntimeError(
                    f"it writes more than {MAX_OUTPUT_CHARACTERS} characters"
                )
            parts.append(part)
        return "".join(parts)

    def searched_constants(self) -> frozenset[str]:
        """String constants that the template compares with, or searches and cuts text by."""
        tree = self._environment(mutable=False).parse(self.source)
        found: set[str] = set()
        for node in tree.find_all((nodes.Compare, nodes.Call, nodes.Filter)):
            found.update(
                constant.value
                for constant in _searched_operands(node)
                if isinstance(constant, nodes.Const) and isinstance(constant.value, str)
            )
        return frozenset(found)

    def _compile(self, *, mutable: bool) -> jinja2.Template:
        if mutable not in self._compiled:
            try:
                self._compiled[mutable] = self._environment(mutable=mutable).from_string(
                    self.source
                )
            except jinja2.TemplateSyntaxError as error:
                raise ChatTemplateError(
                    f"chat template, line {error.lineno}: {error.message}; supply a template "
                    "that jinja2 accepts"
                ) from error
        return self._compiled[mutable]

    @staticmethod
    def _environment(*, mutable: bool) -> SandboxedEnvironment:
        kind = _MutableEnvironment if mutable else _ImmutableEnvironment
        environment: SandboxedEnvironment = kind(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _to_json
        # Markup would HTML-escape whatever is joined to it; prompts are not HTML.
        environment.filters["safe"] = str
        del environment.filters["center"]
        return environment


def _searched_operands(node: nodes.Node) -> list[nodes.Node]:
    if isinstance(node, nodes.Compare):
        return [node.expr, *(operand.expr for operand in node.ops)]
    if isinstance(node, nodes.Filter):
        return list(node.args) if node.name == "replace" else []
    if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr):
        return list(node.args) if node.node.attr in _SEARCHING_METHODS else []
    return []


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON, unlike jinja2's own filter, which escapes `<` and `'` for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_iterator_as_list,
    )


def _iterator_as_list(value: Any) -> list[Any]:
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _refuse(message: object = "") -> NoReturn:
    raise TemplateRefusal(str(message))


def _clock(now: datetime | None) -> Callable[[str], str]:
    moment = now if now is not None else datetime.now()
    return lambda form: moment.strftime(form)


def _counted_range() -> Callable[..., range]:
    left = MAX_RANGE_ITEMS

    def counted(*bounds: int) -> range:
        nonlocal left
        numbers = range(*bounds)
        left -= len(numbers)
        if left < 0:
            raise jinja2.TemplateRuntimeError(f"its ranges exceed {MAX_RANGE_ITEMS} items")
        return numbers

    return counted
