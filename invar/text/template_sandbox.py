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
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment

from invar.text.chat_messages import plain_copy
from invar.text.errors import ChatTemplateError, TemplateLimit, TemplateRefusal
from invar.text.template_limits import BUDGET, Budget, Limits, listed, too_large

# Templates count messages and tools, not millions: all ranges of one rendering together.
MAX_RANGE_ITEMS = 100_000
MAX_JSON_BLANK = 64
_SEARCHING_METHODS = frozenset(
    (
        *("count", "endswith", "find", "index", "lstrip", "partition", "removeprefix"),
        *("removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip"),
        *("split", "startswith", "strip"),
    )
)


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks answers for training; only its body counts."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it as a variable of instances)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _ImmutableEnvironment(Limits, ImmutableSandboxedEnvironment):
    pass


class _MutableEnvironment(Limits, SandboxedEnvironment):
    pass


class SandboxedTemplate:
    """One template, compiled once per environment."""

    def __init__(self, source: str) -> None:
        """Raises ChatTemplateError for a syntax error, with its line."""
        self.source = source
        self._compiled: dict[bool, jinja2.Template] = {}
        self._compile(mutable=False)

    def render(self, variables: dict[str, Any], *, now: datetime | None) -> str:
        """Run the template. Raises whatever jinja2 or the template raises."""
        try:
            return self._render(variables, now, mutable=False)
        except SecurityError:
            # A few templates append to lists; on a copy of the data that does no harm.
            copied = {name: plain_copy(value, name) for name, value in variables.items()}
            return self._render(copied, now, mutable=True)

    def _render(self, variables: dict[str, Any], now: datetime | None, *, mutable: bool) -> str:
        return self._compile(mutable=mutable).render(
            {
                **variables,
                "raise_exception": _refuse,
                "strftime_now": _clock(now),
                "range": _counted_range(),
                BUDGET: Budget(),
            }
        )

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
        environment = kind(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _to_json
        # Markup would HTML-escape whatever is joined to it; prompts are not HTML.
        environment.filters["safe"] = str
        environment.meter_filters()
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
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON, unlike jinja2's own filter, which escapes `<` and `'` for HTML."""
    for blank in (indent, *(separators or ())):
        if (blank if isinstance(blank, int) else len(blank or "")) > MAX_JSON_BLANK:
            raise too_large("an indentation or a separator of 'tojson'")
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_iterator_as_list,
    )
    if indent is None and separators is None:
        return encoder.encode(value)
    # Indentation grows with depth, so it is counted as it comes.
    budget, parts = Budget(), []
    for part in encoder.iterencode(value):
        budget.write(part)
        parts.append(part)
    return "".join(parts)


def _iterator_as_list(value: Any) -> list[Any]:
    if isinstance(value, Iterator):
        return listed(value)
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
            raise TemplateLimit(f"its ranges exceed {MAX_RANGE_ITEMS} items")
        return numbers

    return counted
