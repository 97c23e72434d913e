"""The command `gossamer methods`: the method categories and methods. It reads their source, to answer at once."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from gossamer.cli.output import CommandResult, Json, table
from gossamer.settings.catalog import Category, Method, categories
from gossamer.settings.catalog import category as find_category


def methods(category: str | None = None, method: str | None = None, /, *, json: Json = False) -> CommandResult:
    """List all method categories, the methods of one, or one method in full, e.g. `gossamer methods exchange dense`.

    Parameters
    ----------
    category
        A category such as exchange, optimizer or optimizer/lr_schedule.
    method
        A method of that category: its equations, symbols, cost and paper.
    """
    if category is None:
        found = categories().values()
        text = "\n\n".join(_summary(page) for page in found)
        return CommandResult({page.name: [_data(m) for m in page.methods.values()] for page in found}, text)
    page = find_category(category)
    if method is None:
        return CommandResult(_category_data(page), _category_text(page))
    chosen = page.method(method)
    return CommandResult({**_data(chosen), "doc": chosen.doc}, _method_text(page, chosen))


def _summary(page: Category) -> str:
    return "\n".join([f"{page.name}: {page.summary}", table([(m.name, m.summary) for m in page.methods.values()])])


def _category_text(page: Category) -> str:
    about = [f"  {m.name}: {m.summary}\n    {_signature(m)}".rstrip() for m in page.methods.values()]
    return "\n".join([page.doc, "", *about, "", f"Explained: gossamer methods {page.name} NAME"])


def _method_text(page: Category, method: Method) -> str:
    rows = [
        (p.name, p.annotation, f"default {p.default}" if p.default is not None else "required")
        for p in method.parameters
    ]
    parameters = ["", "Parameters:", table(rows)] if rows else []
    written = "{" + method.name + ": {" + ", ".join(f"{p.name}: ..." for p in method.parameters) + "}}"
    return "\n".join([method.doc, *parameters, "", f"In a configuration: {method.name if not rows else written}"])


def _signature(method: Method) -> str:
    return ", ".join(p.name if p.default is None else f"{p.name}={p.default}" for p in method.parameters)


def _category_data(page: Category) -> dict[str, Any]:
    return {"room": page.name, "doc": page.doc, "methods": [_data(m) for m in page.methods.values()]}


def _data(method: Method) -> dict[str, Any]:
    preset = {"is": method.is_} if method.is_ else {}
    parameters = [asdict(p) for p in method.parameters]
    return {"name": method.name, "summary": method.summary, **preset, "parameters": parameters}
