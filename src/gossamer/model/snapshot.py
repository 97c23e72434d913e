"""Snapshot of what a forward may change besides its output: Python state, tensors, generators.

It is taken before the forward and restored after it. The state is found from a module by what that holds: attributes of
its submodules, contents of their lists, dicts and objects, tensors (parameters, buffers, and others), generators of its
own. It is also found by what the code of its classes names: globals, variables of enclosing functions, attributes of
classes. Installed libraries are not read, except objects of the package that a submodule is of.
Not found: memory behind extension types, files, Python generators (`yield`) that a module goes on drawing from.
"""

from __future__ import annotations

import array
import collections
import contextvars
import copy
import ctypes
import functools
import io
import itertools
import operator
import pickle
import queue
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import BuiltinMethodType, CodeType, FunctionType, GeneratorType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gossamer.model.split.absent_tensor import AbsentTensor
from gossamer.model.split.trace_backends import written
from gossamer.model.unit_seeds import Keyed
from gossamer.spec.errors import bad_input

_OWN = sys.stdlib_module_names | {"torch", "numpy", "gossamer", "builtins"}
_INSTALLED = ("site-packages", "dist-packages")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, range, slice)
_ITERATORS = (itertools.count, itertools.cycle, itertools.chain, itertools.islice, itertools.repeat)
_OF_CONTAINERS: tuple[type, ...] = (*map(type, (iter([]), iter(()), iter(range(0)), iter(""))), enumerate, zip)
_SINGLE: tuple[type, ...] = (type(threading.Lock()), type(threading.RLock()), io.IOBase, ModuleType)
_READ = (collections.UserDict, collections.UserList, collections.ChainMap, queue.Queue)  # read like user code
_WRITTEN_DOWN = frozenset(("decimal", "hashlib", "_hashlib"))
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")  # of a tensor

PutBack = Callable[[], None]
Root = tuple[int, str]  # a module, and its attribute
GONE: Any = type("Gone", (), {"__repr__": lambda _: "nothing"})()


