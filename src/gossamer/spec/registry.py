"""Registries of methods: one method, one file, one public class, found by its file name. No list to edit."""

from __future__ import annotations

import importlib
import pkgutil
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints
from weakref import WeakKeyDictionary

from gossamer.spec import earlier_names
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.method_config import MethodConfig, Written
from gossamer.spec.short_form import ShortForm
from gossamer.spec.suggest import nearest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")
_HINTS: WeakKeyDictionary[type[Any], Mapping[str, Any]] = WeakKeyDictionary()
_VALIDATORS: WeakKeyDictionary[type[Any], dict[str, TypeAdapter[Any]]] = WeakKeyDictionary()
_WORDS = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")  # between the words of a class's name


def unknown_method(name: str, *, base: str, names: Iterable[str], key: str = "") -> BadInput:
    """Return the error for a method that none of `names` is, in a category whose class is called `base`."""
    known = tuple(names)
    now = earlier_names.method_now(name, known)
    do = f"it is {now!r} now" if now else nearest(name, known)
    return BadInput(f"no {_WORDS.sub(' ', base).lower()} is called {name!r}: {do}", key=key)


@dataclass(frozen=True, slots=True)
class Registry(Generic[T]):
    """The registry of the methods in one package. `package` is its `__name__`; every method is a subclass of `base`.

    A module whose name does not start with an underscore is a method, and holds one public class, the method's.
    `presets.toml` beside them defines presets, which are methods with fields set:
    `[nesterov]` / `base = {sgd = {momentum = 0.9, nesterov = true}}` / `paper = "..."`.
    """

    package: str
    base: type[T]

    def names(self) -> tuple[str, ...]:
        """Return the names of all methods and presets, sorted, without importing any of them."""
        return tuple(sorted({*self._modules(), *_presets(self._folder())}))

    def type(self, name: str, *, key: str = "") -> type[T]:
        """Return the class of method (or preset) `name`; raises BadInput with the nearest names."""
        preset = _presets(self._folder()).get(name)
        if preset is not None:
            return self.type(MethodConfig.parse(preset["base"]).name, key=key)
        if name not in self._modules():
            raise unknown_method(name, base=self.base.__name__, names=self.names(), key=key)
        module = importlib.import_module(f"{self.package}.{name}")
        own = [v for v in vars(module).values() if isinstance(v, type) and v.__module__ == module.__name__]
        (found,) = (one for one in own if not one.__name__.startswith("_"))
        assert issubclass(found, self.base), f"{found} is no {self.base.__name__}"
        return found

    def build(self, written: Written | MethodConfig, *, key: str = "") -> T:
        """Construct the method that `written` names; raises BadInput, with the known parameters, for a wrong one."""
        choice = self.read(written, key=key)
        return _construct(self.type(choice.name), choice.parameters, key=_below(key, choice.name))

    def read(self, written: Written | MethodConfig, *, key: str = "") -> MethodConfig:
        """Parse `written` into its full form: every parameter by its name, without short forms and presets.

        Raises BadInput for an unknown method name or parameter.
        """
        choice = MethodConfig.parse(written, key=key)
        preset = _presets(self._folder()).get(choice.name)
        base = MethodConfig(choice.name) if preset is None else MethodConfig.parse(preset["base"])
        cls = self.type(base.name if preset is not None else choice.name, key=key)
        given = _spelled_out(cls, choice.parameters, base.parameters, key=_below(key, base.name))
        return MethodConfig(base.name, {**base.parameters, **given})

    def _modules(self) -> tuple[str, ...]:
        return _methods(self._folder())

    def _folder(self) -> Path:
        where = sys.modules[self.package].__file__
        assert where is not None
        return Path(where).parent


def registry_of(base: type[Any]) -> Registry[Any] | None:
    """Return the registry whose base class is `base` (REGISTRY in the module of `base`); None where there is none."""
    found = getattr(sys.modules[base.__module__], "REGISTRY", None)
    return found if isinstance(found, Registry) and found.base is base else None


def _registry_in(hint: Any) -> Registry[Any] | None:
    """Return the registry of an annotation such as `Codec` or `Codec | None`; None where it names no method."""
    kinds = [h for h in (hint, *get_args(hint)) if isinstance(h, type) and h is not type(None)]
    return next((room for kind in kinds if (room := registry_of(kind))), None)


