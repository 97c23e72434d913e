"""Tracing: one forward run under watch, to learn which unit's output reaches which unit through the model's own code.

Every storage carries the set of values it was computed from. Within a call of a unit nothing is followed: what it reads
is an edge, what it returns is a value. A tensor that was born inside a call and is read outside without having been
returned is a leak: followed where a hook or an attribute holds it (it can be put back there), else a hidden value.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves

from gossamer.model.cut.flow import HIDDEN, Call, Flow, Inside, Leaf, Made, Value, containers_of
from gossamer.spec.errors import bad_input

_LOOKS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
_REPEATABLE = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type(None))


def trace(module: nn.Module, run: Callable[[], Any], *, units: Sequence[str]) -> Flow:
    """Run `run`, which calls `module` once and returns all that its caller wants of it (a loss); say what it did.

    Parameters, buffers and generators are left as they were. Under gradients, as training does.
    """
    watch = _Watch(module, tuple(units))
    with _undone(module), torch.enable_grad(), ExitStack() as stack:
        watch.install(stack)
        with watch:
            result = run()
            ends = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        watch.finish(ends)
    return watch.flow()


@contextmanager
def _undone(module: nn.Module) -> Iterator[None]:
    """Buffers that a forward changes (running means), attributes that hold its graph, and the generators as before."""
    before = [(buffer, buffer.detach().clone()) for buffer in module.buffers() if not buffer.is_meta]
    attributes = [(vars(inner), dict(vars(inner))) for inner in module.modules()]
    with torch.random.fork_rng():
        yield
    with torch.no_grad():
        for buffer, was in before:
            if buffer.shape == was.shape and not torch.equal(buffer, was):
                buffer.copy_(was)
    for now, then in attributes:
        for name in [n for n, held in now.items() if isinstance(held, Tensor) and not held.is_leaf]:
            now.pop(name)
            now.update({name: then[name]} if name in then else {})


@dataclass
class _Seen:
    """A call while it is being watched."""

    unit: str
    turn: int
    arguments: list[Any]
    leaves: list[Leaf] = field(default_factory=list)
    spec: TreeSpec | None = None
    containers: list[Any] = field(default_factory=list)  # lists and dicts among the arguments
    before: list[Any] = field(default_factory=list)  # copies of them
    inner: list[tuple[str, int, str, Any]] = field(default_factory=list)  # module, turn, attribute, output
    insides: list[Inside] = field(default_factory=list)
    turns: dict[str, int] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)  # storages from elsewhere
    looked: bool = False


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The mode and the hooks of one traced forward."""

    def __init__(self, module: nn.Module, units: tuple[str, ...]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.module, self.units = module, units
        self.calls: list[_Seen] = []
        self.current: int | None = None
        self.taint: dict[int, frozenset[Value]] = {}
        self.born: dict[int, int] = {}  # storage -> call in which it was made
        self.where: dict[Value, int] = {}  # storage of each value
        self.changed: set[int] = set()  # storages written in place
        self.without_grad: list[tuple[str, Tensor]] = []  # what units gave while no graph was recorded
        self.alive: list[Any] = []  # keeps storages from being used again
        self.readers: dict[Value, set[int]] = {}
        self.branches: dict[Value, set[int]] = {}
        self.loose: dict[str, set[int]] = {}
        self.lent: dict[str, set[int]] = {}
        self.static = _static(module)
        self.owned = {name: _static(module.get_submodule(name)).keys() for name in units}
        self.paths = {id(m): path for path, m in module.named_modules()}
        self.within = {name: {id(m) for m in module.get_submodule(name).modules()} for name in units}

    def install(self, stack: ExitStack) -> None:
        for name in self.units:
            unit = self.module.get_submodule(name)
            begin = unit.register_forward_pre_hook(self._begin(name), with_kwargs=True, prepend=True)
            stack.callback(begin.remove)
            stack.callback(unit.register_forward_hook(self._end(name)).remove)
        stack.callback(register_module_forward_hook(self._inner).remove)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        ins = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        outs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.alive += ins + outs
        values = self._read(ins)
        written = [_key(x) for x in _written(func, args, kwargs)]
        self.changed.update(written)
        if func in _LOOKS:
            self._look(values)
        made = [k for x in outs if (k := _key(x)) not in self.static]
        if self.current is None:
            for key in made + [k for k in written if k not in self.static]:
                self.taint[key] = self.taint.get(key, frozenset()) | values
            return out
        for value in values:
            self.readers.setdefault(value, set()).add(self.current)
        before = {_key(x) for x in ins}
        self.born.update((k, self.current) for k in made if k not in before)
        self.calls[self.current].written.update(
            k for k in written if self.born.get(k) != self.current and k not in self.static
        )
        return out

    def _read(self, ins: list[Tensor]) -> frozenset[Value]:
        values: frozenset[Value] = frozenset()
        for tensor in ins:
            key = _key(tensor)
            values |= self.taint.get(key, frozenset())
            home = self.born.get(key)
            if home is not None and home != self.current:
                values |= {Value(home, HIDDEN)}
            if key in self.static and key not in self.taint:
                self._read_static(key)
        return values

    def _read_static(self, key: int) -> None:
        name = self.static[key]
        if self.current is None:
            self.loose.setdefault(name, set()).add(len(self.calls))
        elif key not in self.owned[self.calls[self.current].unit]:
            self.lent.setdefault(name, set()).add(self.current)

    def _look(self, values: frozenset[Value]) -> None:
        if self.current is not None:
            self.calls[self.current].looked = True
            return
        for value in values:
            self.branches.setdefault(value, set()).add(len(self.calls))

    def _begin(self, name: str) -> Callable[..., None]:
        def begin(_: nn.Module, args: Any, kwargs: Any) -> None:
            if self.current is not None:
                return
            self.current = len(self.calls)
            turn = sum(seen.unit == name for seen in self.calls)
            seen = _Seen(name, turn, tree_flatten((args, kwargs))[0], containers=containers_of((args, kwargs)))
            seen.before = [copy.copy(container) for container in seen.containers]
            self.calls.append(seen)

        return begin

    def _end(self, name: str) -> Callable[..., None]:
        def end(unit: nn.Module, args: Any, output: Any) -> None:
            if self.current is None or self.calls[self.current].unit != name:
                return
            number, seen = self.current, self.calls[self.current]
            self.current = None
            leaves, seen.spec = tree_flatten(output)
            seen.leaves = [self._leaf(seen, leaf, Value(number, i)) for i, leaf in enumerate(leaves)]
            kept = {self.where[v] for v in self.where if v.call == number}
            for key in seen.written - kept:
                self.taint[key] = self.taint.get(key, frozenset()) | {Value(number, HIDDEN)}
            self._keep_insides(number, seen, unit)
            seen.arguments = []

        return end

    def _leaf(self, seen: _Seen, leaf: Any, value: Value) -> Leaf:
        same = next((i for i, given in enumerate(seen.arguments) if given is leaf), None)
        if not isinstance(leaf, Tensor):
            if same is not None and leaf is not None:
                return Leaf(source=same)
            opaque = "" if type(leaf) in _REPEATABLE else type(leaf).__qualname__
            if seen.looked and type(leaf) in (int, float):
                opaque = f"{type(leaf).__name__} read from a tensor"
            return Leaf(constant=None if opaque else leaf, opaque=opaque)
        key = _key(leaf)
        if same is not None and key not in seen.written:
            return Leaf(source=same)
        self.alive.append(leaf)
        self._name(key, value)
        if not torch.is_grad_enabled():
            self.without_grad.append((seen.unit, leaf))
        return Leaf(made=Made(tuple(leaf.shape), leaf.dtype, leaf.device, leaf.requires_grad))

    def _name(self, key: int, value: Value) -> None:
        """From here on the storage is `value`; a view of older storage is that too."""
        older = frozenset() if self.born.pop(key, None) is not None else self.taint.get(key, frozenset())
        self.taint[key] = older | {value}
        self.changed.discard(key)  # what was written before it left its call is as good as made so
        self.where[value] = key

    def _inner(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.current is None:
            return
        seen = self.calls[self.current]
        hooked = module._forward_hooks  # only by a hook does what it gives get out, beside the unit's own output
        if hooked and id(module) in self.within[seen.unit] and self.paths[id(module)] != seen.unit:
            path = self.paths[id(module)]
            turn = seen.turns.get(path, 0)
            seen.turns[path] = turn + 1
            seen.inner.append((path, turn, "", output))

    def _keep_insides(self, number: int, seen: _Seen, unit: nn.Module) -> None:
        for inner in unit.modules():
            for name, held in vars(inner).items():
                if isinstance(held, Tensor) and self.born.get(_key(held)) == number:
                    seen.inner.append((self.paths[id(inner)], 0, name, held))
        for path, turn, attribute, output in seen.inner:
            self._keep_inside(number, seen, Inside(path, turn, attribute, (), (), tree_flatten(output)[1]), output)
        for i, (container, before) in enumerate(zip(seen.containers, seen.before, strict=True)):
            for key, held in _added(container, before):
                self._keep_inside(number, seen, Inside("", 0, "", (), (), tree_flatten(held)[1], i, key), held)
        seen.inner, seen.containers, seen.before = [], [], []

    def _keep_inside(self, number: int, seen: _Seen, inside: Inside, output: Any) -> None:
        start = len(seen.leaves) + sum(len(i.leaves) for i in seen.insides)
        leaves = tree_flatten(output)[0]
        found = [self._inner_leaf(seen, x, Value(number, start + i)) for i, x in enumerate(leaves)]
        kept, places = tuple(leaf for leaf, _ in found), tuple(at for _, at in found)
        seen.insides.append(replace(inside, leaves=kept, places=places))

    def _inner_leaf(self, seen: _Seen, leaf: Any, value: Value) -> tuple[Leaf, int]:
        """The leaf, and the place of the value that it is: a new one, or the one its memory has a name for."""
        if not isinstance(leaf, Tensor):
            return Leaf(constant=leaf if type(leaf) in _REPEATABLE else None), HIDDEN
        same = next((i for i, given in enumerate(seen.arguments) if given is leaf), None)
        if same is not None and _key(leaf) not in seen.written:
            return Leaf(source=same), HIDDEN
        key, made = _key(leaf), Made(tuple(leaf.shape), leaf.dtype, leaf.device, leaf.requires_grad)
        if self.born.get(key) == value.call:
            self._name(key, value)
            self.alive.append(leaf)
            return Leaf(made=made), value.place
        named = (v.place for v, at in self.where.items() if at == key and v.call == value.call)
        return Leaf(made=made), next(named, HIDDEN)

    def finish(self, ends: list[Tensor]) -> None:
        """What the caller got depends on these."""
        for unit, leaf in self.without_grad:
            if leaf.requires_grad:  # now, and not when the unit returned it: its graph is made a second time
                raise bad_input(
                    wanted=f"{unit} to record its graph when it runs",
                    got="a forward that runs it under reentrant checkpointing",
                    do="use checkpoint(..., use_reentrant=False)",
                    key="model",
                )
        for value in self._read(ends):
            self.readers.setdefault(value, set()).add(len(self.calls))

    def flow(self) -> Flow:
        calls = tuple(self._call(i, seen) for i, seen in enumerate(self.calls))
        return Flow(
            calls=calls,
            readers={value: frozenset(at) for value, at in self.readers.items()},
            branches={value: frozenset(at) for value, at in self.branches.items()},
            loose={name: frozenset(at) for name, at in self.loose.items()},
            lent={name: frozenset(at) for name, at in self.lent.items()},
            units=self.units,
        )

    def _call(self, number: int, seen: _Seen) -> Call:
        assert seen.spec is not None
        leaves = tuple(self._marked(leaf, Value(number, i)) for i, leaf in enumerate(seen.leaves))
        marked = tuple(
            replace(i, leaves=tuple(self._marked(a, Value(number, p)) for a, p in zip(i.leaves, i.places, strict=True)))
            for i in seen.insides
        )
        return Call(seen.unit, seen.turn, leaves, seen.spec, marked)

    def _marked(self, leaf: Leaf, value: Value) -> Leaf:
        if leaf.made is None or self.where.get(value) not in self.changed:
            return leaf
        return replace(leaf, made=replace(leaf.made, written=True))


def _added(container: Any, before: Any) -> list[tuple[Any, Any]]:
    """(key, held) of what a dict has now and had not; (None, held) of what was appended to a list."""
    if isinstance(container, dict):
        return [(key, held) for key, held in container.items() if key not in before or before[key] is not held]
    return [(None, held) for held in container[len(before) :]]


def _key(tensor: Tensor) -> int:
    """Names the memory a tensor lies in, for as long as something holds it."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # tensors without storage
        return -id(tensor)


def _static(module: nn.Module) -> dict[int, str]:
    """Storage -> canonical name of every parameter and buffer."""
    found: dict[int, str] = {}
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        found.setdefault(_key(tensor), name)
    return found


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[i] if i < len(args) else kwargs.get(argument.name)
            yield from (x for x in tree_leaves(given) if isinstance(x, Tensor))