@dataclass(frozen=True, slots=True)
class Difference:
    """A change of Python state: an attribute, element or generator differs.

    `root`: the module attribute that holds it, if any.
    """

    name: str
    root: Root | None
    before: Any
    now: Any  # the present value; the same object as `before` if its inner state changed
    holder: Any = None  # the object that holds it; None: the module itself, a class, a global or a closure


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the default generators of torch, numpy and `random` on exit."""
    torchs, pythons, numpys = torch.get_rng_state(), random.getstate(), np.random.get_state()
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    try:
        yield
    finally:
        torch.set_rng_state(torchs)
        random.setstate(pythons)
        np.random.set_state(numpys)
        if gpus:
            torch.cuda.set_rng_state_all(gpus)


@contextmanager
def context_kept() -> Iterator[None]:
    """Restore context variables on exit, also those that had no value, which Python cannot unset."""
    inner = ctypes.py_object(contextvars.copy_context())
    ctypes.pythonapi.PyContext_Enter(inner)
    try:
        yield
    finally:
        ctypes.pythonapi.PyContext_Exit(inner)


@dataclass
class Snapshot:
    """A record of Python state, to compare or restore. The caller decides what to do with the `tensors` found."""

    tensors: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)  # of these
    caches: list[Any] = field(default_factory=list)  # functions with a cache (lru_cache)
    is_compiled: bool = False  # whether some of the code found is compiled
    _put_back: list[PutBack] = field(default_factory=list)
    _seen: dict[int, Any] = field(default_factory=dict)  # by id; held, so that no id is given twice
    _copied: dict[int, Any] = field(default_factory=dict)  # iterators
    _packages: frozenset[str] = frozenset()
    _compare: list[Callable[[], Iterator[Difference]]] = field(default_factory=list)
    _names: dict[int, tuple[str, Root | None]] = field(default_factory=dict)  # path and attribute of each object found
    _at: tuple[str, Root | None] = ("", None)  # path and module attribute of the present object

    @staticmethod
    def of(module: nn.Module, *, without: Sequence[Tensor] = ()) -> Snapshot:
        """Take a snapshot of all that is found from `module` except the tensors `without`, and of the default
        generators.
        """
        packages = frozenset(_package(type(m)) for m in module.modules()) - _OWN
        found = Snapshot(_packages=packages, _seen={id(x): x for x in without})
        found._generators()
        found._find([module])
        return found

    @staticmethod
    def of_python(module: nn.Module, path: str, given: Any = ()) -> Snapshot:
        """Take a snapshot of Python state, for `differences`, found from `module` and from the arguments `given`.

        `path`: the path of `module`. Nothing is done with tensors.
        """
        packages = frozenset(_package(type(m)) for m in module.modules()) - _OWN
        found = Snapshot(_packages=packages)
        found._seen = {id(x): x for m in module.modules() for x in (*m._parameters.values(), *m._buffers.values())}
        found._name_leaves(given)
        for name, inner in module.named_modules(prefix=path):
            found._names[id(inner)] = found._names[id(vars(inner))] = name, (id(inner), "")
        found._find([module, given])
        return found

    def differences(self) -> Iterator[Difference]:
        """Yield the differences to the present. An iterator that does not show its state counts as advanced."""
        for one in self._compare:
            yield from one()

    def _name_leaves(self, given: Any) -> None:
        for i, x in enumerate(tree_leaves(given)):
            self._names[id(x)] = f"its argument {i} (a {type(x).__name__})", None
        held = [*given[0], *given[1].values()] if given else []
        for i, x in enumerate(held):
            self._names.setdefault(id(x), (f"its argument {i}", None))

    def _find(self, roots: Sequence[Any]) -> None:
        waiting: list[Any] = [*roots]
        while waiting:
            held = waiting.pop()
            if not isinstance(held, _PLAIN) and id(held) not in self._seen:
                self._seen[id(held)] = held
                self._at = self._names.get(id(held), ("", None))
                for x in self._keep(held):
                    self._names.setdefault(id(x), self._at)
                    waiting.append(x)

    def uncopied(self) -> list[Any]:
        """Return the objects found that cannot be copied: locks, files and the like."""
        return [held for held in self._seen.values() if isinstance(held, _SINGLE)]

    def found(self) -> list[Any]:
        """Return all objects that were found."""
        return [*self._seen.values()]

    def names(self) -> frozenset[str]:
        """Return the names in the user's code that was found: globals, attributes."""
        own = (held.__code__ for held in self._seen.values() if isinstance(held, FunctionType) and self.is_own(held))
        return frozenset(name for code in own for name in _names(code))

    def is_own(self, held: Any) -> bool:
        """Return whether a function or class is the user's code, and not a library's."""
        name = getattr(held, "__module__", None) or ""
        return self._is_code(sys.modules.get(name), name)

    def name_of(self, held: Any) -> str:
        """Return the name under which an object was found."""
        return self._names.get(id(held), ("a tensor", None))[0]

    def put_back(self) -> None:
        """Restore the state: the same objects in the same places."""
        for one in self._put_back:
            one()

    def _generators(self) -> None:
        torchs, pythons, numpys = torch.get_rng_state(), random.getstate(), np.random.get_state()
        self._put_back += [lambda: random.setstate(pythons), lambda: np.random.set_state(numpys)]
        self._put_back.append(lambda: torch.set_rng_state(torchs))
        if torch.cuda.is_available():
            states = torch.cuda.get_rng_state_all()
            self._put_back.append(lambda: torch.cuda.set_rng_state_all(states))

    def _keep(self, held: Any) -> Iterator[Any]:
        """Note how to restore `held`, and yield the objects that it refers to."""
        if (compiled := getattr(held, "_torchdynamo_orig_callable", None)) is not None or isinstance(
            held, OptimizedModule
        ):
            self.is_compiled = True
            yield compiled
        if isinstance(held, Keyed):
            yield held.real
        elif isinstance(held, Tensor):
            yield from self._tensor(held)
        elif isinstance(held, nn.Module):
            self._names.setdefault(id(vars(held)), (self._at[0], (id(held), "")))
            yield vars(held)
            yield type(held)
        elif isinstance(held, dict):
            yield from self._dict(held)
        elif isinstance(held, list | collections.deque):
            yield from self._list(held)
        elif isinstance(held, set):
            yield from self._set(held)
        elif isinstance(held, weakref.WeakKeyDictionary | weakref.WeakValueDictionary):
            yield from self._weak(held)
        elif isinstance(held, contextvars.ContextVar):
            yield from self._variable(held)
        elif isinstance(held, threading.local):
            yield held.__dict__
        elif isinstance(held, io.StringIO | io.BytesIO):
            self._text(held)
        elif isinstance(held, bytearray | array.array):
            self._bytes(held)
        elif isinstance(held, tuple | frozenset):
            yield from held
        elif isinstance(held, np.ndarray):
            self._array(held)
        elif isinstance(held, FunctionType):
            yield from self._function(held)
        elif isinstance(held, MethodType):
            yield from (held.__self__, held.__func__)
        elif isinstance(held, functools.partial):
            yield from (held.func, held.args, held.keywords)
        elif isinstance(held, BuiltinMethodType) and not isinstance(held.__self__, ModuleType):
            yield held.__self__
        elif isinstance(held, (*_ITERATORS, *_OF_CONTAINERS)) or _is_strange(held):
            self._value(held) if not _is_strange(held) else self._went_on(held)
        elif isinstance(held, GeneratorType):
            at = held.gi_frame.f_lasti if held.gi_frame else None
            self._differs(held, lambda: (held.gi_frame.f_lasti if held.gi_frame else None) != at or at is not None)
        elif isinstance(held, functools._lru_cache_wrapper):
            self.caches.append(held)
            yield held.__wrapped__
        elif isinstance(held, staticmethod | classmethod):
            yield held.__func__
        elif isinstance(held, property):
            yield from (held.fget, held.fset)
        elif isinstance(held, type):
            yield from self._class(held)
        elif not self._generator(held) and self._is_read(type(held)):
            yield type(held)
        elif isinstance(held, io.IOBase) or _package(type(held)) in _WRITTEN_DOWN:
            self._opaque(held)
        if not isinstance(held, type | nn.Module | FunctionType) and self._is_read(type(held)):
            yield from self._object(held)

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
            if held.shape != alias.shape or _address(held) != _address(alias):
                held.data = alias

        self._put_back.append(put_back)
        if grad is not None:
            self.gradients.append(grad)
        if own := {n: x for n, x in getattr(held, "__dict__", {}).items() if not n.startswith("_")}:
            yield from own.values()

    def _dict(self, held: dict[Any, Any]) -> Iterator[Any]:
        items = [(key, self._value(value)) for key, value in held.items()]
        name, root = self._at
        is_attributes = root is not None and not root[1]
        holder = None if is_attributes else held
        for key, value in held.items():
            mine = root if not is_attributes else (root[0], str(key)) if root else None
            self._names.setdefault(id(value), (f"{name}.{key}" if name else str(key), mine))

        def put_back() -> None:
            if len(held) != len(items) or not all(
                a is c and b is d for (a, b), (c, d) in zip(held.items(), items, strict=True)
            ):
                kind = collections.OrderedDict if isinstance(held, collections.OrderedDict) else dict
                kind.clear(held)
                kind.update(held, items)

        def compare() -> Iterator[Difference]:
            was = dict(items)
            for key in [*held, *(key for key in was if key not in held)]:
                before, now = was.get(key, GONE), held.get(key, GONE)
                if not _is_same(before, now):
                    mine = (root[0], str(key)) if is_attributes and root else root
                    yield Difference(f"{name}.{key}" if name else str(key), mine, before, now, holder)

        self._put_back.append(put_back)
        self._compare.append(compare)
        yield from (value for _, value in items)

    def _list(self, held: Any) -> Iterator[Any]:
        items = [self._value(value) for value in held]

        def put_back() -> None:
            if len(held) != len(items) or not all(a is b for a, b in zip(held, items, strict=True)):
                kind = list if isinstance(held, list) else collections.deque
                kind.clear(held)
                kind.extend(held, items)

        name, root = self._at

        def compare() -> Iterator[Difference]:
            for before, now in itertools.zip_longest(items, held, fillvalue=GONE):
                if not _is_same(before, now):
                    yield Difference(f"{name} (a {type(held).__name__})", root, before, now, held)

        self._put_back.append(put_back)
        self._compare.append(compare)
        yield from items

    def _set(self, held: set[Any]) -> Iterator[Any]:
        items = set(held)

        def put_back() -> None:
            if held != items:
                held.clear()
                held.update(items)

        self._differs(held, lambda: len(held) != len(items) or held != items)
        self._put_back.append(put_back)
        yield from items

    def _weak(self, held: Any) -> Iterator[Any]:
        """Note how to restore a weak dictionary, and yield its values."""
        items = [*held.items()]

        def put_back() -> None:
            if not _are_same(items, [*held.items()]):
                held.clear()
                held.update(items)

        self._differs(held, lambda: not _are_same(items, [*held.items()]))
        self._put_back.append(put_back)
        yield from (value for _, value in items)

    def _variable(self, held: contextvars.ContextVar[Any]) -> Iterator[Any]:
        was = held.get(GONE)

        def put_back() -> None:
            if (now := held.get(GONE)) is was:
                return
            if was is GONE and now is not GONE:  # Python cannot make it unset again
                raise bad_input(
                    wanted=f"the context variable {held.name} to have a value before the forward, which sets it",
                    got="none",
                    do="give it a default, or set it in the constructor",
                    key="model",
                )
            held.set(was)

        self._at = f"the context variable {held.name}", None
        self._changes("", was, lambda: held.get(GONE))
        self._put_back.append(put_back)
        if was is not GONE:
            self._names.setdefault(id(was), self._at)
            yield was

    def _text(self, held: Any) -> None:
        """Note how to restore a file in memory."""
        if held.closed:
            return
        file: Any = held
        state = file.__getstate__()

        def is_other() -> bool:
            return held.closed or bool(file.__getstate__() != state)

        def put_back() -> None:
            if is_other() and not held.closed:
                held.__setstate__(state)

        self._differs(held, is_other)
        self._put_back.append(put_back)

    def _bytes(self, held: Any) -> None:
        was = held[:]

        def put_back() -> None:
            if held != was:
                held[:] = was

        self._differs(held, lambda: bool(held != was))
        self._put_back.append(put_back)

    def _opaque(self, held: Any) -> None:
        """Compare an object of a standard library's type by its file position, digest or pickled form, if any."""
        said = _written_down(held)
        if said is not None:
            self._differs(held, lambda: _written_down(held) != said)

    def _array(self, held: np.ndarray[Any, Any]) -> None:
        was = held.copy()

        def put_back() -> None:
            if held.flags.writeable and held.shape == was.shape:
                held[...] = was

        self._differs(held, lambda: held.shape != was.shape or held.tobytes() != was.tobytes())
        self._put_back.append(put_back)

    def _differs(self, held: Any, is_other: Callable[[], bool]) -> None:
        name, root = self._at

        def compare() -> Iterator[Difference]:
            if is_other():
                yield Difference(f"{name} (a {type(held).__name__})", root, held, held, held)

        self._compare.append(compare)

    def _generator(self, held: Any) -> bool:
        """Note a generator of random numbers; return whether `held` is one."""
        if isinstance(held, torch.Generator):
            state = held.get_state()
            self._put_back.append(lambda: _set_torch(held, state))
            self._differs(held, lambda: held.get_state().tolist() != state.tolist())
        elif isinstance(held, np.random.Generator):
            return self._generator(held.bit_generator)
        elif isinstance(held, np.random.BitGenerator):
            bits = copy.deepcopy(held.state)
            self._put_back.append(lambda: setattr(held, "state", bits))
            self._differs(held, lambda: repr(held.state) != repr(bits))
        elif isinstance(held, np.random.RandomState):
            numpys = held.get_state()
            self._put_back.append(lambda: held.set_state(numpys))
            self._differs(held, lambda: repr(held.get_state()) != repr(numpys))
        elif isinstance(held, random.Random) and not isinstance(held, random.SystemRandom):
            pythons = held.getstate()
            self._put_back.append(lambda: held.setstate(pythons))
            self._differs(held, lambda: held.getstate() != pythons)
        else:
            return False
        return True

    def _object(self, held: Any) -> Iterator[Any]:
        """Yield the attributes of an object."""
        if isinstance(own := getattr(held, "__dict__", None), dict) and not isinstance(held, Tensor):
            yield own
        slots = [n for kind in type(held).__mro__ for n in _listed(vars(kind).get("__slots__", ())) if n != "__dict__"]
        names = [n for n in slots if n != "__weakref__" and hasattr(held, n)]
        for name in names:
            yield from self._attribute(held, name)

    def _attribute(self, owner: Any, name: str) -> Iterator[Any]:
        was = self._value(getattr(owner, name))

        def put_back() -> None:
            if getattr(owner, name, None) is not was:
                object.__setattr__(owner, name, was)

        self._put_back.append(put_back)
        self._changes(name, was, lambda: getattr(owner, name, GONE), owner)
        yield was

    def _changes(self, name: str, was: Any, now: Callable[[], Any], holder: Any = None) -> None:
        owner, root = self._at

        def compare() -> Iterator[Difference]:
            if not _is_same(was, found := now()):
                yield Difference(f"{owner}.{name}" if owner else name, root, was, found, holder)

        self._compare.append(compare)

    def _class(self, held: type) -> Iterator[Any]:
        for kind in held.__mro__:
            if not self._is_code(sys.modules.get(kind.__module__), kind.__module__):
                continue
            was = {n: self._value(x) for n, x in vars(kind).items() if not n.startswith("__")}
            self._put_back.append(functools.partial(_restore_class, kind, was))
            self._at = f"the class {kind.__qualname__}", None
            for name, value in was.items():
                self._changes(name, value, functools.partial(vars(kind).get, name, GONE))
            yield from was.values()
            yield from (x for n, x in vars(kind).items() if n.startswith("__") and isinstance(x, FunctionType))

    def _function(self, held: FunctionType) -> Iterator[Any]:
        if not self._is_code(sys.modules.get(held.__module__ or ""), held.__module__ or ""):
            return
        yield from (held.__defaults__, held.__kwdefaults__, held.__dict__)
        for cell in held.__closure__ or ():
            try:
                was = self._value(cell.cell_contents)
            except ValueError:  # not filled yet
                continue
            self._put_back.append(functools.partial(setattr, cell, "cell_contents", was))
            self._at = f"a variable around {held.__qualname__}", None
            self._names.setdefault(id(was), self._at)
            self._changes("", was, functools.partial(getattr, cell, "cell_contents", GONE))
            yield was
        names, space = frozenset(_names(held.__code__)), held.__globals__
        yield from self._named(names, space)
        for module in [space[name] for name in names & space.keys() if isinstance(space[name], ModuleType)]:
            if self._is_code(module, module.__name__):
                yield from self._named(names, vars(module))

    def _named(self, names: frozenset[str], space: dict[str, Any]) -> Iterator[Any]:
        """Yield the globals that code may change."""
        missing = object()
        for name in sorted(names):
            if isinstance(value := space.get(name, missing), ModuleType):
                continue
            was = self._value(value)
            self._put_back.append(functools.partial(_restore_global, space, name, was, missing))
            self._at = "the global", None
            self._changes(name, GONE if was is missing else was, functools.partial(space.get, name, GONE))
            self._names.setdefault(id(was), (f"the global {name}", None))
            if was is not missing:
                yield was

    def _value(self, value: Any) -> Any:
        """Return the value to restore: itself, or a copy of an iterator, which only advances."""
        if not isinstance(value, (*_ITERATORS, *_OF_CONTAINERS)):
            return value
        if id(value) not in self._copied:
            self._seen[id(value)] = value
            self._copied[id(value)] = _twin(value)
            self._went_on(value)
        return self._copied[id(value)]

    def _went_on(self, value: Any) -> None:
        """Compare an iterator by whether it has advanced."""
        outer, self._at = self._at, self._names.get(id(value), self._at)
        if isinstance(value, itertools.count):
            said = repr(value)
            self._differs(value, lambda: repr(value) != said)
        else:
            left = operator.length_hint(value, -1)
            self._differs(value, lambda: left < 0 or operator.length_hint(value, -1) != left)
        self._at = outer

    def _is_read(self, kind: type) -> bool:
        """Return whether attributes of objects of a class are read."""
        package = _package(kind)
        if kind is SimpleNamespace or issubclass(kind, _READ) or package in self._packages:
            return True
        return self._is_code(sys.modules.get(kind.__module__), kind.__module__)

    def _is_code(self, module: ModuleType | None, name: str) -> bool:
        """Return whether a module is the user's code, and not a library's."""
        if name.partition(".")[0] in _OWN:
            return False
        file = getattr(module, "__file__", None) or ""
        return not any(part in file for part in _INSTALLED)


