"""The page of the public module: each name of `gossamer.__all__` with its signature, docstring and errors.

docs/generate.py writes the page, and a test compares it with the code. A public function whose docstring does not say
what it raises is an error here.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import gossamer
from gossamer.api import verbs
from gossamer.job.trained_run import TrainedRun
from gossamer.model.chat import Answer, Chat
from gossamer.spec.config import RunConfig
from gossamer.spec.plan import Plan
from gossamer.view.training_result import EvaluationCurve, TrainingResult

_WIDTH = 100

# The order of the page, with the guide of each
FUNCTIONS = {
    "train": "../howto/keep_the_best.md#callbacks-and-the-result-in-python",
    "resume": "../howto/resume_a_run.md",
    "wrap": "../howto/use_your_training_loop.md",
    "rank": "../howto/use_your_training_loop.md",
    "ranks": "../howto/use_your_training_loop.md",
    "plan": "../explanation/how_gossamer_decides.md",
    "load": "../howto/resume_a_run.md#on-another-machine",
    "sample": "../howto/chat_with_a_model.md",
    "chat": "../howto/chat_with_a_model.md#in-a-script",
    "evaluate": "../howto/evaluate.md",
    "evaluate_on_tasks": "../howto/evaluate.md",
    "export": "../howto/export_a_model.md",
}
RETURNED = (TrainingResult, EvaluationCurve, TrainedRun, Chat, Answer)
VALUES = ("RunConfig", "Plan", "__version__")

HEAD = """\
# Python API

For everybody who trains, resumes or reads a run from Python. Afterwards you know each public name of `gossamer`: its
signature, what it returns and what it raises. The blocks of plain text are the docstrings, as `help(gossamer.train)`
prints them. The programs in [examples/](../../examples/README.md) use most of these names.

