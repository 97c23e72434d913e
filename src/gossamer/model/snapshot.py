"""Snapshot of what a forward may change besides its output: Python state, tensors, generators.

It is taken before the forward and restored after it. The state is found from a module by what that holds: attributes of
its submodules, contents of their lists, dicts and objects, tensors (parameters, buffers, and others), generators of its
own. It is also found by what the code of its classes names: globals, variables of enclosing functions, attributes of
classes. Installed libraries are not read, except objects of the package that a submodule is of.
Not found: memory behind extension types, files, Python generators (`yield`) that a module goes on drawing from.
"""

from __future__ import annotations

import functools
import io
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import FunctionType, GeneratorType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.utils._pytree import tree_leaves

from gossamer.model.python_state.code import CodeReader
from gossamer.model.python_state.containers import ContainerReader
from gossamer.model.python_state.iterators import is_iterator, is_unknown_iterator
from gossamer.model.python_state.random_generators import RandomGenerators
from gossamer.model.python_state.record import GONE, Difference, StateRecord, is_plain
from gossamer.model.python_state.user_code import UserCode, names_in
from gossamer.model.split.absent_tensor import AbsentTensor
from gossamer.model.unit_forward import UnitForward
from gossamer.model.unit_seeds import Keyed
from gossamer.process.garbage import uncollected

_SINGLE: tuple[type, ...] = (type(threading.Lock()), type(threading.RLock()), io.IOBase, ModuleType)
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")  # of a tensor


