"""A closed world for Jinja templates: no code, no files, bounded steps, time and sizes.

Jinja's sandbox keeps templates from Python's internals but lets them run and grow without bound. Here
the syntax tree is rewritten before compilation: every pass through a loop, macro call and assignment
counts as a step, and every operation that can make a value grow checks the size first. Filters and
methods are allow-lists.
"""

import contextvars
import datetime
import json
import re
import time
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import jinja2
from jinja2 import ext, filters, meta, nodes, runtime, sandbox, visitor

MAX_STEPS = 1_000_000
MAX_SECONDS = 5.0
MAX_CHARS = 16 * 2**20  # of any string, the output included
MAX_ITEMS = 1_000_000  # of any list or mapping, nested ones included
MAX_INT_BITS = 4096
MAX_INDENT = 64


class LimitError(jinja2.TemplateError):
    """The template used more steps, time or memory than it may."""


class _Budget:
    def __init__(self):
        self.steps = MAX_STEPS
        self.deadline = time.monotonic() + MAX_SECONDS


_budget: contextvars.ContextVar[_Budget | None] = contextvars.ContextVar("template_budget", default=None)


def compile_template(source: str) -> tuple[jinja2.Template, set[str]]:
    """The compiled template and the names of the variables it reads.

    Raises:
      jinja2.TemplateSyntaxError: with the line at fault. Compilation may raise other exceptions for
        templates that are nested too deeply.
    """
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[ext.loopcontrols, _GenerationTag]
    )
    tree = environment.parse(source)
    for node in tree.find_all((nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)):
        raise jinja2.TemplateSyntaxError("a chat template cannot load other templates", node.lineno)
    variables = meta.find_undeclared_variables(tree) - set(environment.globals)
    return environment.from_string(_Bounder().visit(tree)), variables


def render(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """Runs the template within the limits; lets the template's exceptions through."""
    token = _budget.set(_Budget())
    try:
        return template.render(variables)
    finally:
        _budget.reset(token)


def _tick() -> str:
    budget = _budget.get()
    if budget is not None:  # None while the compiler folds constants
        budget.steps -= 1
        if budget.steps < 0:
            raise LimitError(f"the template takes more than {MAX_STEPS} steps")
        if time.monotonic() > budget.deadline:
            raise LimitError(f"the template takes more than {MAX_SECONDS:g} seconds")
    return ""


def _check_size(size: int, limit: int = MAX_CHARS) -> None:
    if size > limit:
        raise LimitError(f"the template makes a value of size {size}; at most {limit}")


def _check_expanded(value: Any) -> Any:
    """Returns the value unless writing it out would be too long.

    Counts shared parts as often as they appear: forty lists, each holding its predecessor twice, are
    small in memory and 2**40 items long.
    """
    stack, chars, items = [value], 0, 0
    while stack:
        item = stack.pop()
        items += 1
        if isinstance(item, str):
            chars += len(item)
        elif isinstance(item, Mapping):
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, list | tuple | set | frozenset):
            stack.extend(item)
        elif isinstance(item, jinja2.utils.Namespace):
            raise LimitError("a namespace cannot be written out or stored in a list")
        _check_size(chars)
        _check_size(items + len(stack), MAX_ITEMS)
    return value


def _check_format(text: str) -> None:
    if re.search(r"\d{3}|\*|\{[^}]*\{", text):
        raise LimitError("a format string has a width above 99 or a computed one")


def _concat(pieces: Iterable[str]) -> str:
    out, size = [], 0
    for piece in pieces:
        size += len(piece)
        _check_size(size)
        out.append(piece)
    return "".join(out)


def _join(items: Iterable[Any], separator: Any = "") -> str:
    pieces: list[str] = []
    for item in items:
        if pieces and separator:
            pieces.append(str(separator))
        pieces.append(str(_check_expanded(item)))
    return _concat(pieces)


