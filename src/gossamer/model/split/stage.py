"""Pipeline stage: the user's whole forward, in which units of other stages are placeholders.

A placeholder holds no storage and returns what the real unit would have. This is the tensor received from an earlier
stage, the argument that the unit passed through, or an absent tensor if nothing of this stage depends on it. The module
objects stay, with their attributes and hooks; only their parameters are absent and their `forward` is replaced.

Every stage runs the forward to its end, or until it needs an absent value after its last unit. So the state that the
model keeps (counters, switches, memories) equals that of one process.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from gossamer.model.split.absent_parameters import make_absent
from gossamer.model.split.absent_tensor import Over, StageAbsence, user_line
from gossamer.model.split.backward_python import BackwardPython, check_left, runs_in_backward
from gossamer.model.split.dataflow import FIRST, CallOutput, DataFlow
from gossamer.model.split.forward_run import ForwardRun
from gossamer.model.split.in_flight import InFlight
from gossamer.model.split.later_effects import LaterEffects, changes_python
from gossamer.model.split.output_leaf import Produced
from gossamer.model.split.pytree import flatten
from gossamer.model.split.recompute import LastPython, copy_buffers, detached, nothing_saved, once, once_more
from gossamer.model.split.saved_copies import copies_of, memory_of_names
from gossamer.model.split.split_error import split_error
from gossamer.model.split.split_points import StageSpec, canonical_names, check_late, end_of
from gossamer.model.split.stale_attributes import StaleAttributes
from gossamer.model.split.torch_switches import switches_put_back
from gossamer.model.split.unit_calls import UnitCalls
from gossamer.spec.errors import BadInput

_NOT_USED = "appears to not have been used in the graph"


class StageModule:
    """A pipeline stage made from `module`: stage `part` of the data flow `flow`.

    The module is changed in place, and cannot be used as before. One module may be several stages: then `keep` names
    the parameters and buffers that all of them hold.
    """

    def __init__(
        self, module: nn.Module, flow: DataFlow, part: StageSpec, *, keep: frozenset[str] = frozenset()
    ) -> None:
        self.module, self.flow, self.part = module, flow, part
        self.names = canonical_names(module)
        self._absence, self._python = StageAbsence(part.stage), LastPython()
        self._hindsight: BackwardPython | None = None
        self._stale = StaleAttributes(module, self._refuse_stale)
        mine = {call.unit for call in flow.calls[part.low : part.high]} if part.high - part.low < flow.end else set()
        changing = frozenset(name for name in mine if changes_python(module.get_submodule(name)))
        self._calls = UnitCalls(module, self._absence, self._stale, LaterEffects(module, part.stage, changing))
        if len(flow.calls) != part.high - part.low and runs_in_backward(module):
            owned = frozenset(call.unit for call in flow.calls[part.low : part.high])
            held = {path for path, name in self.names.items() if name in part.holds}
            check_left(flow, part)
            self._hindsight = BackwardPython(module, part.stage, owned, frozenset(held), self._stale)
        make_absent(module, part.holds | keep, self.names, self._absence)
        self._calls.replace(flow.units)
        self._check_shared()
        self.follow(flow, part)

    def follow(self, flow: DataFlow, part: StageSpec) -> None:
        """Use the data flow of another kind of batch from the next forward on: same calls, other shapes and edges.

        Raises BadInput if the stage would have other units or parameters.
        """
        if (part.low, part.high) != (self.part.low, self.part.high) or not part.holds <= self.part.holds:
            raise split_error(
                wanted=f"batches for which stage {self.part.stage} has the same units as for the first batch",
                got="a batch of other keys or shapes, for which the model calls other units",
                do="give all batches the same keys",
            )
        self.flow, self.part = flow, replace(part, holds=self.part.holds)
        self._end = end_of(flow, part)
        self._calls.follow(flow)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that this stage holds, by canonical name."""
        return {name: p for name, p in self.module.named_parameters() if self.names[name] in self.part.holds}

    def receive(self, tensors: Mapping[CallOutput, Tensor]) -> dict[CallOutput, Tensor]:
        """Return the received tensors as leaves of this stage's graph."""
        made = {v: self.flow.calls[v.call].made(v.place) for v in self.part.receives}
        return {v: laid_out(tensors[v].detach(), m).requires_grad_(m.needs_grad) for v, m in made.items()}

    def forward(
        self, run: Callable[[], Any], tensors: Mapping[CallOutput, Tensor], *, keep_graph: bool = True
    ) -> InFlight:
        """Run this stage's part of `run`, which calls `self.module`, on the tensors that the previous stage sent.

        Without `keep_graph` only the received tensors and copies of buffers are kept, and `InFlight.recompute` has to
        come before the backward.
        """
        if keep_graph:
            return self._forward(run, tensors)
        received = {v: tensors[v] for v in self.part.receives}
        forward = functools.partial(self._way_of, self.flow, self.part, run, received)
        held = {path for path, name in self.names.items() if name in self.part.holds}
        buffers, python = copy_buffers(self.module, held, self.flow.parameters.written), self._python.of(self.module)
        with nothing_saved(), once(self.module, python, buffers):
            live = self._forward(run, tensors, is_saved=False)
        again = functools.partial(once_more, forward, self.module, buffers, python, self._python)
        return InFlight({}, detached(live.sent), detached(live.result), again)

    def _way_of(
        self, flow: DataFlow, part: StageSpec, run: Callable[[], Any], tensors: Mapping[CallOutput, Tensor]
    ) -> InFlight:
        """Run the forward of a batch, though `follow` may have switched to another kind of batch since."""
        now = self.flow, self.part
        self.flow, self.part = flow, part
        try:
            return self._forward(run, tensors)
        finally:
            self.flow, self.part = now

    def _forward(
        self, run: Callable[[], Any], tensors: Mapping[CallOutput, Tensor], *, is_saved: bool = True
    ) -> InFlight:
        leaves = self.receive(tensors)
        # A view of each: autocast caches leaves as if they were weights, and would add their gradients in bf16.
        current = self._calls.run = ForwardRun(self.flow, self.part, {v: x.view_as(x) for v, x in leaves.items()})
        result = None
        try:
            with (
                switches_put_back() as switches,
                self._absence.forward(),
                self._stale.looking(),
                self._saving(is_saved),
            ):
                self._calls.advance(current)
                result = run()
                switches.keep()
        except Over as over:
            current.is_cut_short = True
            self._stale.ended(self.flow, current.at + current.is_begun)
            self._check_late(current, over.__cause__)
        except RuntimeError as error:
            if _NOT_USED not in str(error) or current.at == self.flow.end == self.part.high - self.part.low:
                raise
            raise self._no_gradient(current) from None
        finally:
            self._calls.run = None
        if not current.is_cut_short and not self._absence.is_over and not current.may_skip(self.flow.end):
            raise current.strayed("the end of the forward")
        if not self.part.is_last:
            result = None
        elif origin := self._absence.origin_of(flatten(result)[0]):
            self._absence.refuse(origin, "the loss is computed from it")
        sent = {v: self._sent(current, v) for v in self.part.sends}
        around = None
        if self._hindsight is not None and torch.is_grad_enabled() and self.module.training:
            around = self._hindsight.leave(self.flow)
        return InFlight(leaves, sent, result, around=around)

    def _check_late(self, current: ForwardRun, cause: BaseException | None) -> None:
        """Check a forward that ended early, perhaps at a value read that the trace did not have, or due to `cause`."""
        if self._end == math.inf or current.at != math.ceil(self._end):
            lates = [one for one in self.flow.state.late if one.after == FIRST]
            try:
                check_late(self.flow, self.part, current.at - 0.5, lates)
            except BadInput as error:
                raise cause if isinstance(cause, BadInput) else error from None

    def _saving(self, is_saved: bool) -> AbstractContextManager[Any]:
        memory = memory_of_names(self.module, self.flow.parameters.written) if is_saved else frozenset()
        return copies_of(memory) if memory else nullcontext()

    def _no_gradient(self, current: ForwardRun) -> BadInput:
        last = self.flow.calls[max(current.at - 1, 0)].name
        return split_error(
            wanted=f"no gradient within the forward (torch.autograd.grad) through units of several stages, after "
            f"{last}",
            got=f"one on stage {self.part.stage}, with respect to a tensor of another stage",
            do=lambda say: (
                f"take the gradient within a unit, or set {say.cuts} so that one stage has all units that it "
                "goes through"
            ),
        )

    def _check_shared(self) -> None:
        """Raise BadInput for a hook on a parameter that several stages hold: it would see a part of its gradient."""
        for name, parameter in self.parameters().items():
            if self.names[name] not in self.part.shared:
                continue
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise split_error(
                    wanted=f"no hook on {name}, which several stages hold: each has only a part of its gradient",
                    got="a hook",
                    do=lambda say: (
                        f"set the hook on a tensor computed from it, or set {say.cuts} so that one stage holds it"
                    ),
                )

    def _sent(self, current: ForwardRun, value: CallOutput) -> Tensor:
        tensor = current.given[value] if value in current.given else current.made[value]
        later = (tensor._backward_hooks or {}).keys() - current.hooks.get(value, frozenset())
        if later and any(self.part.owns(reader) for reader in self.flow.readers.get(value, ())):
            raise split_error(
                wanted=f"all readers of the output of {self.flow.calls[value.call].name} in one stage, as a hook is "
                "set on it",
                got=f"some readers in stage {self.part.stage}, and others in later stages",
                do=lambda say: f"set the hook within the unit, or set {say.cuts} so that one stage has all readers",
            )
        for hook in later:  # the stage that reads the tensor has set the same hook, and runs it
            del tensor._backward_hooks[hook]  # type: ignore[union-attr]
        return tensor

    def _refuse_stale(self, name: str) -> NoReturn:
        error = split_error(
            wanted=f"code that runs on stage {self.part.stage} to read only attributes that are current there",
            got=f"{name}, which a unit of another stage may have changed (read at {user_line()})",
            do=lambda say: f"read it in every forward, or set {say.cuts} so that one stage has the change and the read",
        )
        if self._absence.is_on and self._absence.is_over and not self._absence.unit:
            raise Over from error
        self._absence.refused = self._absence.refused or error
        raise error


def laid_out(tensor: Tensor, made: Produced) -> Tensor:
    """Return `tensor` with the strides that it had on the stage that made it."""
    if made.strides is None or sorted(made.strides) != sorted(_permuted(made)):
        return tensor
    return torch.empty_strided(made.shape, made.strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _permuted(made: Produced) -> list[int]:
    """Return the strides that the dims would have if they were laid out densely, in the order of their strides."""
    assert made.strides is not None
    step, found = 1, []
    for stride, size in sorted(zip(made.strides, made.shape, strict=True)):
        found.append(step if size > 1 else stride)
        step *= size
    return found