@dataclass
class Snapshot:
    """A record of Python state, to compare or restore. The caller decides what to do with the `tensors` found."""

    code: UserCode = field(default_factory=UserCode)
    record: StateRecord = field(default_factory=StateRecord)
    tensors: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)  # of these
    caches: list[Any] = field(default_factory=list)  # functions with a cache (lru_cache)
    is_compiled: bool = False  # whether some of the code found is compiled

    def __post_init__(self) -> None:
        self._containers, self._code = ContainerReader(self.record), CodeReader(self.record, self.code)
        self._generators = RandomGenerators(self.record)

    @staticmethod
    def of(module: nn.Module, *, without: Sequence[Tensor] = ()) -> Snapshot:
        """Take a snapshot of all that is found from `module` except the tensors `without`, and of the default
        generators.
        """
        found = Snapshot(UserCode.of(module), StateRecord(seen={id(x): x for x in without}))
        found._generators.note_defaults()
        found._find([module])
        return found

    @staticmethod
    def of_python(module: nn.Module, path: str, given: Any = ()) -> Snapshot:
        """Take a snapshot of Python state, for `differences`, found from `module` and from the arguments `given`.

        `path`: the path of `module`. Nothing is done with tensors.
        """
        found = Snapshot(UserCode.of(module))
        record = found.record
        record.seen = {id(x): x for m in module.modules() for x in (*m._parameters.values(), *m._buffers.values())}
        found._name_leaves(given)
        for name, inner in module.named_modules(prefix=path):
            record.paths[id(inner)] = record.paths[id(vars(inner))] = name, (id(inner), "")
            for own, x in inner._parameters.items():
                record.at = f"{name}.{own}" if name else own, (id(inner), own)
                found._find([*found._attributes_of(x)])
        found._find([module, given])
        return found

    @staticmethod
    def of_classes(module: nn.Module) -> Snapshot:
        """Take a snapshot of what the classes of `module` and its submodules lead to, and not their own state."""
        found = Snapshot(record=StateRecord(seen={id(m): m for m in module.modules()}))
        found._find([type(m) for m in module.modules()])
        return found

    def differences(self) -> Iterator[Difference]:
        """Yield the differences to the present. An iterator that does not show its state counts as advanced."""
        return self.record.differences()

    def _name_leaves(self, given: Any) -> None:
        for i, x in enumerate(tree_leaves(given)):
            self.record.paths[id(x)] = f"its argument {i} (a {type(x).__name__})", None
        held = [*given[0], *given[1].values()] if given else []
        for i, x in enumerate(held):
            self.record.name(x, (f"its argument {i}", None))

    def _find(self, roots: Sequence[Any]) -> None:
        with uncollected():  # a note for each object that is found
            self._follow(roots)

    def _follow(self, roots: Sequence[Any]) -> None:
        waiting: list[Any] = [*roots]
        while waiting:
            held = waiting.pop()
            if not is_plain(held) and id(held) not in self.record.seen:
                self.record.seen[id(held)] = held
                self.record.at = self.record.paths.get(id(held), ("", None))
                for x in self._keep(held):
                    self.record.name(x, self.record.at)
                    waiting.append(x)

    def uncopied(self) -> list[Any]:
        """Return the objects found that cannot be copied: locks, files and the like."""
        return [held for held in self.record.seen.values() if isinstance(held, _SINGLE)]

    def found(self) -> list[Any]:
        """Return all objects that were found."""
        return [*self.record.seen.values()]

    def names(self) -> frozenset[str]:
        """Return the names in the user's code that was found: globals, attributes."""
        own = (
            held.__code__ for held in self.record.seen.values() if isinstance(held, FunctionType) and self.is_own(held)
        )
        return frozenset(name for code in own for name in names_in(code))

    def is_own(self, held: Any) -> bool:
        """Return whether a function or class is the user's code, and not a library's."""
        return self.code.is_own(held)

    def name_of(self, held: Any) -> str:
        """Return the name under which an object was found."""
        return self.record.paths.get(id(held), ("a tensor", None))[0]

    def put_back(self) -> None:
        """Restore the state: the same objects in the same places."""
        self.record.put_back()

    def is_current(self) -> bool:
        """Return whether the present state is known to be this one; False where that cannot be told."""
        return self.record.is_current()

    def _keep(self, held: Any) -> Iterator[Any]:
        """Note how to restore `held`, and yield the objects that it refers to."""
        if (compiled := getattr(held, "_torchdynamo_orig_callable", None)) is not None or isinstance(
            held, OptimizedModule
        ):
            self.is_compiled = True
            yield compiled
        if isinstance(held, Keyed | UnitForward):
            yield held.real
        elif isinstance(held, Tensor):
            yield from self._tensor(held)
        elif isinstance(held, nn.Module):
            self.record.name(vars(held), (self.record.at[0], (id(held), "")))
            self._kind(held)
            yield vars(held)
            yield type(held)
        elif isinstance(held, functools._lru_cache_wrapper):
            self.caches.append(held)
            yield held.__wrapped__
        elif (content := self._content(held)) is not None:
            yield from content
        elif not self._generators.note(held) and self.code.is_read(type(held)):
            yield type(held)
        else:
            self._containers.read_opaque(held)
        if not isinstance(held, type | nn.Module | FunctionType) and self.code.is_read(type(held)):
            yield from self._object(held)

    def _content(self, held: Any) -> Iterator[Any] | None:
        """Return the objects that a container, an iterator or code leads to; None for any other object."""
        if (content := self._containers.read(held)) is not None:
            return content
        if is_unknown_iterator(held):
            self.record.note_advance(held)
        elif is_iterator(held):
            self.record.kept(held)
        elif isinstance(held, GeneratorType):
            at = held.gi_frame.f_lasti if held.gi_frame else None
            self.record.note_state(
                held, lambda: (held.gi_frame.f_lasti if held.gi_frame else None) != at or at is not None
            )
        else:
            return self._code.read(held)
        return iter(())

    def _tensor(self, held: Tensor) -> Iterator[Any]:
        if isinstance(held, AbsentTensor):  # it has no data
            return
        try:
            alias, grad, needs = held.detach(), held.grad if held.is_leaf else None, held.requires_grad
        except (RuntimeError, NotImplementedError, ValueError):  # without memory of its own, or not yet
            return
        self.tensors.append(held)
        hooks = {name: getattr(held, name, None) for name in _HOOKS}
        kept = {name: dict(one) if one else {} for name, one in hooks.items()}

        def is_other() -> bool:
            if held.requires_grad != needs or (held.is_leaf and held.grad is not grad):
                return True
            if any(dict(getattr(held, name, None) or {}) != was for name, was in kept.items()):
                return True
            return _layout(held) != _layout(alias)

        def put_back() -> None:
            if held.is_leaf and held.grad is not grad:
                held.grad = grad
            if held.is_leaf and held.requires_grad != needs:
                held.requires_grad_(needs)
            for name, was in kept.items():
                now = getattr(held, name, None)
                if now is not None and dict(now) != was:
                    now.clear()
                    now.update(was)
            if _layout(held) != _layout(alias):
                held.data = alias

        self.record.note_restore(put_back)
        self.record.note_other(is_other)
        if grad is not None:
            self.gradients.append(grad)
        yield from self._attributes_of(held)

    def _attributes_of(self, tensor: Tensor | None) -> Iterator[Any]:
        """Note how to restore the attributes that a user gave a tensor, and yield their values."""
        own = {name: self.record.kept(x) for name, x in _own(tensor).items()}

        def is_other() -> bool:
            now = _own(tensor)
            return now.keys() != own.keys() or any(now[name] is not own[name] for name in own)

        def put_back() -> None:
            if is_other():
                for name in _own(tensor):
                    delattr(tensor, name)
                vars(tensor).update(own)

        self.record.note_restore(put_back)
        self.record.note_state(tensor, is_other)
        yield from own.values()

    def _kind(self, held: Any) -> None:
        """Note how to restore the class of an object, and which dict has its attributes."""
        kind, own = type(held), getattr(held, "__dict__", None)

        def is_other() -> bool:
            return type(held) is not kind or getattr(held, "__dict__", None) is not own

        def put_back() -> None:
            if type(held) is not kind:
                object.__setattr__(held, "__class__", kind)
            if getattr(held, "__dict__", None) is not own:
                object.__setattr__(held, "__dict__", own)

        self.record.note_restore(put_back)
        self.record.note_state(held, is_other)

    def _object(self, held: Any) -> Iterator[Any]:
        """Yield the attributes of an object."""
        if not isinstance(held, Tensor):
            self._kind(held)
            if isinstance(own := getattr(held, "__dict__", None), dict):
                yield own
        slots = [n for kind in type(held).__mro__ for n in _slots(kind)]
        names = [n for n in slots if hasattr(held, n)]
        empty = [n for n in slots if n not in names]

        def filled() -> list[str]:
            return [n for n in empty if hasattr(held, n)]

        def put_back() -> None:
            for name in filled():
                object.__delattr__(held, name)

        if empty:
            self.record.note_state(held, lambda: bool(filled()))
            self.record.note_restore(put_back)
        for name in names:
            yield from self._attribute(held, name)

    def _attribute(self, owner: Any, name: str) -> Iterator[Any]:
        was = self.record.kept(getattr(owner, name))

        def put_back() -> None:
            if getattr(owner, name, None) is not was:
                object.__setattr__(owner, name, was)

        self.record.note_restore(put_back)
        self.record.note_value(name, was, lambda: getattr(owner, name, GONE), owner)
        yield was


def _address(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    try:
        strides = tensor.stride()
    except (RuntimeError, NotImplementedError):  # of a sparse one
        strides = ()
    return tensor.dtype, tensor.shape, strides, _address(tensor)


def _own(tensor: Tensor | None) -> dict[str, Any]:
    """Return the attributes that a user gave a tensor."""
    held = getattr(tensor, "__dict__", None) or {}
    return {name: x for name, x in held.items() if not name.startswith("_")}


def _slots(kind: type) -> Sequence[str]:
    """Return the names of the slots of a class as attributes: `__x` of a class C is `_C__x`."""
    found = vars(kind).get("__slots__", ())
    names = [n for n in ((found,) if isinstance(found, str) else tuple(found)) if n not in ("__dict__", "__weakref__")]
    inside = kind.__name__.lstrip("_")
    return [f"_{inside}{n}" if n.startswith("__") and not n.endswith("__") and inside else n for n in names]