def _replace(text: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = str(text), str(old), str(new)
    _check_size(len(text) + text.count(old) * len(new))
    return text.replace(old, new, -1 if count is None else count)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Hugging Face's ``tojson``: no HTML escapes, unlike Jinja's own."""
    if indent is not None:
        _check_size(indent if isinstance(indent, int) else len(indent), MAX_INDENT)
    return json.dumps(
        _check_expanded(value),
        ensure_ascii=bool(ensure_ascii),
        indent=indent,
        separators=separators,
        sort_keys=bool(sort_keys),
    )


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    columns = width if isinstance(width, int) else len(width)
    _check_size(columns, MAX_INDENT)
    _check_size(len(text) + (text.count("\n") + 1) * columns)
    return filters.do_indent(text, width, first, blank)


def _format(text: str, *args: Any, **kwargs: Any) -> str:
    _check_format(str(text))
    return filters.do_format(text, *args, **kwargs)


@jinja2.pass_environment
def _join_filter(
    environment: jinja2.Environment, value: Iterable[Any], d: Any = "", attribute: str | int | None = None
) -> str:
    if attribute is not None:
        value = map(filters.make_attrgetter(environment, attribute), value)
    return _join(value, d)


def _raise_exception(message: Any) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(form: str) -> str:
    _check_format(form)
    return datetime.datetime.now().strftime(form)


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return _check_expanded(dict(*args, **kwargs))


_PLAIN_FILTERS = (
    "abs attr capitalize count d default dictsort e escape first float forceescape groupby int items last "
    "length list lower map max min reject rejectattr reverse round safe select selectattr sort string "
    "striptags sum title trim truncate unique upper urlencode wordcount"
).split()
_FILTERS = {name: filters.FILTERS[name] for name in _PLAIN_FILTERS} | {
    "format": _format,
    "indent": _indent,
    "join": _join_filter,
    "replace": _replace,
    "tojson": _to_json,
}
_METHODS = frozenset(
    "capitalize casefold count endswith find get index isalnum isalpha isascii isdecimal isdigit islower "
    "isnumeric isspace istitle isupper items join keys lower lstrip partition removeprefix removesuffix "
    "replace rfind rindex rpartition rsplit rstrip split splitlines startswith strip swapcase title upper "
    "values copy is_integer".split()
)
_VALUES = (str, bytes, int, float, list, tuple, set, Mapping)


class _Environment(sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["+", "*", "**", "%"])
    concat = staticmethod(_concat)  # pyright: ignore[reportAssignmentType]
    tick = staticmethod(_tick)
    join_text = staticmethod(lambda *parts: _join(parts))
    sized = staticmethod(_check_expanded)

    def __init__(self, **options: Any):
        super().__init__(finalize=self._written, **options)
        self.filters = dict(_FILTERS)  # pyright: ignore[reportAttributeAccessIssue]
        for name in set(self.globals) - {"range", "namespace", "cycler", "joiner"}:
            del self.globals[name]
        self.globals |= {"dict": _dict, "raise_exception": _raise_exception, "strftime_now": _strftime_now}

    @staticmethod
    def _written(value: Any) -> Any:
        """Every ``{{ value }}`` passes here."""
        _tick()
        return value if isinstance(value, str) else _check_expanded(value)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if not super().is_safe_attribute(obj, attr, value):
            return False
        return not (callable(value) and isinstance(obj, _VALUES)) or attr in _METHODS

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped

    def call(self, context: runtime.Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        if obj is _tick:
            return _tick()
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str) and obj.__name__ == "join":
            return _join(*args, separator=owner)
        if isinstance(owner, str) and obj.__name__ == "replace":
            return _replace(owner, *args, **kwargs)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            _check_format(left)
            _check_expanded(right)
        elif isinstance(left, int) and isinstance(right, int):
            bits = abs(right) if operator == "**" else 1
            _check_size(left.bit_length() * bits + right.bit_length(), MAX_INT_BITS)
        elif operator == "*":
            _check_size(_factor(left) * _factor(right), MAX_ITEMS)
        elif operator == "+" and isinstance(left, str) and isinstance(right, str):
            _check_size(len(left) + len(right))
        elif operator == "+" and isinstance(left, list | tuple) and isinstance(right, list | tuple):
            _check_size(len(left) + len(right), MAX_ITEMS)
        return super().call_binop(context, operator, left, right)


def _factor(value: Any) -> int:
    if isinstance(value, int):
        return value
    return len(value) if isinstance(value, str | list | tuple) else 1


class _Bounder(visitor.NodeTransformer):
    """Inserts the steps and size checks that the syntax tree alone can show."""

    def _call(self, name: str, arguments: list[nodes.Expr], lineno: int) -> nodes.Call:
        return nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None, lineno=lineno)

    def _step(self, node: nodes.Node) -> nodes.ExprStmt:
        return nodes.ExprStmt(self._call("tick", [], node.lineno), lineno=node.lineno)

    def _count_body(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, self._step(node))
        return node

    visit_For = visit_Macro = visit_CallBlock = visit_Block = _count_body

    def visit_Assign(self, node: nodes.Assign) -> list[nodes.Node]:
        self.generic_visit(node)
        return [self._step(node), node]

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._call("join_text", node.nodes, node.lineno)

    def _size_literal(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        target = getattr(node, "ctx", "load") != "load"
        constant = all(isinstance(child, nodes.Const) for child in node.iter_child_nodes())
        return node if target or constant else self._call("sized", [node], node.lineno)

    visit_List = visit_Tuple = visit_Dict = _size_literal


class _GenerationTag(ext.Extension):
    """``{% generation %}`` marks the assistant's tokens for training; here it only groups."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)
