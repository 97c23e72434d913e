"""User code: which functions and classes are the user's own, and not a library's, and the names in their code."""

from __future__ import annotations

import collections
import queue
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any

from torch import nn

_OWN = sys.stdlib_module_names | {"torch", "numpy", "gossamer", "builtins"}
_INSTALLED = ("site-packages", "dist-packages")
_READ = (collections.UserDict, collections.UserList, collections.ChainMap, queue.Queue)  # read like user code


@dataclass(frozen=True)
class UserCode:
    """The rule by which code is user code. `packages`: installed ones whose objects are read as well."""

    packages: frozenset[str] = frozenset()

    @staticmethod
    def of(module: nn.Module) -> UserCode:
        """Return the rule for a model: the packages are those that its submodules are of."""
        return UserCode(frozenset(package_of(type(m)) for m in module.modules()) - _OWN)

    def is_own(self, held: Any) -> bool:
        """Return whether a function or class is the user's code, and not a library's."""
        name = getattr(held, "__module__", None) or ""
        return self.is_code(sys.modules.get(name), name)

    def is_read(self, kind: type) -> bool:
        """Return whether attributes of objects of a class are read."""
        package = package_of(kind)
        if kind is SimpleNamespace or issubclass(kind, _READ) or package in self.packages:
            return True
        return self.is_code(sys.modules.get(kind.__module__), kind.__module__)

    def is_code(self, module: ModuleType | None, name: str) -> bool:
        """Return whether a module is the user's code, and not a library's."""
        if name.partition(".")[0] in _OWN:
            return False
        file = getattr(module, "__file__", None) or ""
        return not any(part in file for part in _INSTALLED)


def package_of(kind: type) -> str:
    """Return the top-level package of a class."""
    return kind.__module__.partition(".")[0]


def names_in(code: CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes in a code object and in the functions that it defines."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from names_in(inner)
