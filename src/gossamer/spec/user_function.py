"""Functions of the user that a configuration names as "package.module:function"."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.suggest import nearest

_NOT_THEIRS = ("importlib", "site-packages", "dist-packages", str(Path(__file__).parents[1]))


def function_named(name: str, *, key: str) -> Callable[..., Any]:
    """Import and return the function "package.module:function"; the module is looked for in the working directory too.

    Raises BadInput under the configuration key `key`, with the place in the user's code.
    """
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        before, _, last = name.rpartition(".")
        do = (
            f"write {before}:{last}"
            if before and last and not colon
            else "write the module, a colon and the name in it"
        )
        raise bad_input(wanted='"package.module:function"', got=repr(name), do=do, key=key)
    here = str(Path.cwd())
    if here not in sys.path:  # stays: the user's module may import its neighbors later, when it is called
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise complaint(f"to import {module_name} (looked for in {here} too)", error, key=key) from error
    found: Callable[..., Any] | None = vars(module).get(attribute)
    if not callable(found):
        callables = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise BadInput(f"{module_name} has no function {attribute!r}: {nearest(attribute, callables)}", key=key)
    return found


def check_arguments(function: Callable[..., Any], name: str, given: Mapping[str, Any], *, key: str) -> None:
    """Raise BadInput under `key`, the key of the arguments, unless the function can be called with them."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some builtins have none
        return
    try:
        signature.bind(**given)
    except TypeError as error:
        known = [n for n in signature.parameters if n not in given]
        unknown = [n for n in given if n not in signature.parameters]
        hint = nearest(unknown[0], known) if unknown else f"give it in {key}"
        raise bad_input(
            wanted=f"arguments of {name}{signature}", got=str(error).removeprefix("got "), do=hint, key=key
        ) from None


def complaint(wanted: str, error: Exception, *, key: str) -> BadInput:
    """Return a BadInput for an exception of the user's own code, with its place in that code."""
    where = ""
    if isinstance(error, SyntaxError):
        where = f" at {error.filename}:{error.lineno}"
    else:
        frames = traceback.extract_tb(error.__traceback__)
        theirs = [f for f in frames if not any(part in f.filename for part in _NOT_THEIRS)]
        if theirs:
            where = f" at {theirs[-1].filename}:{theirs[-1].lineno}"
    return bad_input(
        wanted=wanted, got=f"{type(error).__name__}: {error}{where}", do="correct the file, or the name", key=key
    )
