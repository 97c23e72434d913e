"""Write the generated part of docs/reference/: configuration, commands, records, Python API, a page per category.

`make docs` runs it. `python docs/generate.py --check` fails if a committed page differs; a test checks the same.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import python_api
import support
from cyclopts import App

from gossamer.cli import COMMANDS, EPILOGUE, make_app
from gossamer.settings.catalog import Method, categories
from gossamer.settings.describe import section, wanted
from gossamer.settings.yaml_io import flow
from gossamer.spec import records
from gossamer.spec.config import RunConfig

REFERENCE = Path(__file__).parent / "reference"
NOTE = "<!-- Written by docs/generate.py from the code: change it there, then `make docs`. -->"


def pages() -> dict[str, str]:
    """File name -> text of every page of the reference."""
    found = {
        "config.md": config(),
        "commands.md": commands(),
        "records.md": record_kinds(),
        "support.md": support.page(),
        "python_api.md": python_api.page(),
        **methods(),
    }
    return {name: f"{NOTE}\n\n{text.strip()}\n" for name, text in found.items()}


def config() -> str:
    """The keys of run.yaml."""
    parts = [
        "# Configuration",
        "One file, `run.yaml` (or TOML), describes a run. Every key has a default, and an unknown key is an error. "
        "`key=value` on the command line wins over the file: `gossamer train run.yaml train.batch=32`. "
        "`gossamer config show run.yaml` prints the merged values with where each came from, "
        "`gossamer config schema` the JSON Schema for editors. Paths are relative to the current directory.",
    ]
    parts += _sections("", RunConfig)
    return "\n\n".join(parts)


def _sections(prefix: str, model: type[Any]) -> Iterator[str]:
    rows = []
    inner = []
    for name, field in model.model_fields.items():
        below = section(field.annotation)
        if below is not None:
            inner.append((f"{prefix}{name}.", below))
            continue
        default = flow(field.get_default(call_default_factory=True))
        rows.append((f"`{prefix}{name}`", wanted(field), f"`{default}`", field.description or ""))
    if rows:
        yield f"## {prefix.rstrip('.')}\n\n{inspect.getdoc(model)}"
        yield _table(("key", "takes", "default", "meaning"), rows)
    for place, below in inner:
        yield from _sections(place, below)


def commands() -> str:
    """The command line."""
    app = make_app()
    parts = ["# Commands", EPILOGUE.replace(". Exit", ".\n\nExit")]
    for name, (_, said, example) in COMMANDS.items():
        parts += [f"## {name}", said]
        parts += [f"```\ngossamer {example}\n```"] if example else []
        parts += _command(app[name], f"gossamer {name}")
    return "\n\n".join(parts)


def _command(app: App, name: str) -> Iterator[str]:
    inner = [child for child in app if not child.startswith("-")]
    for child in inner:
        yield f"### {name.removeprefix('gossamer ')} {child}"
        yield inspect.cleandoc(app[child].help).partition("\n\nParameters\n")[0]
        yield from _command(app[child], f"{name} {child}")
    if not inner:
        rows = list(_arguments(app))
        if rows:
            yield _table(("argument", "default", "meaning"), rows)


def _arguments(app: App) -> Iterator[tuple[str, str, str]]:
    for argument in app.assemble_argument_collection(parse_docstring=True):
        if not argument.show:
            continue
        default = argument.field_info.default
        unset = default in (inspect.Parameter.empty, None, False, "", ())
        said = "required" if argument.required else "" if unset else f"`{default}`"
        yield f"`{argument.names[0]}`", said, argument.parameter.help or ""


def methods() -> dict[str, str]:
    """A page per method category, and an index of them."""
    found = categories()
    parts = [
        "# Methods",
        "One method is one file. In a configuration a method is written by its name, or with parameters: "
        "`adamw` or `{adamw: {lr: 0.001}}`. `gossamer methods` prints the same.",
        _table(
            ("category", "holds", "methods"),
            [
                (f"[{name}]({_page_name(name)})", each.summary, ", ".join(f"`{one}`" for one in each.methods))
                for name, each in found.items()
            ],
        ),
    ]
    pages = {"methods/index.md": "\n\n".join(parts)}
    for name, each in found.items():
        parts = [f"# Methods: {name}", each.doc]
        for method in each.methods.values():
            parts += _method(method)
        pages[f"methods/{_page_name(name)}"] = "\n\n".join(parts)
    return pages


def _page_name(category: str) -> str:
    """The file of a category's page: exchange/codec -> exchange-codec.md."""
    return f"{category.replace('/', '-')}.md"


def _method(method: Method) -> Iterator[str]:
    yield f"## {method.name}"
    yield f"```\n{method.doc}\n```"
    rows = [
        (f"`{p.name}`", f"`{p.annotation}`", f"`{p.default}`" if p.default is not None else "required")
        for p in method.parameters
    ]
    if rows:
        yield _table(("parameter", "type", "default"), rows)


def record_kinds() -> str:
    """The lines of records.jsonl."""
    source = inspect.getsource(records)
    lines = source.splitlines()
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    parts = ["# Records", inspect.getdoc(records) or ""]
    for kind, cls in records.KINDS.items():
        node = classes[cls.__name__]
        parts += [f"## {kind}", *([ast.get_docstring(node) or ""] if ast.get_docstring(node) else [])]
        rows = []
        for item in node.body:
            if isinstance(item, ast.AnnAssign) and not ast.unparse(item.annotation).startswith("ClassVar"):
                comment = lines[item.lineno - 1].partition("  # ")[2]
                rows.append((f"`{ast.unparse(item.target)}`", f"`{ast.unparse(item.annotation)}`", comment))
        parts.append(_table(("field", "type", "meaning"), rows))
    return "\n\n".join(parts)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(
        "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in row) + " |" for row in lines
    )


def stale(folder: Path = REFERENCE) -> list[str]:
    """Names of pages in `folder` that differ from what the code gives, are missing, or whose category is gone."""
    wanted = pages()
    there = {path.relative_to(folder).as_posix() for path in (folder / "methods").glob("*.md")}
    differs = [name for name, text in wanted.items() if not _is(folder / name, text)]
    return sorted([*differs, *(there - set(wanted))])


def _is(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text("utf-8") == text


def write(folder: Path = REFERENCE) -> list[Path]:
    """Write every page into `folder` and remove those of categories that are gone; their paths."""
    wanted = pages()
    (folder / "methods").mkdir(parents=True, exist_ok=True)
    for path in (folder / "methods").glob("*.md"):
        if path.relative_to(folder).as_posix() not in wanted:
            path.unlink()
    for name, text in wanted.items():
        (folder / name).write_text(text, "utf-8")
    return [folder / name for name in wanted]


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(f"stale, run make docs: {', '.join(stale())}" if stale() else 0)
    for path in write(Path(sys.argv[1]) if len(sys.argv) > 1 else REFERENCE):
        sys.stdout.write(f"{path}\n")