@dataclass
class Copies:
    """The copies of tensors, made at once (`make`) or each right before its memory is first written (`watching`)."""

    tensors: Sequence[Tensor]
    _copies: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def make(self) -> None:
        """Copy all of the tensors now."""
        for tensor in self.tensors:
            self._copy(tensor)

    def _copy(self, tensor: Tensor) -> None:
        try:
            alias = tensor.detach()
            self._copies.setdefault(id(tensor), (alias, alias.clone()))
        except (RuntimeError, NotImplementedError):  # a kind of tensor without memory of its own
            return

    def of(self, tensor: Tensor) -> Tensor | None:
        """Return the copy of a tensor; None if there is none."""
        found = self._copies.get(id(tensor))
        return None if found is None else found[1]

    def differ(self) -> bool:
        """Return whether a tensor has other values than its copy."""
        copied = ((x, self._copies[id(x)][1]) for x in self.tensors if id(x) in self._copies)
        return any(x.shape != was.shape or not torch.equal(x, was) for x, was in copied)

    def watching(self) -> TorchDispatchMode:
        """Return a mode that copies a tensor right before an operator writes to it."""
        return _BeforeWrites(self.tensors, self._copy)

    def put_back(self) -> None:
        """Restore the values of the tensors that differ from their copies."""
        with torch.no_grad():
            for alias, was in self._copies.values():
                if not torch.equal(alias, was):
                    alias.data.copy_(was)
        self._copies.clear()


