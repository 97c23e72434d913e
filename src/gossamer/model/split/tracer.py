"""Tracer of one forward: finds which unit's output reaches which unit through the model's own code.

Every storage carries the set of unit outputs it was computed from. Within a unit call nothing is followed: what it
reads is an edge, what it returns is a value. A tensor made within a call may be read outside without having been
returned. If a hook or an attribute holds it, it is a side output (placeholders can put it there); else a hidden value.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gossamer.model.flop import flop_of
from gossamer.model.python_state.record import Difference, Root
from gossamer.model.snapshot import Snapshot
from gossamer.model.split.buffer_trace import BufferAccess, BufferTrace
from gossamer.model.split.dataflow import (
    FIRST,
    HIDDEN,
    KEPT,
    CallOutput,
    DataFlow,
    LateWrite,
    OutputLeaf,
    Produced,
    SideOutput,
    UnitCall,
    containers_of,
)
from gossamer.model.split.object_paths import ways_to
from gossamer.model.split.python_effects import BEGINNING, OF_TORCH, PythonEffects, Reads, unseen
from gossamer.model.split.pytree import TreeShape, flatten, leaves_of
from gossamer.model.split.random_branches import RandomBranchTrace, RandomExtreme
from gossamer.model.split.restore import SavedBuffers, backwards_seen
from gossamer.model.split.signatures import fits
from gossamer.model.split.trace_backends import TraceBackend, written
from gossamer.model.split.value_reads import ReadMode, looked_at
from gossamer.spec.errors import BadInput, RunFailed, bad_input

_REPEATABLE = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type(None))


@dataclass
class TracedCall:
    """A record of one unit call while it is traced: arguments, output tensors, side effects."""

    unit: str
    turn: int
    arguments: list[Any]
    leaves: list[OutputLeaf] = field(default_factory=list)
    spec: TreeShape | None = None
    containers: list[Any] = field(default_factory=list)  # lists and dicts among the arguments
    before: list[Any] = field(default_factory=list)  # copies of them
    kept: list[tuple[str, str, Any, Any]] = field(default_factory=list)  # of modules: path, attribute, object, a copy
    inner: list[tuple[str, int, str, Any]] = field(default_factory=list)  # module, turn, attribute, output
    insides: list[SideOutput] = field(default_factory=list)
    turns: dict[str, int] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)  # storages from elsewhere
    looked: bool = False
    is_used: bool = False  # whether it computes with a parameter or buffer of the unit
    effects: PythonEffects | None = None
    flop: float = 0.0


class ForwardTracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode, with hooks on the units, that traces one forward."""

    def __init__(
        self, module: nn.Module, units: tuple[str, ...], operators: TraceBackend, lot: RandomExtreme = RandomExtreme.ANY
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.until: Any = None  # the code of the function that calls the traced forward
        self.module, self.units, self.operators = module, units, operators
        self.key, self.lot, self.draws = operators.key, lot, RandomBranchTrace()
        self.buffers = SavedBuffers(self.key)
        self.running = BufferTrace(module, self.key)
        self.calls: list[TracedCall] = []
        self.current: int | None = None
        self.reads = Reads(self._now)
        self.early: dict[float, Snapshot] = {}  # Python state at the start, and at each value read
        self.stirred: list[tuple[float, Difference, float]] = []  # changes before a value read, and their positions
        self.stirs: set[float] = set()  # when the code between units changes lasting tensors
        self.late: tuple[LateWrite, ...] = ()
        self.holders: list[nn.Module] = []  # modules that have lists or dicts
        self.thread = threading.get_ident()
        self.refused: BadInput | None = None
        self.slope = ""  # a unit through which the code between units computes a gradient
        self.caught: BadInput | None = None  # a unit raised an exception; refused if the forward goes on
        self.constant: set[int] = set()  # memory computed from constants: every stage computes the same
        self.taint: dict[int, frozenset[CallOutput]] = {}
        self.born: dict[int, int] = {}  # storage -> call in which it was made
        self.where: dict[CallOutput, int] = {}  # storage of each value
        self.named: dict[int, list[CallOutput]] = {}  # storage -> values
        self.nodes: set[CallOutput] = set()  # whose grad_fn the model's code takes
        self.changed: set[CallOutput] = set()  # written in place after they were made
        self.without_grad: list[tuple[str, Tensor]] = []  # unit outputs while no graph was recorded
        self.readers: dict[CallOutput, set[int]] = {}
        self.branches: dict[CallOutput, set[int]] = {}
        self.loose: dict[str, set[int]] = {}
        self.lent: dict[str, set[int]] = {}
        self.static = self._static(module)
        self.owned = {name: self._static(module.get_submodule(name)).keys() for name in units}
        self.kept = self._kept(module)
        self.overwritten: set[str] = set()
        self.paths = {id(m): path for path, m in module.named_modules()}
        self.within = {name: {id(m) for m in module.get_submodule(name).modules()} for name in units}

    def _now(self) -> float:
        """Return the number of the running call; between two calls, a number between theirs."""
        return len(self.calls) + BEGINNING if self.current is None else self.current

    def install(self, stack: ExitStack) -> None:
        """Install the hooks of the trace; `stack` removes them."""
        self.draws.enter()
        self._note(FIRST)
        stack.enter_context(self.reads.watching())
        stack.enter_context(ReadMode(self._looked, self._held))
        stack.enter_context(backwards_seen(self._differentiated))
        for name in self.units:
            unit = self.module.get_submodule(name)
            stack.callback(_put_back, unit, vars(unit).get("forward"))
            unit.forward = self._watched(name, unit, unit.forward)  # type: ignore[method-assign]
        stack.callback(register_module_forward_hook(self._inner).remove)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.buffers.before(func, args, kwargs)
        out = self.operators.run(func, args, kwargs)
        ins = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        outs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        values = self._read(ins)
        changed = [self.key(x) for x in written(func, args, kwargs)]
        self.overwritten.update(name for key in changed for name in self.kept.get(key, ()))
        if any(key in self.kept for key in changed):
            self.stirs.add(self._now())
        self.changed.update(value for key in changed for value in self.named.get(key, ()))
        if (looked := looked_at(func, args)) is not None:
            self._look(self._read(looked), {self.key(x) for x in looked})
        made = [k for x in outs if (k := self.key(x)) not in self.static]
        self._follow_constants(func, ins, made + changed)
        self._follow_buffers(self.running.ran(func, args, kwargs, out), values, is_look=looked is not None)
        if self.current is None:
            self.lot.bend(func, out)
            self.draws.follow(func, {self.key(x) for x in ins}, made + changed)
            for key in made + [k for k in changed if k not in self.static]:
                self.taint[key] = self.taint.get(key, frozenset()) | values
            return out
        seen = self.calls[self.current]
        seen.is_used |= not self.owned[seen.unit].isdisjoint(map(self.key, ins))
        seen.flop += flop_of(func, args, kwargs, out)
        for value in values:
            self.readers.setdefault(value, set()).add(self.current)
        before = {self.key(x) for x in ins}
        self.born.update((k, self.current) for k in made if k not in before)
        self.calls[self.current].written.update(
            k for k in changed if self.born.get(k) != self.current and k not in self.static
        )
        return out

    def _follow_constants(self, func: Any, ins: list[Tensor], made: list[int]) -> None:
        keys = {self.key(x) for x in ins}
        is_drawn = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        if func is torch.ops.aten.lift_fresh.default:  # a literal
            self.constant.update(keys, made)
        elif keys <= self.constant and not is_drawn:
            self.constant.update(made)
        else:
            self.constant.difference_update(made)

    def _follow_buffers(self, step: BufferAccess, values: frozenset[CallOutput], *, is_look: bool) -> None:
        if self.current is not None:
            self.running.in_unit(step, self.current)
            return
        if self.running.in_code(step, len(self.calls), values):  # every stage that runs this needs them
            self._reach(values)
        if is_look:
            self.running.look(step, len(self.calls))

    def _reach(self, values: Iterable[CallOutput]) -> None:
        for value in values:
            self.readers.setdefault(value, set()).add(len(self.calls))

    def _static(self, module: nn.Module) -> dict[int, str]:
        """Return the canonical name of every parameter and buffer, by storage."""
        found: dict[int, str] = {}
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            found.setdefault(self.key(tensor), name)
        return found

    def _kept(self, module: nn.Module) -> dict[int, tuple[str, ...]]:
        """Return the parameters, buffers and attributes of modules in each storage."""
        found: dict[int, tuple[str, ...]] = {}
        for path, inner in module.named_modules():
            for name, held in [*inner._parameters.items(), *inner._buffers.items(), *vars(inner).items()]:
                if isinstance(held, Tensor):
                    key = self.key(held)
                    found[key] = (*found.get(key, ()), f"{path}.{name}" if path else name)
        return found

    def _differentiated(self, outputs: Iterable[Any], inputs: Iterable[Any]) -> None:
        """Note that code between units computes a gradient in the forward. It cannot do so through a unit."""
        if self.current is not None:
            return
        ends = self._read([x for x in outputs if isinstance(x, Tensor)])
        through = ends - self._read([x for x in inputs if isinstance(x, Tensor)])
        if through:
            self.slope = self.slope or self.calls[min(through).call].unit

    def _read(self, ins: list[Tensor]) -> frozenset[CallOutput]:
        values: frozenset[CallOutput] = frozenset()
        for tensor in ins:
            key = self.key(tensor)
            values |= self.taint.get(key, frozenset()) | self.running.put.get(key, frozenset())
            home = self.born.get(key)
            if home is not None and home != self.current and key not in self.constant:
                values |= {CallOutput(home, HIDDEN)}
            if key in self.static and key not in self.taint:
                self._read_static(key)
        return values

    def _read_static(self, key: int) -> None:
        name = self.static[key]
        if self.current is None:
            self.loose.setdefault(name, set()).add(len(self.calls))
        elif key not in self.owned[self.calls[self.current].unit]:
            self.lent.setdefault(name, set()).add(self.current)

    def _held(self, tensor: Tensor) -> None:
        """Note that the model's code takes the `grad_fn` of a tensor, perhaps to set a hook on it."""
        if self.current is None:
            self.nodes.update(self.named.get(self.key(tensor), ()))

    def _looked(self, tensor: Tensor) -> None:
        """Note that Python takes all values of a tensor."""
        key = self.key(tensor)
        if isinstance(tensor, FakeTensor):
            self.operators.refuse()
            raise RunFailed("numbers that are not there")
        self._look(self._read([tensor]), {key})

    def _look(self, values: frozenset[CallOutput], read: set[int]) -> None:
        if self.current is not None or values:
            self._note(self.reads.now())
        if self.current is not None:
            self.calls[self.current].looked = True
            return
        self.draws.look(read)
        for value in values:
            self.branches.setdefault(value, set()).add(len(self.calls))

    def _note(self, at: float) -> None:
        if at not in self.early:
            with unseen():
                if FIRST in self.early:
                    self.stirred += [(at, one, self._written(one)) for one in self.early[FIRST].differences()]
                self.early[at] = Snapshot.of_python(self.module, "")

    def _watched(self, name: str, unit: nn.Module, real: Callable[..., Any]) -> Callable[..., Any]:
        # Not by hooks: some models call the `forward` of their blocks themselves.
        @functools.wraps(real)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self.thread:
                self.refused = bad_input(
                    wanted=f"{name} to be called in the thread that runs the forward",
                    got="a call in a thread of the model's own",
                    do="call it in the forward itself, or name what starts the thread as one unit (plan.units)",
                    key="plan.mesh.pipe",
                )
                raise self.refused
            if self.current is not None:
                return real(*args, **kwargs)  # within a unit
            number = self._begin(name, args, kwargs)
            try:
                output = real(*args, **kwargs)
            except BaseException as error:
                self._raised(name, error, is_fitting=fits(real, args, kwargs))
                raise
            self._end(number, unit, output)
            return output

        return forward

    def _begin(self, name: str, args: Any, kwargs: Any) -> int:
        if self.caught is not None:
            raise self.caught
        self._reach(self.running.assigned(len(self.calls), self.taint, loose=True))
        self.draws.leave()
        self.current = len(self.calls)
        turn = sum(seen.unit == name for seen in self.calls)
        seen = TracedCall(name, turn, flatten((args, kwargs))[0], containers=containers_of((args, kwargs)))
        seen.before = [copy.copy(container) for container in seen.containers]
        seen.kept = [*self._lists_and_dicts(name, {id(container) for container in seen.containers})]
        seen.effects = PythonEffects.begin(self.module.get_submodule(name), name, (args, kwargs))
        self.calls.append(seen)
        return self.current

    def _lists_and_dicts(self, unit: str, known: set[int]) -> Iterator[tuple[str, str, Any, Any]]:
        """Yield the attributes of modules that are lists or dicts, to which a call may add."""
        if not self.holders:
            self.holders = [m for m in self.module.modules() if any(self._containers_in(m))]
        for module in (*self.holders, *self.module.get_submodule(unit).modules()):
            for name, held in self._containers_in(module):
                if id(held) not in known:
                    known.add(id(held))
                    yield self.paths[id(module)], name, held, copy.copy(held)

    @staticmethod
    def _containers_in(module: nn.Module) -> Iterator[tuple[str, Any]]:
        return ((n, x) for n, x in vars(module).items() if n not in OF_TORCH and type(x) in (list, dict))

    def _raised(self, name: str, error: BaseException, *, is_fitting: bool) -> None:
        """Undo the record of a call that raised. If its arguments did not fit, it never began, on no stage."""
        self.calls.pop()
        self.current = None
        self.draws.enter()
        if is_fitting:
            self.caught = self.caught or bad_input(
                wanted=f"{name} to return, or what it raises to end the forward",
                got=f"{type(error).__name__}, which the model's code catches",
                do="return what the exception tells, or name what calls it as one unit (plan.units)",
                key="plan.mesh.pipe",
            )

    def _end(self, number: int, unit: nn.Module, output: Any) -> None:
        list(self.running.assigned(number, self.taint, loose=False))
        seen = self.calls[number]
        assert seen.effects is not None
        seen.effects.end(self.module, seen.arguments, self.until)
        self.constant.difference_update(self.key(x) for x in seen.effects.tensors)  # other stages do not compute it
        self.current = None
        leaves, seen.spec = flatten(output)
        first: dict[int, int] = {}
        for i, leaf in enumerate(leaves):
            same = first.setdefault(id(leaf), i) if isinstance(leaf, Tensor) else i
            seen.leaves.append(OutputLeaf(same=same) if same != i else self._leaf(seen, leaf, CallOutput(number, i)))
        kept = {self.where[v] for v in self.where if v.call == number}
        for key in seen.written - kept:
            self.taint[key] = self.taint.get(key, frozenset()) | {CallOutput(number, HIDDEN)}
        self._keep_insides(number, seen, unit)
        seen.arguments = []
        self.draws.enter()

    def _leaf(self, seen: TracedCall, leaf: Any, value: CallOutput) -> OutputLeaf:
        same = next((i for i, given in enumerate(seen.arguments) if given is leaf), None)
        if not isinstance(leaf, Tensor):
            if same is not None and leaf is not None:
                return OutputLeaf(source=same)
            opaque = "" if type(leaf) in _REPEATABLE else type(leaf).__qualname__
            return OutputLeaf(constant=None if opaque else leaf, opaque=opaque)
        if leaf.layout is not torch.strided:
            return OutputLeaf(opaque=f"tensor of layout {leaf.layout}")
        key = self.key(leaf)
        is_skipped = same is not None and not seen.is_used and bool(self.owned[seen.unit])
        if same is not None and key not in seen.written and not is_skipped:
            return OutputLeaf(source=same)
        for read in self.taint.get(key, frozenset()) if is_skipped else ():
            self.readers.setdefault(read, set()).add(value.call)
        self._name(key, value)
        if not torch.is_grad_enabled():
            self.without_grad.append((seen.unit, leaf))
        if is_skipped and key not in seen.written:  # this time; another time it returns what it computes
            return OutputLeaf(made=self._to_come(leaf, seen.unit))
        return OutputLeaf(source=same, made=Produced.of(leaf))

    def _to_come(self, leaf: Tensor, unit: str) -> Produced:
        """Return the output of a unit when it computes, which has passed its argument through this time."""
        made = Produced.of(leaf)
        is_trained = any(p.requires_grad for p in self.module.get_submodule(unit).parameters())
        is_grown = is_trained and torch.is_grad_enabled() and leaf.is_floating_point()
        return replace(made, needs_grad=made.needs_grad or is_grown)

    def _name(self, key: int, value: CallOutput) -> None:
        """Call the storage `value` from here on; a view of older storage is that value too."""
        older = frozenset() if self.born.pop(key, None) is not None else self.taint.get(key, frozenset())
        self.taint[key] = older | {value}
        self.where[value] = key
        self.named.setdefault(key, []).append(value)

    def _inner(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.current is None:
            return
        seen = self.calls[self.current]
        hooked = module._forward_hooks  # its output leaves the unit only through a forward hook
        if hooked and id(module) in self.within[seen.unit] and self.paths[id(module)] != seen.unit:
            path = self.paths[id(module)]
            turn = seen.turns.get(path, 0)
            seen.turns[path] = turn + 1
            seen.inner.append((path, turn, "", output))

    def _keep_insides(self, number: int, seen: TracedCall, unit: nn.Module) -> None:
        for inner in unit.modules():
            for name, held in vars(inner).items():
                if isinstance(held, Tensor) and self.born.get(self.key(held)) == number:
                    seen.inner.append((self.paths[id(inner)], 0, name, held))
        for path, turn, attribute, output in seen.inner:
            self._keep_inside(number, seen, SideOutput(path, turn, attribute, (), (), flatten(output)[1]), output)
        for i, (container, before) in enumerate(zip(seen.containers, seen.before, strict=True)):
            for key, held in _added(container, before):
                self._keep_inside(number, seen, SideOutput("", 0, "", (), (), flatten(held)[1], i, key), held)
        for path, name, container, before in seen.kept:
            for key, held in _added(container, before):
                if any(isinstance(x, Tensor) and self.born.get(self.key(x)) == number for x in leaves_of(held)):
                    self._keep_inside(
                        number, seen, SideOutput(path, 0, name, (), (), flatten(held)[1], KEPT, key), held
                    )
        seen.inner, seen.containers, seen.before, seen.kept = [], [], [], []

    def _keep_inside(self, number: int, seen: TracedCall, inside: SideOutput, output: Any) -> None:
        start = len(seen.leaves) + sum(len(i.leaves) for i in seen.insides)
        leaves = flatten(output)[0]
        found = [self._inner_leaf(seen, x, CallOutput(number, start + i)) for i, x in enumerate(leaves)]
        kept, places = tuple(leaf for leaf, _ in found), tuple(at for _, at in found)
        seen.insides.append(replace(inside, leaves=kept, places=places))

    def _inner_leaf(self, seen: TracedCall, leaf: Any, value: CallOutput) -> tuple[OutputLeaf, int]:
        """Return the leaf, and the place of its value: a new one, or the one that its memory already has."""
        if not isinstance(leaf, Tensor):
            return OutputLeaf(constant=leaf if type(leaf) in _REPEATABLE else None), HIDDEN
        same = next((i for i, given in enumerate(seen.arguments) if given is leaf), None)
        if same is not None and self.key(leaf) not in seen.written:
            return OutputLeaf(source=same), HIDDEN
        key, made = self.key(leaf), Produced.of(leaf)
        if self.born.get(key) == value.call:
            self._name(key, value)
            return OutputLeaf(made=made), value.place
        named = (v.place for v, at in self.where.items() if at == key and v.call == value.call)
        return OutputLeaf(made=made), next(named, HIDDEN)

    def finish(self, ends: list[Tensor]) -> None:
        """Record that the caller's result depends on the tensors `ends`, and close the trace.

        Raises BadInput for a forward that cannot be split.
        """
        self.draws.leave()
        if (refused := self.refused or self.caught) is not None:
            raise refused
        for unit, leaf in self.without_grad:
            if leaf.requires_grad:  # now, and not when the unit returned it: its graph is made a second time
                raise bad_input(
                    wanted=f"{unit} to record its graph when it runs",
                    got="a forward that runs it under reentrant checkpointing",
                    do="use checkpoint(..., use_reentrant=False)",
                    key="model",
                )
        self._reach(self.running.assigned(len(self.calls), self.taint, loose=True))
        self._reach(self._read(ends))
        with unseen():
            self.late = tuple(self._late())
        self.early.clear()
        for name in self.running.read(ends):
            self.running.readers.setdefault(name, set()).add(len(self.calls))

    def flow(self) -> DataFlow:
        """Return the data flow that was traced."""
        calls = tuple(self._call(i, seen) for i, seen in enumerate(self.calls))
        return DataFlow(
            calls=calls,
            readers={value: frozenset(at) for value, at in self.readers.items()},
            branches={value: frozenset(at) for value, at in self.branches.items()},
            loose={name: frozenset(at) for name, at in self.loose.items()},
            lent={name: frozenset(at) for name, at in self.lent.items()},
            buffers=self.running.uses(),
            late=self.late,
            stirred=self._stirred(),
            stirs=frozenset(self.stirs | self.reads.put),
            units=self.units,
            by_chance=self.draws.decide,
            written=frozenset(self.overwritten),
            nodes=frozenset(self.nodes),
            touched=frozenset(self._path(root) for root in self.reads.touched),
            looked_into={self._path(root): frozenset(self.reads.others(root, -1)) for root in self.reads.of},
            kept=self._by_call(lambda effects: (self._path(root) for root in effects.kept)),
            left=self._by_call(lambda effects: effects.left),
            slope=self.slope,
        )

    def _path(self, root: Root) -> str:
        path = self.paths.get(root[0], "")
        return f"{path}.{root[1]}" if path else root[1]

    def _by_call(self, names: Callable[[PythonEffects], Iterable[str]]) -> dict[str, frozenset[int]]:
        found: dict[str, set[int]] = {}
        for number, seen in enumerate(self.calls):
            for name in names(seen.effects) if seen.effects is not None else ():
                found.setdefault(name, set()).add(number)
        return {name: frozenset(at) for name, at in sorted(found.items())}

    def _call(self, number: int, seen: TracedCall) -> UnitCall:
        assert seen.spec is not None
        leaves = tuple(self._marked(leaf, CallOutput(number, i)) for i, leaf in enumerate(seen.leaves))
        marked = tuple(
            replace(
                i, leaves=tuple(self._marked(a, CallOutput(number, p)) for a, p in zip(i.leaves, i.places, strict=True))
            )
            for i in seen.insides
        )
        held = sum(p.numel() * p.element_size() for p in self.module.get_submodule(seen.unit).parameters())
        effects = self._effects(number, seen)
        gives = bool(effects) or len(leaves) > 1 or any(leaf.is_python or _is_none(leaf) for leaf in leaves)
        return UnitCall(
            seen.unit,
            seen.turn,
            leaves,
            seen.spec,
            marked,
            overlaps=self._overlaps(number),
            effects=effects,
            is_told=seen.looked and gives,
            flop=seen.flop,
            parameter_bytes=held,
        )

    def _late(self) -> Iterator[LateWrite]:
        for root, at in self.reads.late():
            yield LateWrite(self._path(root), self._readers([root]), at)
        changed = [(at, one) for at, early in self.early.items() for one in early.differences()]
        changed = [(at, one) for at, one in changed if one.root is None or one.root[1] not in OF_TORCH]
        held = {id(one.holder) for _, one in changed if one.holder is not None and one.root is not None}
        ways = ways_to(held, self.module, OF_TORCH, None) if held else {}
        for at, one in changed:
            if one.holder is not None or one.root not in self.reads.renewed:
                readers = self._readers({*ways.get(id(one.holder), ()), one.root})
                yield LateWrite(one.name, readers, self._written(one), at)

    def _stirred(self) -> tuple[LateWrite, ...]:
        held = {id(one.holder) for _, one, _ in self.stirred if one.holder is not None and one.root is not None}
        ways = ways_to(held, self.module, OF_TORCH, None) if held else {}
        return tuple(
            LateWrite(one.name, self._readers({*ways.get(id(one.holder), ()), one.root}), written, at)
            for at, one, written in self.stirred
        )

    def _readers(self, ways: Iterable[Root | None]) -> frozenset[float]:
        """Return the readers of a piece of state in the next forward."""
        found = (self.reads.others(way, -1) if way is not None else {BEGINNING} for way in ways)
        return frozenset(reader for some in found for reader in some)

    def _written(self, one: Difference) -> float:
        """Return the last call that changed it; the end of the forward if no unit did."""
        changed = (
            any(d.name == one.name for d in seen.effects.found) for seen in self.calls if seen.effects is not None
        )
        return max((number for number, is_it in enumerate(changed) if is_it), default=float(len(self.calls)))

    def _overlaps(self, number: int) -> tuple[tuple[int, ...], ...]:
        of_call = ([v.place for v in values if v.call == number] for values in self.named.values())
        return tuple(tuple(p) for p in of_call if len(p) > 1 and CallOutput(number, p[0]) in self.changed)

    def _effects(self, number: int, seen: TracedCall) -> tuple[str, ...]:
        """Return the side effects of a call that others may read.

        If its outputs may change in kind with state that only it reads, return all.
        """
        assert seen.effects is not None
        ids = {path: key for key, path in self.paths.items()}
        followed = {(ids[i.module], i.attribute) for i in seen.insides if i.attribute and i.container != KEPT}
        found = [*seen.effects.outside(number, self.reads, followed)]
        if not found and not seen.looked and len(seen.leaves) > 1:
            found = seen.effects.found
        return tuple(dict.fromkeys(one.name for one in found))

    def _marked(self, leaf: OutputLeaf, value: CallOutput) -> OutputLeaf:
        if leaf.made is None or value not in self.changed:
            return leaf
        return replace(leaf, made=replace(leaf.made, written=True))


def _is_none(leaf: OutputLeaf) -> bool:
    return leaf.made is None and leaf.source is None and leaf.constant is None


def _added(container: Any, before: Any) -> list[tuple[Any, Any]]:
    """Return (key, element) of what was added to a dict; (None, element) of what was appended to a list."""
    if isinstance(container, list):
        return [(None, held) for held in container[len(before) :]]
    return [(key, held) for key, held in container.items() if key not in before or before[key] is not held]


def _put_back(unit: nn.Module, forward: Callable[..., Any] | None) -> None:
    if forward is None:
        del unit.forward
    else:
        unit.forward = forward  # type: ignore[method-assign]