def _below(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _hints(cls: type[Any]) -> Mapping[str, Any]:
    """Return the annotations of a method's class, evaluated once."""
    if cls not in _HINTS:
        _HINTS[cls] = get_type_hints(cls)
    return _HINTS[cls]


def _inner(cls: type[Any]) -> Mapping[str, Registry[Any]]:
    """Return the parameters of a method that are methods themselves, each with its registry."""
    assert is_dataclass(cls), f"{cls} is no dataclass: a method's fields are its whole configuration"
    hints = _hints(cls)
    return {f.name: room for f in fields(cls) if f.init and (room := _registry_in(hints[f.name]))}


def _required(cls: type[Any]) -> list[str]:
    """Return the parameters of a method that have no default."""
    return [f.name for f in fields(cls) if f.init and f.default is MISSING and f.default_factory is MISSING]


def _spelled_out(
    cls: type[Any], parameters: Mapping[str, Any], preset: Mapping[str, Any], *, key: str
) -> Mapping[str, Any]:
    inner = _inner(cls)
    known = {f.name: f for f in fields(cls) if f.init}
    needed = [name for name in _required(cls) if name in inner]
    form = ShortForm(
        known=known,
        inner={name: room.names() for name, room in inner.items()},
        needed=[name for name in needed if name not in preset],
    )
    given = form.spelled_out(parameters)
    method = cls.__module__.rpartition(".")[2]
    if (unknown := form.unknown(given, method=method)) is not None:
        name, near = unknown
        raise BadInput(f"{method} has no parameter {name!r}: {near}", key=key)
    return given


def _construct(cls: type[T], parameters: Mapping[str, Any], *, key: str) -> T:
    inner = _inner(cls)
    values = {
        name: inner[name].build(value, key=f"{key}.{name}")
        if name in inner and value is not None
        else _coerce(value, cls, name, key=f"{key}.{name}")
        for name, value in parameters.items()
    }
    if missing := [name for name in _required(cls) if name not in parameters]:
        method, wanted = cls.__module__.rpartition(".")[2], ", ".join(f"{name}: ..." for name in missing)
        do = f"write {{{method}: {{{wanted}}}}}"
        raise BadInput(f"{method} needs {' and '.join(map(repr, missing))}: {do}", key=key)
    try:
        return cls(**values)
    except BadInput as error:
        raise BadInput(error.message, key=f"{key}.{error.key}" if error.key else key) from None
    except TypeError as error:
        raise BadInput(str(error), key=key) from None


def _coerce(value: Any, cls: type[Any], name: str, *, key: str) -> Any:
    """Return the value of parameter `name` of `cls` as its annotation has it."""
    from pydantic import ValidationError

    hint = _hints(cls)[name]
    if value is None and type(None) in get_args(hint):  # also where the other kind is a method
        return None
    try:
        return _validator(cls, name).validate_python(value)  # lax: YAML reads 1e-4 as a string
    except ValidationError:
        raise bad_input(wanted=_name(hint), got=repr(value), do="write one", key=key) from None


def _validator(cls: type[Any], name: str) -> TypeAdapter[Any]:
    """Return the validator of a parameter, made once for its class: `int | float` equals `float | int`."""
    from pydantic import TypeAdapter

    known = _VALIDATORS.setdefault(cls, {})
    if name not in known:
        known[name] = TypeAdapter(_hints(cls)[name])
    return known[name]


_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", type(None): "null"}


def _name(hint: Any) -> str:
    """Return the values that an annotation allows, as text: "a whole number", "one of all, island"."""
    if hint in _KINDS:
        return _KINDS[hint]
    arguments, origin = get_args(hint), get_origin(hint)
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin in (Union, UnionType):
        return " or ".join(map(_name, arguments))
    if origin in (list, tuple, Sequence):
        inside = dict.fromkeys(_name(one) for one in arguments if one is not Ellipsis)
        count = f"of {len(arguments)}, each " if origin is tuple and Ellipsis not in arguments else "of "
        return f"a list [...] {count}{' or '.join(inside)}"
    return hint.__name__ if isinstance(hint, type) else str(hint)


@cache
def _methods(folder: Path) -> tuple[str, ...]:
    """The names of the files of methods in it."""
    found = pkgutil.iter_modules([str(folder)])
    return tuple(m.name for m in found if not m.name.startswith("_") and not m.ispkg)


@cache
def _presets(folder: Path) -> dict[str, dict[str, Any]]:
    file = folder / "presets.toml"
    return tomllib.loads(file.read_text("utf-8")) if file.exists() else {}