class _BeforeWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True

    def __init__(self, tensors: Sequence[Tensor], copy_of: Callable[[Tensor], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._copy = copy_of
        self._known: dict[int, list[Tensor]] = {}  # memory -> tensors in it
        for tensor in tensors:
            self._known.setdefault(_memory(tensor), []).append(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for key in {_memory(x) for x in _changed(func, args, kwargs or {})} & self._known.keys():
            for tensor in self._known.pop(key):
                self._copy(tensor)
        return func(*args, **(kwargs or {}))


def _changed(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Return the tensors that an operator may write to.

    For custom operators and batch norms these are all arguments, as their schema need not name them.
    """
    if not hasattr(func, "_schema") or func.namespace != "aten" or "batch_norm" in func.name():
        return (x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
    return written(func, args, kwargs) if func._schema.is_mutable else iter(())


def _twin(iterator: Any) -> Any:
    """Return an iterator that will yield what this one will. A plain copy would share an inner iterator."""
    if not isinstance(iterator, (*_ITERATORS, enumerate, zip)):
        return copy.copy(iterator)
    reduced: Any = iterator.__reduce__()
    kind, given, *state = reduced
    made = kind(*map(_inner_twin, given))
    for one in state:
        made.__setstate__(tuple(map(_inner_twin, one)) if isinstance(one, tuple) else one)
    return made


def _inner_twin(held: Any) -> Any:
    if isinstance(held, (*_ITERATORS, *_OF_CONTAINERS)):
        return _twin(held)
    return copy.copy(held) if isinstance(held, list) else held


def _is_strange(held: Any) -> bool:
    """Return whether `held` is an iterator of an unknown kind."""
    kind = type(held)
    known = (*_ITERATORS, *_OF_CONTAINERS, GeneratorType)
    return hasattr(kind, "__next__") and kind.__module__ in ("builtins", "itertools") and not isinstance(held, known)


def _are_same(before: Sequence[tuple[Any, Any]], now: Sequence[tuple[Any, Any]]) -> bool:
    """Return whether two dictionaries hold the same."""
    pairs = zip(before, now, strict=False)
    return len(before) == len(now) and all(a is c and _is_same(b, d) for (a, b), (c, d) in pairs)


def _written_down(held: Any) -> Any:
    """Return a value that shows the state of an object; None if there is none."""
    if isinstance(held, io.IOBase):
        try:
            return held.tell()
        except (OSError, ValueError):
            return None
    if callable(digest := getattr(held, "hexdigest", None)):
        return digest()
    try:
        return pickle.dumps(held)
    except Exception:  # of whatever kind: its state cannot be compared
        return None


def _is_same(before: Any, now: Any) -> bool:
    """Return whether two values are the same: one object, or equal plain values. Iterators are compared elsewhere."""
    if before is now or (isinstance(before, (*_ITERATORS, *_OF_CONTAINERS)) and type(before) is type(now)):
        return True
    return isinstance(before, _PLAIN) and type(before) is type(now) and (before == now or before != before)


def _restore_class(kind: type, was: Mapping[str, Any]) -> None:
    for name in [n for n in vars(kind) if not n.startswith("__") and n not in was]:
        delattr(kind, name)
    for name, value in was.items():
        if vars(kind).get(name) is not value:
            setattr(kind, name, value)


def _restore_global(space: dict[str, Any], name: str, was: Any, missing: object) -> None:
    if was is missing:
        space.pop(name, None)
    elif space.get(name) is not was:
        space[name] = was


def _set_torch(generator: torch.Generator, state: Tensor) -> None:
    generator.set_state(state)


def _memory(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return 0


def _address(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _listed(slots: Any) -> Sequence[str]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)
