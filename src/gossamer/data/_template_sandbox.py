"""The sandbox in which chat templates run, as transformers sets it up: templates come from strangers.

Imported when a template is first rendered: jinja2 comes with torch, and commands that render none do without.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_OPERAND_LIMIT = 1 << 20  # letters or elements that a product may have, and bits of a power


def compiled(source: str) -> Template:
    """Return the template with that text. Raises jinja2.TemplateError."""
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _Dictionary(),
        "namespace": _Namespace,
    }
    return environment.from_string(source)


def rendered(template: Template, values: Mapping[str, Any], *, limit: int) -> str:
    """Return the text that a template makes of `values`; stop with an error where that has more than `limit` letters.

    Raises jinja2.TemplateError, and whatever else the template's own expressions raise.
    """
    pieces, size = [], 0
    for piece in template.generate(**values):
        pieces.append(piece)
        size += len(piece)
        if size > limit:
            raise SecurityError(f"it makes a text of more than {limit} letters")
    return "".join(pieces)


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox without the two operators that make gigabytes of one line."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*" and _length(left, right) > _OPERAND_LIMIT:
            raise SecurityError(f"a product of more than {_OPERAND_LIMIT} elements")
        if operator == "**" and _bits(left, right) > _OPERAND_LIMIT:
            raise SecurityError(f"a power of more than {_OPERAND_LIMIT} bits")
        return super().call_binop(context, operator, left, right)


def _length(left: Any, right: Any) -> int:
    if isinstance(left, int):
        left, right = right, left
    return len(left) * right if isinstance(left, str | list | tuple) and isinstance(right, int) else 0


def _bits(base: Any, power: Any) -> int:
    return base.bit_length() * abs(power) if isinstance(base, int) and isinstance(power, int) else 0


class _Generation(Extension):
    """The tag {% generation %}, which marks answers in some templates: it renders what is inside."""

    tags = {"generation"}  # noqa: RUF012  (declared so by jinja2)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Dictionary:
    """`dict` for templates: a call, without the type's attributes."""

    def __call__(self, *args: Any, **named: Any) -> dict[Any, Any]:
        return dict(*args, **named)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """Return what dict.fromkeys returns."""
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace` for templates; names that begin with an underscore are refused, as they reach into Python."""

    def __init__(*args: Any, **named: Any) -> None:
        self, rest = args[0], args[1:]
        values = dict(*rest, **named)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: str) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}")


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
