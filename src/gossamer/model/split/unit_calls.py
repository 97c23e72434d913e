"""Calls of units on one stage: the stage's own units run; those of others are placeholders, or run as shadows.

A shadow run executes the forward of another stage's unit on absent and received tensors, for its Python side effects.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from gossamer.model.split.absent_tensor import Over, StageAbsence
from gossamer.model.split.boundary_hooks import BoundaryHooks
from gossamer.model.split.call_containers import CallContainers
from gossamer.model.split.checkpoint_regions import CheckpointRegions
from gossamer.model.split.dataflow import TOLD, CallOutput, DataFlow, UnitCall
from gossamer.model.split.forward_run import ForwardRun
from gossamer.model.split.later_effects import LaterEffects, changes_python
from gossamer.model.split.output_recorder import OutputRecorder
from gossamer.model.split.placeholder_outputs import PlaceholderOutputs
from gossamer.model.split.pytree import flatten
from gossamer.model.split.signatures import signature_of
from gossamer.model.split.stale_attributes import StaleAttributes
from gossamer.model.split.value_reads import ValueReads
from gossamer.model.unit_seeds import Keyed


class UnitCalls:
    """The units of `module` with their forwards replaced, for one stage. `run`: the forward that is running."""

    def __init__(
        self, module: nn.Module, absence: StageAbsence, stale: StaleAttributes, beginnings: LaterEffects
    ) -> None:
        self.module, self.absence = module, absence
        self.run: ForwardRun | None = None
        self._stale, self._beginnings = stale, beginnings
        self._recorder, self._placeholders = OutputRecorder(module), PlaceholderOutputs(module, absence)
        self._regions, self._is_again = CheckpointRegions(), False
        self.absence.is_again = self._regions.is_run_again
        self._changing: dict[str, bool] = {}  # units that the trace never called -> do they change Python state
        self._bordered: dict[str, BoundaryHooks] = {}
        self._wrapped: set[str] = set()
        self._called: set[str] = set()

    def replace(self, units: Iterable[str]) -> None:
        """Replace the forwards of the units."""
        for name in units:
            unit = self.module.get_submodule(name)
            assert not isinstance(unit.forward, Keyed), "a ghost would not seed: key the randomness of a stage last"
            unit.forward = self._unit(name, unit.forward)  # type: ignore[method-assign]
            self._bordered[name] = BoundaryHooks(name, unit)

    def follow(self, flow: DataFlow) -> None:
        """Use `flow` from the next forward on: the forwards of inner modules with side outputs in it are replaced."""
        self._called = {call.unit for call in flow.calls}
        for path in {
            i.module for call in flow.calls for i in call.insides if i.module and not i.attribute
        } - self._wrapped:
            self._wrapped.add(path)
            inner = self.module.get_submodule(path)
            inner.forward = self._inner(path, inner.forward)  # type: ignore[method-assign]

    def advance(self, run: ForwardRun) -> None:
        """Set `absence.is_over`: true once all units of this stage have run; never on the last stage."""
        self.absence.is_over = run.at >= run.part.high and not run.part.is_last

    def _unit(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        signature = signature_of(real)

        @functools.wraps(real)
        def forward(*args: Any, **kwargs: Any) -> Any:
            run = self.run
            is_again = torch._C._current_graph_task_id() != -1  # recomputed in a backward
            if self._is_again or (run is not None and run.inside is not None) or (run is None and not is_again):
                return real(*args, **kwargs)  # within a unit
            if run is None or is_again:
                return self._once_more(name, real, (args, kwargs))
            if signature is not None:
                signature.bind(*args, **kwargs)  # raises TypeError, as the unit does on its own stage
            if self._is_extra(run, name) and self.absence.refused is None:
                return self._extra(run, name, real, (args, kwargs))
            call = self._next(run, name)
            if run.part.owns(run.at):
                output = self._own(run, call, real, (args, kwargs))
            elif not call.is_python:
                self._stale.passed(run.flow, run.at)
                output = self._placeholders.give(run, call, args, kwargs)
            else:
                output = self._shadow(run, call, real, (args, kwargs))
            self._regions.note(output, is_own=run.part.owns(run.at), is_shadow=call.is_python)
            run.at += 1
            self.advance(run)
            return output

        return forward

    def _inner(self, path: str, real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._placeholders.answers:
                return self._placeholders.answers.pop()
            output = real(*args, **kwargs)
            run = self.run
            if run is not None and run.inside is not None:
                time = run.turns.get(path, 0)
                run.turns[path] = time + 1
                for inside in run.inside.insides:
                    if (inside.module, inside.turn, inside.attribute) == (path, time, ""):
                        if run.is_shadow:
                            output = self._placeholders.received(run, inside, output)
                        else:
                            self._recorder.record_inside(run, inside, output)
            return output

        return forward

    def _once_more(self, name: str, real: Callable[..., Any], given: tuple[Any, Any]) -> Any:
        """Run the call of a unit in a checkpointed region that a backward runs again."""
        if (ghostly := self._regions.next()) is not None:
            return ghostly.again(name)
        self._is_again, self.absence.unit = True, name
        try:
            return real(*given[0], **given[1])
        finally:
            self._is_again, self.absence.unit = False, ""

    def _own(self, run: ForwardRun, call: UnitCall, real: Callable[..., Any], given: tuple[Any, Any]) -> Any:
        """Run the unit itself, which this stage owns, and keep the outputs that later stages read."""
        run.inside, run.turns = call, {}
        self.absence.unit = call.name
        arguments, before = flatten(given)[0], CallContainers.before(self.module, call, given)
        looks = ValueReads()
        self._beginnings.begin(run.flow, run.at, given)
        try:
            with looks.noting() if call.is_told and call.is_python else nullcontext():
                output = self._bordered[call.unit].forward(real, *given)
        finally:
            run.inside, self.absence.unit = None, ""
        self._beginnings.end(run.flow, run.at)
        self._recorder.record(run, call, output, arguments)
        self._recorder.record_added(run, call, before)
        self._recorder.record_kept(run, call, before)
        if (told := CallOutput(run.at, TOLD)) in run.part.sends:
            if not call.is_python:
                looks = ValueReads.of_kinds(flatten(output)[0], call.leaves)
            run.made[told] = looks.to_bytes(call.name, call.made(TOLD).device)
        return output

    def _extra(self, run: ForwardRun, name: str, real: Callable[..., Any], given: tuple[Any, Any]) -> Any:
        run.inside, self.absence.unit = UnitCall(name, 0, (), flatten(())[1]), name
        try:
            return self._bordered[name].forward(real, *given)
        finally:
            run.inside, self.absence.unit = None, ""

    def _shadow(self, run: ForwardRun, call: UnitCall, real: Callable[..., Any], given: tuple[Any, Any]) -> Any:
        """Run the forward of another stage's unit on absent and received tensors, for its Python effects and values."""
        arguments, before = flatten(given)[0], CallContainers.before(self.module, call, given)
        told = run.given.get(CallOutput(run.at, TOLD)) if call.is_told else None
        looks = ValueReads.of_bytes(told) if told is not None else ValueReads()
        run.inside, run.turns, run.is_shadow = call, {}, True
        self.absence.told = looks.of_method if told is not None else None
        try:
            with looks.telling() if told is not None else nullcontext():
                output = getattr(real, "_torchdynamo_orig_callable", real)(*given[0], **given[1])
        except Over:
            run.is_begun = True
            raise
        finally:
            run.inside, run.is_shadow, self.absence.told = None, False, None
        return self._placeholders.complete(run, call, output, arguments, before)

    def _next(self, run: ForwardRun, name: str) -> UnitCall:
        if self.absence.refused is not None:
            raise self.absence.refused  # the model's code caught the error
        there = (i for i in range(run.at, run.flow.end) if run.flow.calls[i].unit == name)
        if (at := next(there, None)) is None or not run.may_skip(at):
            error = run.strayed(name)
            if self.absence.is_over:
                raise Over from error
            raise error
        run.at = at
        return run.flow.calls[at]

    def _is_extra(self, run: ForwardRun, name: str) -> bool:
        """Return whether the call is of a unit that the trace never called: the last stage owns those."""
        if not run.part.is_last or name in self._called:
            return False
        if name not in self._changing:
            self._changing[name] = changes_python(self.module.get_submodule(name))
        return not self._changing[name]