Every import is lazy: `import gossamer` alone does not import torch. The error classes are in `gossamer.spec.errors`;
[exit codes and error classes](exit_codes.md#error-classes) has a table of them."""

READING = """\
## Reading a run

```python
from pathlib import Path
from gossamer.view.run_directory import RunDirectory, open_run
from gossamer.view.summary import summarize

run = open_run(Path("latest"))  # or a unique part of a name in runs/, or RunDirectory(Path("runs/..."))
for record in run.records():  # typed: Start, Step, Evaluation, ...
    ...
for record in run.follow():  # the same, then each new one as it comes, until the end
    ...
summarize(run)["tokens_per_s"]  # one dictionary: what --json prints
```

[Records](records.md) lists the kinds and fields."""


def page() -> str:
    """The page. Raises ValueError for a public name without a section, and for a function that says no error."""
    if missing := set(gossamer.__all__) ^ {*FUNCTIONS, *VALUES}:
        raise ValueError(f"docs/python_api.py and gossamer.__all__ differ in {sorted(missing)}")
    parts = [HEAD]
    for name, guide in FUNCTIONS.items():
        parts += _function(name, guide)
    parts += [
        "## gossamer.RunConfig",
        _text(RunConfig),
        "A pydantic model with the sections `model`, `data`, `train`, `machines`, `plan` and `run` as fields. "
        "[Configuration](config.md) has every key. `RunConfig.model_validate({...})` makes one of a dictionary, and "
        "raises pydantic's `ValidationError` (a `ValueError`) for a key or value that is none.",
        "## gossamer.Plan",
        _text(Plan),
        _fields(Plan),
        "## gossamer.\\_\\_version\\_\\_",
        "The version of the installed package, a string.",
        "## What they return",
    ]
    for cls in RETURNED:
        parts += _class(cls)
    return "\n\n".join([*parts, READING])


def _function(name: str, guide: str) -> Iterator[str]:
    function = _home(name)
    errors = raised(inspect.getdoc(function) or "")
    if not errors:
        raise ValueError(f"the docstring of gossamer.{name} does not say what it raises")
    yield f"## gossamer.{name}"
    yield f"```text\n{_signature(name, function)}\n```"
    yield _text(function)
    links = ", ".join(f"[`{one}`](exit_codes.md#error-classes)" for one in errors)
    yield f"Raises {links}. [How to use it]({guide})."


def raised(docstring: str) -> list[str]:
    """Return the error classes that a docstring names behind "Raises", without what it says of them."""
    said = " ".join(docstring.split()).partition("Raises ")[2]
    names = re.sub(r" \([^)]*\)", "", said)
    found = re.match(r"[A-Z]\w+(?:, [A-Z]\w+)*", names)
    return found[0].split(", ") if found else []


def _home(name: str) -> Callable[..., Any]:
    """Return the function behind a public name: `gossamer.plan` is also a package."""
    if name == "plan":
        return verbs.plan
    found: Callable[..., Any] = getattr(gossamer, name)
    return found


def _node(function: Callable[..., Any]) -> ast.FunctionDef:
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(node, ast.FunctionDef)
    return node


def _signature(name: str, function: Callable[..., Any]) -> str:
    """Return the signature as in the source, constants by their values: on one line, or an argument on each."""
    node = _node(function)
    arguments = list(_arguments(node.args, inspect.signature(function).parameters))
    returned = f" -> {_code(node.returns)}" if node.returns else ""
    line = f"{name}({', '.join(arguments)}){returned}"
    if len(line) <= _WIDTH:
        return line
    return f"{name}(\n" + "".join(f"    {one},\n" for one in arguments) + f"){returned}"


def _arguments(args: ast.arguments, real: Mapping[str, inspect.Parameter]) -> Iterator[str]:
    for each in args.args:
        if each.arg != "self":
            yield _argument(each, real[each.arg].default)
    if args.kwonlyargs:
        yield "*"
    for each in args.kwonlyargs:
        yield _argument(each, real[each.arg].default)


def _argument(each: ast.arg, default: Any) -> str:
    typed = f": {_code(each.annotation)}" if each.annotation else ""
    if default is inspect.Parameter.empty:
        return f"{each.arg}{typed}"
    return f"{each.arg}{typed} = {'...' if callable(default) else _quoted(repr(default))}"


def _code(node: ast.expr | None) -> str:
    return _quoted(ast.unparse(node)) if node else ""


def _quoted(text: str) -> str:
    return text.replace("'", '"')


def _text(of: Any) -> str:
    return f"```text\n{inspect.getdoc(of)}\n```"


def _class(cls: type[Any]) -> Iterator[str]:
    """Yield the section of a class: docstring, fields (but those of a Chat, which its methods use), methods."""
    yield f"### {cls.__name__}"
    yield f"`{cls.__module__}.{cls.__name__}`"
    yield _text(cls)
    if cls is not Chat:
        fields = _fields(cls)
        if fields:
            yield fields
    rows = []
    for name, member in vars(cls).items():
        function = member.fget if isinstance(member, property) else member
        if name.startswith("_") or not inspect.isfunction(function):
            continue
        node = _node(function)
        given = ", ".join(_arguments(node.args, inspect.signature(function).parameters))
        written = name if isinstance(member, property) else f"{name}({given})"
        rows.append((f"`.{written}`", f"`{_code(node.returns)}`", inspect.getdoc(function) or ""))
    if rows:
        yield _table(("member", "returns", "does"), rows)


def _fields(cls: type[Any]) -> str:
    """Return the annotated fields of a class as a table, with the comments of their lines; "" if it has none."""
    source = inspect.getsource(cls).splitlines()
    (node,) = ast.parse(textwrap.dedent("\n".join(source))).body
    assert isinstance(node, ast.ClassDef)
    rows = []
    for item in node.body:
        if not isinstance(item, ast.AnnAssign) or ast.unparse(item.target).startswith("_"):
            continue
        comments = [line.partition("  # ")[2] for line in source[item.lineno - 1 : item.end_lineno]]
        default = f"`{_code(item.value)}`" if item.value else "required"
        rows.append((f"`{_code(item.target)}`", f"`{_code(item.annotation)}`", default, " ".join(comments).strip()))
    return _table(("field", "type", "default", "meaning"), rows) if rows else ""


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(
        "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in row) + " |" for row in lines
    )
