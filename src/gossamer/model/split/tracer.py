"""Tracer of one forward: finds which unit's output reaches which unit through the model's own code.

It runs every operator and follows it through four traces: of unit outputs in memory (value_trace), of unit calls
(call_trace), of parameters (parameter_trace) and buffers, and of Python state (state_trace).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gossamer.model.flop import flop_of
from gossamer.model.split.buffer_trace import BufferAccess, BufferTrace
from gossamer.model.split.call_trace import CallTrace
from gossamer.model.split.dataflow import FIRST, CallOutput, DataFlow, UnitCall
from gossamer.model.split.parameter_trace import ParameterTrace
from gossamer.model.split.random_branches import RandomBranchTrace, RandomExtreme
from gossamer.model.split.restore import SavedBuffers, backwards_seen
from gossamer.model.split.signatures import fits
from gossamer.model.split.split_error import split_error
from gossamer.model.split.state_trace import StateTrace
from gossamer.model.split.trace_backends import TraceBackend, written
from gossamer.model.split.traced_call import TracedCall
from gossamer.model.split.value_reads import ReadMode, looked_at
from gossamer.model.split.value_trace import ValueTrace
from gossamer.spec.errors import BadInput, RunFailed, bad_input


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
        self.values = ValueTrace(self.key, self.running)
        self.parameters = ParameterTrace(module, units, self.key)
        self.calls = CallTrace(module, self.values, self.parameters)
        self.state = StateTrace(module, self.calls)
        self.thread = threading.get_ident()
        self.refused: BadInput | None = None
        self.slope = ""  # a unit through which the code between units computes a gradient
        self.caught: BadInput | None = None  # a unit raised an exception; refused if the forward goes on

    def install(self, stack: ExitStack) -> None:
        """Install the hooks of the trace; `stack` removes them."""
        self.draws.enter()
        self.state.note(FIRST)
        stack.enter_context(self.state.reads.watching())
        stack.enter_context(ReadMode(self._looked, self._held))
        stack.enter_context(backwards_seen(self._differentiated))
        for name in self.units:
            unit = self.module.get_submodule(name)
            stack.callback(_put_back, unit, vars(unit).get("forward"))
            unit.forward = self._watched(name, unit, unit.forward)  # type: ignore[method-assign]
        stack.callback(register_module_forward_hook(self.calls.note_inner).remove)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.buffers.save_before(func, args, kwargs)
        out = self.operators.run(func, args, kwargs)
        ins = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        outs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        values = self._read(ins)
        changed = [self.key(x) for x in written(func, args, kwargs)]
        if self.parameters.write(changed):
            self.state.stirs.add(self.calls.now())
        self.values.changed.update(value for key in changed for value in self.values.named.get(key, ()))
        if (looked := looked_at(func, args)) is not None:
            self._look(self._read(looked), {self.key(x) for x in looked})
        made = [k for x in outs if (k := self.key(x)) not in self.parameters.static]
        self.values.follow_constants(func, ins, made + changed)
        self._follow_buffers(self.running.ran(func, args, kwargs, out), values, is_look=looked is not None)
        if (current := self.calls.current) is None:
            self.lot.bend(func, args, kwargs, out)
            self.draws.follow(func, {self.key(x) for x in ins}, made + changed)
            self.values.spread(made + [k for k in changed if k not in self.parameters.static], values)
            return out
        seen = self.calls.traced[current]
        seen.is_used |= not self.parameters.owned[seen.unit].isdisjoint(map(self.key, ins))
        seen.flop += flop_of(func, args, kwargs, out)
        self.values.reach(values, current)
        before = {self.key(x) for x in ins}
        self.values.born.update((k, current) for k in made if k not in before)
        seen.written.update(
            k for k in changed if self.values.born.get(k) != current and k not in self.parameters.static
        )
        return out

    def _follow_buffers(self, step: BufferAccess, values: frozenset[CallOutput], *, is_look: bool) -> None:
        if self.calls.current is not None:
            self.running.in_unit(step, self.calls.current)
            return
        if self.running.in_code(step, self.calls.position, values):  # every stage that runs this needs them
            self.values.reach(values, self.calls.position)
        if is_look:
            self.running.look(step, self.calls.position)

    def _differentiated(self, outputs: Iterable[Any], inputs: Iterable[Any]) -> None:
        """Note that code between units computes a gradient in the forward. It cannot do so through a unit."""
        if self.calls.current is not None:
            return
        ends = self._read([x for x in outputs if isinstance(x, Tensor)])
        through = ends - self._read([x for x in inputs if isinstance(x, Tensor)])
        if through:
            self.slope = self.slope or self.calls.traced[min(through).call].unit

    def _read(self, ins: list[Tensor]) -> frozenset[CallOutput]:
        current = self.calls.current
        for key in map(self.key, ins):
            if key in self.parameters.static and key not in self.values.taint:
                unit = None if current is None else self.calls.traced[current].unit
                self.parameters.read(key, self.calls.position if current is None else current, unit)
        return self.values.read(ins, current)

    def _reach_assigned(self) -> None:
        """Record what the buffers that the code between units has replaced are computed from."""
        at = self.calls.position
        self.values.reach(self.running.assigned(at, self.values.taint, loose=True), at)

    def _held(self, tensor: Tensor) -> None:
        """Note that the model's code takes the `grad_fn` of a tensor, perhaps to set a hook on it."""
        if self.calls.current is None:
            self.values.nodes.update(self.values.named.get(self.key(tensor), ()))

    def _looked(self, tensor: Tensor) -> None:
        """Note that Python takes all values of a tensor."""
        key = self.key(tensor)
        if isinstance(tensor, FakeTensor):
            self.operators.refuse()
            raise RunFailed("the values of a fake tensor are read")
        self._look(self._read([tensor]), {key})

    def _look(self, values: frozenset[CallOutput], read: set[int]) -> None:
        if self.calls.current is not None or values:
            self.state.note(self.state.reads.now())
        if self.calls.current is not None:
            self.calls.traced[self.calls.current].looked = True
            return
        self.draws.look(read)
        for value in values:
            self.values.branches.setdefault(value, set()).add(self.calls.position)

    def _watched(self, name: str, unit: nn.Module, real: Callable[..., Any]) -> Callable[..., Any]:
        # Not by hooks: some models call the `forward` of their blocks themselves.
        @functools.wraps(real)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self.thread:
                self.refused = split_error(
                    wanted=f"{name} to be called in the thread that runs the forward",
                    got="a call in a thread of the model's own",
                    do=lambda say: (
                        "call it in the forward itself"
                        + say.or_units("name the module that starts the thread as one unit")
                    ),
                )
                raise self.refused
            if self.calls.current is not None:
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
        self._reach_assigned()
        self.draws.leave()
        return self.calls.begin(name, args, kwargs)

    def _raised(self, name: str, error: BaseException, *, is_fitting: bool) -> None:
        """Undo the record of a call that raised. If its arguments did not fit, it never began, on no stage."""
        self.calls.drop()
        self.draws.enter()
        if is_fitting:
            self.caught = self.caught or split_error(
                wanted=f"{name} to return, or its exception to end the forward",
                got=f"{type(error).__name__}, which the model's code catches",
                do=lambda say: (
                    "return a value in place of the exception"
                    + say.or_units(f"name the module that calls {name} as one unit")
                ),
            )

    def _end(self, number: int, unit: nn.Module, output: Any) -> None:
        self.calls.end(number, unit, output, self.until)
        self.draws.enter()

    def finish(self, ends: list[Tensor]) -> None:
        """Record that the caller's result depends on the tensors `ends`, and close the trace.

        Raises BadInput for a forward that cannot be split.
        """
        self.draws.leave()
        if (refused := self.refused or self.caught) is not None:
            raise refused
        for unit, leaf in self.calls.without_grad:
            if leaf.requires_grad:  # now, and not when the unit returned it: its graph is made a second time
                raise bad_input(
                    wanted=f"{unit} to record its autograd graph when it runs",
                    got="a forward that runs it under reentrant checkpointing",
                    do="use checkpoint(..., use_reentrant=False)",
                    key="model",
                )
        self._reach_assigned()
        self.values.reach(self._read(ends), self.calls.position)
        self.state.finish()
        for name in self.running.read(ends):
            self.running.readers.setdefault(name, set()).add(self.calls.position)

    def flow(self) -> DataFlow:
        """Return the data flow that was traced."""
        calls = tuple(self._call(i, seen) for i, seen in enumerate(self.calls.traced))
        return DataFlow(
            calls=calls,
            readers={value: frozenset(at) for value, at in self.values.readers.items()},
            branches={value: frozenset(at) for value, at in self.values.branches.items()},
            nodes=frozenset(self.values.nodes),
            parameters=self.parameters.use(),
            buffers=self.running.uses(),
            state=self.state.use(),
            units=self.units,
            by_chance=self.draws.decide,
            slope=self.slope,
        )

    def _call(self, number: int, seen: TracedCall) -> UnitCall:
        held = sum(p.numel() * p.element_size() for p in self.module.get_submodule(seen.unit).parameters())
        return seen.unit_call(number, self.values, self.state.effects(number, seen), held)


def _put_back(unit: nn.Module, forward: Callable[..., Any] | None) -> None:
    if forward is None:
        del unit.forward
    else:
        unit.forward = forward  # type: ignore[method-assign]
