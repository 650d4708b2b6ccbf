"""What one rendering of a template may use up: steps, characters, sizes of single values.

A hostile template makes much out of little: `x ~ x` in a loop, a replacement, a padding, nested
loops. Sizes are computed before anything is built, and every loop item, call, filter and operator
is counted, so that the same template is refused at the same place on every machine.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Iterator, ValuesView
from collections.abc import Set as AbstractSet
from functools import wraps
from itertools import islice
from re import findall
from typing import Any

import jinja2
from jinja2 import nodes, pass_context
from jinja2.runtime import Context
from jinja2.utils import Namespace, _PassArg
from jinja2.visitor import NodeTransformer

from invar.text.errors import TemplateLimit

# No prompt comes near this; a template that writes more is broken or hostile.
MAX_CHARACTERS = 32 << 20
MAX_ITEMS = 1 << 20  # of a list; a conversation has thousands of messages at most
MAX_WRITTEN_ITEMS = 1 << 18  # of lists and dicts within each other, when they become text
# Two million loop items take seconds. A conversation of a thousand messages takes some ten thousand
# steps.
MAX_STEPS = 2_000_000
CHARACTERS_OF_A_STEP = 256  # searched or changed in about the time of one step
CHARACTERS_OF_A_COPY = 4096
ITEMS_OF_A_STEP = 64
STEPS_OF_A_CALL = 16  # of a macro or a method
MAX_NUMBER_BITS = 4096
MAX_FORMAT_WIDTH = 1000

# Under this name in a rendering's context; no template can spell or change it.
BUDGET = " budget"
# Nodes that the syntax tree is given are filters of these names.
COUNTED, CONCATENATED = " counted", " concatenated"

STRING_METHODS = frozenset(
    (
        *("capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha"),
        *("isascii", "isdecimal", "isdigit", "islower", "isnumeric", "isspace", "istitle"),
        *("isupper", "join", "lower", "lstrip", "partition", "removeprefix", "removesuffix"),
        *("replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split", "splitlines"),
        *("startswith", "strip", "swapcase", "title", "upper"),
    )
)
# They pad, wrap or link, which no prompt needs, or draw lots, which no prompt may (law 1).
DROPPED_FILTERS = (
    *("batch", "center", "format", "pprint", "random", "slice", "urlize", "wordwrap", "xmlattr"),
)
DROPPED_GLOBALS = ("lipsum",)
CONSTANT_TIME = frozenset(("count", "d", "default", "first", "last", "length"))
# They make text of whatever they are given.
TEXT_FILTERS = frozenset(
    (
        *("capitalize", "e", "escape", "forceescape", "indent", "lower", "replace", "safe"),
        *("string", "striptags", "title", "tojson", "trim", "truncate", "upper", "urlencode"),
        "wordcount",
    )
)


def too_large(what: str) -> TemplateLimit:
    return TemplateLimit(f"{what} is too large")


class Budget:
    """What is left to one rendering."""

    def __init__(self) -> None:
        self.steps = MAX_STEPS
        self.characters = MAX_CHARACTERS

    def spend(
        self, *values: Any, steps: int = 1, characters_of_a_step: int = CHARACTERS_OF_A_STEP
    ) -> None:
        """These steps, and those that it takes to go through the values."""
        self.steps -= steps
        for value in values:
            if isinstance(value, str):
                self.steps -= len(value) // characters_of_a_step
            elif isinstance(value, list | tuple | dict):
                self.steps -= len(value) // ITEMS_OF_A_STEP
        if self.steps < 0:
            raise TemplateLimit(f"it takes more than {MAX_STEPS} steps")

    def write(self, value: Any) -> None:
        self.characters -= printed_size(value)
        if self.characters < 0:
            raise TemplateLimit(f"it writes more than {MAX_CHARACTERS} characters")


def budget_of(context: Context) -> Budget:
    budget: Budget = context.parent[BUDGET]
    return budget


def printed_size(value: Any) -> int:
    """Characters of `str(value)` at least to the order; raises where they are too many.

    Values that hold each other many times over are walked as often as they would be written.
    """
    if isinstance(value, str):
        return len(value)
    size, walked, left = 0, 0, [value]
    while left:
        item = left.pop()
        walked += 1
        if isinstance(item, str):
            size += len(item) + 4
        elif isinstance(item, list | tuple):
            left += item
        elif isinstance(item, dict):
            left += [*item.keys(), *item.values()]
        elif isinstance(item, AbstractSet | ValuesView):
            left += item
        elif isinstance(item, Namespace):
            raise jinja2.TemplateRuntimeError("a namespace cannot be written")
        size += 4
        if size > MAX_CHARACTERS or walked + len(left) > MAX_WRITTEN_ITEMS:
            raise too_large("a text")
    return size


def bounded(value: Any) -> Any:
    """The result of a call or filter, unless it is too large to go on with."""
    if isinstance(value, str) and len(value) > MAX_CHARACTERS:
        raise too_large("a text")
    if isinstance(value, list | tuple) and len(value) > MAX_ITEMS:
        raise too_large("a list")
    return value


def listed(values: Iterable[Any]) -> list[Any]:
    items = list(islice(values, MAX_ITEMS + 1))
    bounded(items)
    return items


# ------------------------------------------------------------------------- sizes before building


def check_joined(separator: str, items: list[Any]) -> None:
    if printed_size(items) + len(separator) * len(items) > MAX_CHARACTERS:
        raise too_large("the joined text")


def check_replaced(text: str, old: str, new: str, count: int | None = None) -> None:
    places = text.count(old)
    if count is not None and count >= 0:
        places = min(places, count)
    if len(text) + places * (len(new) - len(old)) > MAX_CHARACTERS:
        raise too_large("the text after a replacement")


def check_indented(text: str, width: int | str = 4, *_: Any, **__: Any) -> None:
    columns = len(width) if isinstance(width, str) else int(width)
    if len(text) + columns * (len(text.splitlines()) + 1) > MAX_CHARACTERS:
        raise too_large("the indented text")


def check_formatted(form: str, values: list[Any]) -> None:
    """Of `str.format`: widths are in the text of the format alone."""
    size, longest = len(form), printed_size(values)
    for _, field, spec, _ in string.Formatter().parse(form):
        if field is None or spec is None:
            continue
        if "{" in spec or any(
            len(number) > 4 or int(number) > MAX_FORMAT_WIDTH for number in findall(r"\d+", spec)
        ):
            raise too_large(f"the width {spec!r} of a format")
        size += longest + MAX_FORMAT_WIDTH
    if size > MAX_CHARACTERS:
        raise too_large("the formatted text")


def check_operation(operator: str, left: Any, right: Any) -> None:
    sides = (left, right)
    if operator == "%" and isinstance(left, str):
        raise jinja2.TemplateRuntimeError("'%' formatting of strings is not available")
    if operator == "**" and not all(isinstance(s, int | float) and abs(s) <= 64 for s in sides):
        raise too_large("the result of '**'")
    if operator == "+":
        check_lengths(operator, sum(map(length_of, sides)), sides)
    if operator == "*":
        numbers = [side for side in sides if isinstance(side, int)]
        if len(numbers) == 2 and sum(n.bit_length() for n in numbers) > MAX_NUMBER_BITS:
            raise too_large("the result of '*'")
        if len(numbers) == 1:
            check_lengths(operator, sum(map(length_of, sides)) * numbers[0], sides)


def check_lengths(operator: str, length: int, sides: tuple[Any, Any]) -> None:
    is_text = any(isinstance(side, str) for side in sides)
    if length > (MAX_CHARACTERS if is_text else MAX_ITEMS):
        raise too_large(f"the result of {operator!r}")


def length_of(side: Any) -> int:
    return len(side) if isinstance(side, str | list | tuple) else 0


# ----------------------------------------------------------------------------------- environment


class Metering(NodeTransformer):
    """Sends what the sandbox does not intercept through filters, and all text through finalize."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        assert isinstance(node.iter, nodes.Expr)
        node.iter = filtered(node.iter, COUNTED)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return filtered(nodes.Tuple(node.nodes, "load", lineno=node.lineno), CONCATENATED)

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return nodes.Const(node.data, lineno=node.lineno)


def filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


@pass_context
def counted(context: Context, values: Iterable[Any]) -> Iterator[Any]:
    """The items of a loop, each for a step."""
    budget = budget_of(context)
    for value in values:
        budget.spend()
        yield value


@pass_context
def concatenated(context: Context, values: tuple[Any, ...]) -> str:
    """The operator `~`."""
    budget_of(context).spend(*values, characters_of_a_step=CHARACTERS_OF_A_COPY)
    if sum(map(printed_size, values)) > MAX_CHARACTERS:
        raise too_large("the result of '~'")
    return "".join(map(str, values))


@pass_context
def written(context: Context, value: Any) -> Any:
    budget_of(context).write(value)
    return value


def metered(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of jinja2 that spends from the budget and is checked before and after."""
    wanted = _PassArg.from_obj(function)

    @pass_context
    @wraps(function, updated=())
    def run(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget_of(context).spend(*(() if name in CONSTANT_TIME else (value, *args)))
        value = admitted(name, value, *args, **kwargs)
        first = {
            _PassArg.context: (context,),
            _PassArg.eval_context: (context.eval_ctx,),
            _PassArg.environment: (context.environment,),
            None: (),
        }[wanted]
        return bounded(function(*first, value, *args, **kwargs))

    return run


def admitted(name: str, value: Any, *args: Any, **kwargs: Any) -> Any:
    """The value that a filter may work on."""
    if name in TEXT_FILTERS:
        printed_size(value)
    if name == "list":
        return listed(value)
    if name == "join":
        items = listed(value)
        check_joined(str(kwargs.get("d", args[0] if args else "")), items)
        return items
    if name == "replace":
        old, new, *count = args
        check_replaced(str(value), str(old), str(new), *count, **kwargs)
    if name == "indent":
        check_indented(str(value), *args, **kwargs)
    if name == "round" and abs(int(kwargs.get("precision", args[0] if args else 0))) > 64:
        raise too_large("the precision of 'round'")
    if name == "sum" and (len(args) > 1 or "start" in kwargs):
        raise jinja2.TemplateRuntimeError("'sum' adds numbers, from 0 on")
    return value


class Limits:
    """To be mixed into a sandboxed environment."""

    intercepted_binops = frozenset(("*", "+", "%", "**"))

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, finalize=written)  # type: ignore[call-arg]
        self.filters: dict[str, Callable[..., Any]]
        self.globals: dict[str, Any]
        for name in DROPPED_FILTERS:
            del self.filters[name]
        for name in DROPPED_GLOBALS:
            del self.globals[name]

    def meter_filters(self) -> None:
        """To be called when all filters are there."""
        self.filters = {name: metered(name, call) for name, call in self.filters.items()}
        self.filters |= {COUNTED: counted, CONCATENATED: concatenated}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)  # type: ignore[misc]
        metered_tree: nodes.Template = Metering().visit(tree)
        metered_tree.set_environment(self)  # type: ignore[arg-type]
        return metered_tree

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr not in STRING_METHODS:
            return False
        if isinstance(obj, bytes | int | float):  # `to_bytes` and the like
            return False
        safe: bool = super().is_safe_attribute(obj, attr, value)  # type: ignore[misc]
        return safe

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)  # type: ignore[misc]
        if wrapped is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            check_formatted(value.__self__, [*args, *kwargs.values()])
            text: str = wrapped(*args, **kwargs)
            return text

        return checked

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        budget_of(context).spend(owner, *args, steps=STEPS_OF_A_CALL)
        if isinstance(owner, str) and name == "replace":
            check_replaced(owner, *args[:3], **{k: v for k, v in kwargs.items() if k == "count"})
        elif isinstance(owner, str) and name == "join" and args:
            args = (listed(args[0]), *args[1:])
            check_joined(owner, args[0])
        elif isinstance(owner, list) and name == "extend" and args:
            args = (listed(args[0]), *args[1:])
            check_operation("+", owner, args[0])
        return bounded(super().call(context, function, *args, **kwargs))  # type: ignore[misc]

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget_of(context).spend(left, right, characters_of_a_step=CHARACTERS_OF_A_COPY)
        check_operation(operator, left, right)
        return super().call_binop(context, operator, left, right)  # type: ignore[misc]
