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
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from gossamer.model.split.absent_tensor import AbsentTensor, Over, StageAbsence, user_line
from gossamer.model.split.backward_python import BackwardPython, check_left, runs_in_backward
from gossamer.model.split.boundary_hooks import BoundaryHooks
from gossamer.model.split.checkpoint_regions import CheckpointRegions
from gossamer.model.split.dataflow import (
    FIRST,
    KEPT,
    TOLD,
    CallOutput,
    DataFlow,
    OutputLeaf,
    Produced,
    SideOutput,
    UnitCall,
    containers_of,
)
from gossamer.model.split.in_flight import InFlight
from gossamer.model.split.later_effects import LaterEffects, changes_python
from gossamer.model.split.pytree import TreeShape, flatten
from gossamer.model.split.recompute import buffers_of, detached, nothing_saved, once, once_more, python_of
from gossamer.model.split.saved_copies import copies_of, memory_of_names
from gossamer.model.split.signatures import signature_of
from gossamer.model.split.split_points import StageSpec, canonical_names, check_late, end_of
from gossamer.model.split.stale_attributes import StaleAttributes
from gossamer.model.split.torch_switches import switches_put_back
from gossamer.model.split.value_reads import ValueReads
from gossamer.model.unit_seeds import Keyed
from gossamer.spec.errors import BadInput, bad_input

_NOT_USED = "appears to not have been used in the graph"
_KEY = "plan.mesh.pipe"


@dataclass(slots=True)
class _Turn:
    """The state of one forward while it runs."""

    given: dict[CallOutput, Tensor]  # outputs of placeholders: views of the received tensors
    made: dict[CallOutput, Tensor] = field(default_factory=dict)
    hooks: dict[CallOutput, frozenset[int]] = field(default_factory=dict)  # set by the unit on its outputs
    at: int = 0  # number of the next call
    inside: UnitCall | None = None  # the owned call that is running
    turns: dict[str, int] = field(default_factory=dict)  # of inner modules, in that call
    is_shadow: bool = False  # the call that is running is another stage's
    is_begun: bool = False  # the forward ended within such a call
    is_cut_short: bool = False  # the forward ended early


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
        self._turn: _Turn | None = None
        self._answers: list[Any] = []
        self._absence = StageAbsence(part.stage)
        self._hindsight: BackwardPython | None = None
        self._regions, self._is_again = CheckpointRegions(), False
        self._absence.is_again = self._regions.is_run_again
        self._stale = StaleAttributes(module, self._refuse_stale)
        self._changing: dict[str, bool] = {}  # units that the trace never called -> do they change Python state
        mine = {call.unit for call in flow.calls[part.low : part.high]} if part.high - part.low < flow.end else set()
        changing = frozenset(name for name in mine if changes_python(module.get_submodule(name)))
        self._beginnings = LaterEffects(module, part.stage, changing)
        if len(flow.calls) != part.high - part.low and runs_in_backward(module):
            owned = frozenset(call.unit for call in flow.calls[part.low : part.high])
            held = {path for path, name in self.names.items() if name in part.holds}
            check_left(flow, part)
            self._hindsight = BackwardPython(module, part.stage, owned, frozenset(held), self._stale)
        _hollow_out(module, part.holds | keep, self.names, self._absence)
        self._bordered: dict[str, BoundaryHooks] = {}
        for name in flow.units:
            unit = module.get_submodule(name)
            assert not isinstance(unit.forward, Keyed), "a ghost would not seed: key the randomness of a stage last"
            unit.forward = self._unit(name, unit.forward)  # type: ignore[method-assign]
            self._bordered[name] = BoundaryHooks(name, unit)
        self._wrapped: set[str] = set()
        self._check_shared()
        self.follow(flow, part)

    def follow(self, flow: DataFlow, part: StageSpec) -> None:
        """Use the data flow of another kind of batch from the next forward on: same calls, other shapes and edges.

        Raises BadInput if the stage would have other units or parameters.
        """
        if (part.low, part.high) != (self.part.low, self.part.high) or not part.holds <= self.part.holds:
            raise bad_input(
                wanted=f"batches by which stage {self.part.stage} has the same units",
                got="one of another kind, which takes another way through the model",
                do="give all batches the same keys",
                key=_KEY,
            )
        self.flow, self.part = flow, replace(part, holds=self.part.holds)
        self._end, self._called = end_of(flow, part), {call.unit for call in flow.calls}
        for path in {
            i.module for call in flow.calls for i in call.insides if i.module and not i.attribute
        } - self._wrapped:
            self._wrapped.add(path)
            inner = self.module.get_submodule(path)
            inner.forward = self._inner(path, inner.forward)  # type: ignore[method-assign]

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
        buffers, python = buffers_of(self.module, held, self.flow.written), python_of(self.module)
        with nothing_saved(), once(self.module, python, buffers):
            live = self._forward(run, tensors, is_saved=False)
        again = functools.partial(once_more, forward, self.module, buffers, python)
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
        turn = self._turn = _Turn({v: x.view_as(x) for v, x in leaves.items()})
        result = None
        try:
            with (
                switches_put_back() as switches,
                self._absence.forward(),
                self._stale.looking(),
                self._saving(is_saved),
            ):
                self._advance(turn)
                result = run()
                switches.keep()
        except Over as over:
            turn.is_cut_short = True
            self._stale.ended(self.flow, turn.at + turn.is_begun)
            self._check_late(turn, over.__cause__)
        except RuntimeError as error:
            if _NOT_USED not in str(error) or turn.at == self.flow.end == self.part.high - self.part.low:
                raise
            raise self._no_gradient(turn) from None
        finally:
            self._turn = None
        if not turn.is_cut_short and not self._absence.is_over and not self._may_skip(turn, self.flow.end):
            raise self._strayed(turn, "the end of the forward")
        if not self.part.is_last:
            result = None
        elif origin := self._absence.origin_of(flatten(result)[0]):
            self._absence.refuse(origin, "the loss is computed from it")
        sent = {v: self._sent(turn, v) for v in self.part.sends}
        around = None
        if self._hindsight is not None and torch.is_grad_enabled() and self.module.training:
            around = self._hindsight.leave(self.flow)
        return InFlight(leaves, sent, result, around=around)

    def _check_late(self, turn: _Turn, cause: BaseException | None) -> None:
        """Check a forward that ended early, perhaps at a value read that the trace did not have, or due to `cause`."""
        if self._end == math.inf or turn.at != math.ceil(self._end):
            lates = [one for one in self.flow.late if one.after == FIRST]
            try:
                check_late(self.flow, self.part, turn.at - 0.5, lates)
            except BadInput as error:
                raise cause if isinstance(cause, BadInput) else error from None

    def _saving(self, is_saved: bool) -> AbstractContextManager[Any]:
        memory = memory_of_names(self.module, self.flow.written) if is_saved else frozenset()
        return copies_of(memory) if memory else nullcontext()

    def _no_gradient(self, turn: _Turn) -> BadInput:
        last = self.flow.calls[max(turn.at - 1, 0)].name
        return bad_input(
            wanted=f"no gradient within the forward (torch.autograd.grad) through units of several stages, behind "
            f"{last}",
            got=f"one on stage {self.part.stage}, of what is on another stage",
            do="take it within a unit, or cut so that one stage has all that it goes through",
            key=_KEY,
        )

    def _check_shared(self) -> None:
        """Raise BadInput for a hook on a parameter that several stages hold: it would see a part of its gradient."""
        for name, parameter in self.parameters().items():
            if self.names[name] not in self.part.shared:
                continue
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise bad_input(
                    wanted=f"{name}, which several stages hold, without hooks: each has a part of its gradient",
                    got="a hook on it",
                    do="change the gradient of what is computed from it, or cut so that one stage holds it",
                    key=_KEY,
                )

    def _sent(self, turn: _Turn, value: CallOutput) -> Tensor:
        tensor = turn.given[value] if value in turn.given else turn.made[value]
        later = (tensor._backward_hooks or {}).keys() - turn.hooks.get(value, frozenset())
        if later and any(self.part.owns(reader) for reader in self.flow.readers.get(value, ())):
            raise bad_input(
                wanted=f"the readers of {self.flow.calls[value.call].name} in one stage, for a hook is set on it",
                got=f"some of them in stage {self.part.stage}, and others behind it",
                do="set the hook within the unit, or cut so that one stage has all readers",
                key=_KEY,
            )
        for hook in later:  # the stage that reads the tensor has set the same hook, and runs it
            del tensor._backward_hooks[hook]  # type: ignore[union-attr]
        return tensor

    def _advance(self, turn: _Turn) -> None:
        """Note whether a unit of this stage is still to run."""
        self._absence.is_over = turn.at >= self.part.high and not self.part.is_last

    def _unit(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        signature = signature_of(real)

        @functools.wraps(real)
        def forward(*args: Any, **kwargs: Any) -> Any:
            turn = self._turn
            is_again = torch._C._current_graph_task_id() != -1  # recomputed in a backward
            if self._is_again or (turn is not None and turn.inside is not None) or (turn is None and not is_again):
                return real(*args, **kwargs)  # within a unit
            if turn is None or is_again:
                return self._once_more(name, real, (args, kwargs))
            if signature is not None:
                signature.bind(*args, **kwargs)  # raises TypeError, as the unit does on its own stage
            if self._is_extra(name) and self._absence.refused is None:
                return self._extra(turn, name, real, (args, kwargs))
            call = self._next(turn, name)
            if self.part.owns(turn.at):
                output = self._own(turn, call, real, (args, kwargs))
            elif not call.is_python:
                output = self._ghost(turn, call, args, kwargs)
            else:
                output = self._shadow(turn, call, real, (args, kwargs))
            self._regions.note(output, is_own=self.part.owns(turn.at), is_shadow=call.is_python)
            turn.at += 1
            self._advance(turn)
            return output

        return forward

    def _once_more(self, name: str, real: Callable[..., Any], given: tuple[Any, Any]) -> Any:
        """Run the call of a unit in a checkpointed region that a backward runs again."""
        if (ghostly := self._regions.next()) is not None:
            return ghostly.again(name)
        self._is_again, self._absence.unit = True, name
        try:
            return real(*given[0], **given[1])
        finally:
            self._is_again, self._absence.unit = False, ""

    def _own(self, turn: _Turn, call: UnitCall, real: Callable[..., Any], given: tuple[Any, Any]) -> Any:
        """Run the unit itself, which this stage owns, and keep the outputs that later stages read."""
        turn.inside, turn.turns = call, {}
        self._absence.unit = call.name
        arguments = flatten(given)[0]
        containers = containers_of(given)
        lengths = [len(container) for container in containers]
        kept = self._kept_lengths(call)
        looks = ValueReads()
        self._beginnings.begin(self.flow, turn.at, given)
        try:
            with looks.noting() if call.is_told and call.is_python else nullcontext():
                output = self._bordered[call.unit].forward(real, *given)
        finally:
            turn.inside, self._absence.unit = None, ""
        self._beginnings.end(self.flow, turn.at)
        self._keep(turn, call, output, arguments)
        self._keep_added(turn, call, containers, lengths)
        self._keep_kept(turn, call, kept)
        if (told := CallOutput(turn.at, TOLD)) in self.part.sends:
            if not call.is_python:
                looks = ValueReads.of_kinds(flatten(output)[0], call.leaves)
            turn.made[told] = looks.to_bytes(call.name, call.made(TOLD).device)
        return output

    def _extra(self, turn: _Turn, name: str, real: Callable[..., Any], given: tuple[Any, Any]) -> Any:
        turn.inside, self._absence.unit = UnitCall(name, 0, (), flatten(())[1]), name
        try:
            return self._bordered[name].forward(real, *given)
        finally:
            turn.inside, self._absence.unit = None, ""

    def _shadow(self, turn: _Turn, call: UnitCall, real: Callable[..., Any], given: tuple[Any, Any]) -> Any:
        """Run the forward of another stage's unit on absent and received tensors, for its Python effects and values."""
        arguments, containers = flatten(given)[0], containers_of(given)
        lengths = [len(container) for container in containers]
        kept = self._kept_lengths(call)
        told = turn.given.get(CallOutput(turn.at, TOLD)) if call.is_told else None
        looks = ValueReads.of_bytes(told) if told is not None else ValueReads()
        turn.inside, turn.turns, turn.is_shadow = call, {}, True
        self._absence.told = looks.of_method if told is not None else None
        try:
            with looks.telling() if told is not None else nullcontext():
                output = getattr(real, "_torchdynamo_orig_callable", real)(*given[0], **given[1])
        except Over:
            turn.is_begun = True
            raise
        finally:
            turn.inside, turn.is_shadow, self._absence.told = None, False, None
        self._place_insides(turn, call, containers, lengths)
        self._place_kept(turn, call, kept)
        leaves, spec = flatten(output)
        self._check_structure(turn, call, leaves)
        placed: list[Any] = []
        for place, (leaf, came) in enumerate(zip(call.leaves, leaves, strict=True)):
            is_first = leaf.same is None or came is not leaves[leaf.same]
            placed.append(self._placed(turn, leaf, place, came, arguments) if is_first else placed[leaf.same or 0])
        return spec.fill(placed)

    def _placed(self, turn: _Turn, leaf: OutputLeaf, place: int, came: Any, given: Sequence[Any]) -> Any:
        is_there = isinstance(came, Tensor) and leaf.made is not None and CallOutput(turn.at, place) in turn.given
        if isinstance(came, AbsentTensor):
            came.origin = self._origin(turn, place)
        return self._leaf(turn, leaf, place, given) if is_there else came

    def _place_insides(self, turn: _Turn, call: UnitCall, containers: list[Any], lengths: list[int]) -> None:
        for inside in call.insides:
            if inside.container >= 0:
                container = containers[inside.container]
                key = inside.key
                if isinstance(container, list):
                    key = lengths[inside.container]
                    lengths[inside.container] += 1
                if key in range(len(container)) if isinstance(container, list) else key in container:
                    container[key] = self._received(turn, inside, container[key])
            elif inside.attribute and inside.container != KEPT:
                target = self.module.get_submodule(inside.module)
                setattr(target, inside.attribute, self._received(turn, inside, getattr(target, inside.attribute)))

    def _kept_lengths(self, call: UnitCall) -> dict[tuple[str, str], int]:
        """Return the lengths of the lists and dicts of modules that a call may put tensors into."""
        places = {(i.module, i.attribute) for i in call.insides if i.container == KEPT}
        return {place: len(self._kept_at(*place) or ()) for place in places}

    def _kept_at(self, path: str, attribute: str) -> Any:
        found = vars(self.module.get_submodule(path)).get(attribute)  # not by getattr, which checks for old values
        return found if isinstance(found, list | dict) else None

    def _put_there(self, call: UnitCall, lengths: dict[tuple[str, str], int]) -> Iterator[tuple[SideOutput, Any, Any]]:
        """Yield each side output with its list or dict and its key; None if the call added nothing this time."""
        for inside in (i for i in call.insides if i.container == KEPT):
            place = inside.module, inside.attribute
            container, key = self._kept_at(*place), inside.key
            if isinstance(container, list):
                key = lengths[place]
                lengths[place] += 1
            is_there = key in range(len(container)) if isinstance(container, list) else key in (container or ())
            yield inside, container if is_there else None, key

    def _place_kept(self, turn: _Turn, call: UnitCall, lengths: dict[tuple[str, str], int]) -> None:
        for inside, container, key in self._put_there(call, lengths):
            if container is not None:
                container[key] = self._received(turn, inside, container[key])

    def _keep_kept(self, turn: _Turn, call: UnitCall, lengths: dict[tuple[str, str], int]) -> None:
        for inside, container, key in self._put_there(call, lengths):
            if not any(CallOutput(turn.at, place) in self.part.sends for place in inside.places):
                continue
            if container is None:
                raise self._another(call, -1, "nothing put there", f"a tensor in {inside.attribute}")
            self._keep_inside(turn, inside, container[key])

    def _received(self, turn: _Turn, inside: SideOutput, came: Any) -> Any:
        """Return a side output of a shadow run, with the received tensors in it."""
        leaves, spec = flatten(came)
        if not any(CallOutput(turn.at, place) in turn.given for place in inside.places) or len(leaves) != len(
            inside.leaves
        ):
            return came
        pairs = zip(inside.leaves, inside.places, leaves, strict=True)
        return spec.fill([self._placed(turn, leaf, place, x, ()) for leaf, place, x in pairs])

    def _next(self, turn: _Turn, name: str) -> UnitCall:
        if self._absence.refused is not None:
            raise self._absence.refused  # the model's code caught the error
        there = (i for i in range(turn.at, self.flow.end) if self.flow.calls[i].unit == name)
        if (at := next(there, None)) is None or not self._may_skip(turn, at):
            error = self._strayed(turn, name)
            if self._absence.is_over:
                raise Over from error
            raise error
        turn.at = at
        return self.flow.calls[at]

    def _may_skip(self, turn: _Turn, until: int) -> bool:
        """Return whether calls may be left out in this forward: only this stage depends on them."""
        left_out = range(turn.at, until)
        return all(map(self.part.owns, left_out)) and not any(value.call in left_out for value in self.part.sends)

    def _is_extra(self, name: str) -> bool:
        """Return whether the call is of a unit that the trace never called: the last stage owns those."""
        if not self.part.is_last or name in self._called:
            return False
        if name not in self._changing:
            self._changing[name] = changes_python(self.module.get_submodule(name))
        return not self._changing[name]

    def _strayed(self, turn: _Turn, came: str) -> BadInput:
        wanted = self.flow.calls[turn.at].name if turn.at < self.flow.end else "the end of the forward"
        return bad_input(
            wanted=f"{wanted} to come next in the forward on stage {self.part.stage}, as when the model was cut",
            got=f"{came}: it took another way",
            do="call the same units in every forward, and let each decide within itself what it does",
            key=_KEY,
        )

    def _refuse_stale(self, name: str) -> NoReturn:
        error = bad_input(
            wanted=f"code that runs on stage {self.part.stage} to read what it read when the model was cut",
            got=f"{name}, which a unit of another stage may have changed (from {user_line()})",
            do="let the model's own code change it or read it in every forward, or cut so that one stage has both",
            key=_KEY,
        )
        if self._absence.is_on and self._absence.is_over and not self._absence.unit:
            raise Over from error
        self._absence.refused = self._absence.refused or error
        raise error

    def _ghost(self, turn: _Turn, call: UnitCall, args: Any, kwargs: Any) -> Any:
        self._stale.passed(self.flow, turn.at)
        given, containers = flatten((args, kwargs))[0], containers_of((args, kwargs))
        kinds, kept = self._kinds(turn, call), self._kept_lengths(call)
        for inside in (i for i in call.insides if i.container != KEPT):
            structure = self._filled(turn, inside.leaves, inside.places, inside.spec, given)
            target = self.module.get_submodule(inside.module)
            if inside.container >= 0:
                _put(containers[inside.container], inside.key, structure)
            elif inside.attribute:
                setattr(target, inside.attribute, structure)
            else:
                self._answers.append(structure)
                target()  # runs its forward hooks on `structure`
        self._place_kept(turn, call, kept)  # tensors that hooks have added
        leaves: list[Any] = []
        for place, leaf in enumerate(call.leaves):
            leaves.append(self._leaf(turn, leaf, place, given, leaves))
        for place, kind in kinds.items():
            made = Produced(kind[0], kind[1], call.made(TOLD).device, needs_grad=False) if kind else None
            leaves[place] = self._absence.tensor(made, self._origin(turn, place)) if made else None
        return call.spec.fill(leaves)

    def _kinds(self, turn: _Turn, call: UnitCall) -> dict[int, tuple[tuple[int, ...], torch.dtype] | None]:
        """Return the outputs of a call that this time are of another kind than in the trace, by place."""
        if not call.is_told:
            return {}
        told = turn.given.get(CallOutput(turn.at, TOLD))
        if told is None:  # it runs on a later stage
            raise Over
        return ValueReads.of_bytes(told).kinds()

    def _filled(
        self, turn: _Turn, leaves: Sequence[OutputLeaf], places: Sequence[int], spec: TreeShape, given: Any = ()
    ) -> Any:
        return spec.fill([self._leaf(turn, a, p, given) for a, p in zip(leaves, places, strict=True)])

    def _leaf(self, turn: _Turn, leaf: OutputLeaf, place: int, given: Sequence[Any], before: Sequence[Any] = ()) -> Any:
        if leaf.same is not None:
            return before[leaf.same]
        if leaf.made is None:
            return leaf.constant if leaf.source is None else given[leaf.source]
        received = turn.given.get(CallOutput(turn.at, place))
        if leaf.source is not None:  # other holders of the argument see the unit's write
            return self._written(given[leaf.source], received, self._origin(turn, place))
        if received is None or received.numel() != math.prod(leaf.made.shape):
            return self._absence.tensor(leaf.made, self._origin(turn, place))
        if received.shape != leaf.made.shape:  # the same memory in other dims, where a hook sees it so
            received = received.view(leaf.made.shape)
        return received.clone() if leaf.made.written else received

    def _written(self, given: Tensor, received: Tensor | None, origin: str) -> Tensor:
        """Return an argument that the unit has changed in place."""
        if received is None:
            self._absence.mark(given, origin)
            return given
        return received if isinstance(given, AbsentTensor) else given.copy_(received)

    def _origin(self, turn: _Turn, place: int) -> str:
        call = self.flow.calls[turn.at]
        if len(call.leaves) == 1 or place >= len(call.leaves):
            return f"what {call.name} gives" if place < len(call.leaves) else f"what {call.name} keeps or hands on"
        return f"output {place} of {call.name}"

    def _inner(self, path: str, real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._answers:
                return self._answers.pop()
            output = real(*args, **kwargs)
            turn = self._turn
            if turn is not None and turn.inside is not None:
                time = turn.turns.get(path, 0)
                turn.turns[path] = time + 1
                for inside in turn.inside.insides:
                    if (inside.module, inside.turn, inside.attribute) == (path, time, ""):
                        if turn.is_shadow:
                            output = self._received(turn, inside, output)
                        else:
                            self._keep_inside(turn, inside, output)
            return output

        return forward

    def _keep(self, turn: _Turn, call: UnitCall, output: Any, given: Sequence[Any]) -> None:
        """Keep the outputs that later stages receive; raise BadInput unless they are as in the trace."""
        leaves = flatten(output)[0]
        self._check_structure(turn, call, leaves)
        for place, (leaf, came) in enumerate(zip(call.leaves, leaves, strict=True)):
            if leaf.same is not None and came is not leaves[leaf.same]:
                raise self._another(call, place, came, f"its output {leaf.same} once more")
            if leaf.source is not None and leaf.made is None and came is not given[leaf.source]:
                raise self._another(call, place, came, "its argument, as it was")
        if call.is_pure:
            self._check_kinds(turn, call, leaves)
        self._keep_leaves(turn, call.leaves, range(len(call.leaves)), leaves)
        for inside in call.insides:
            if inside.attribute and inside.container != KEPT:
                self._keep_inside(turn, inside, getattr(self.module.get_submodule(inside.module), inside.attribute))

    def _check_kinds(self, turn: _Turn, call: UnitCall, leaves: Sequence[Any]) -> None:
        for place, (leaf, came) in enumerate(zip(call.leaves, leaves, strict=True)):
            if leaf.made is None and leaf.source is None and leaf.same is None and isinstance(came, Tensor):
                raise self._another(call, place, came, repr(leaf.constant))
            if leaf.made is not None and not isinstance(came, Tensor):
                raise self._another(call, place, came, "a tensor")

    def _check_structure(self, turn: _Turn, call: UnitCall, leaves: Sequence[Any]) -> None:
        if len(leaves) != len(call.leaves):
            raise self._another(call, -1, f"{len(leaves)} tensors and values", str(len(call.leaves)))

    def _another(self, call: UnitCall, place: int, came: Any, wanted: str) -> BadInput:
        which = f" as its output {place}" if place >= 0 and len(call.leaves) > 1 else ""
        got = f"a tensor {tuple(came.shape)}" if isinstance(came, Tensor) else came if place < 0 else repr(came)
        return bad_input(
            wanted=f"{call.name} to give {wanted}{which} on stage {self.part.stage}, as when the model was cut",
            got=str(got),
            do="let it give the same kind of thing every time, or cut so that one stage has it and what reads that",
            key=_KEY,
        )

    def _keep_added(self, turn: _Turn, call: UnitCall, containers: list[Any], lengths: list[int]) -> None:
        for inside in (i for i in call.insides if i.container >= 0):
            container = containers[inside.container]
            if isinstance(container, list):
                self._keep_inside(turn, inside, container[lengths[inside.container]])
                lengths[inside.container] += 1
            else:
                self._keep_inside(turn, inside, container[inside.key])

    def _keep_inside(self, turn: _Turn, inside: SideOutput, output: Any) -> None:
        leaves = flatten(output)[0]
        if len(leaves) != len(inside.leaves):
            raise self._another(self.flow.calls[turn.at], -1, f"{len(leaves)} values kept", str(len(inside.leaves)))
        self._keep_leaves(turn, inside.leaves, inside.places, leaves)

    def _keep_leaves(
        self, turn: _Turn, leaves: Sequence[OutputLeaf], places: Sequence[int], came: Sequence[Any]
    ) -> None:
        for leaf, place, tensor in zip(leaves, places, came, strict=True):
            value, made = CallOutput(turn.at, place), leaf.made
            if value not in self.part.sends or made is None:
                continue
            if not isinstance(tensor, Tensor):  # None this time: the message to placeholders says so
                turn.made.setdefault(value, torch.zeros(made.shape, dtype=made.dtype, device=made.device))
            elif made.shape == self.flow.calls[turn.at].made(place).shape:
                self._check_like(turn, made, tensor)
                turn.made[value] = tensor.clone() if made.written else tensor
                turn.hooks[value] = frozenset(tensor._backward_hooks or ())

    def _check_like(self, turn: _Turn, made: Produced, tensor: Tensor) -> None:
        self._check_shape(turn, made.shape, tensor)
        call = self.flow.calls[turn.at]
        if type(tensor) not in (Tensor, nn.Parameter) or any(not name.startswith("_") for name in vars(tensor)):
            what = f"a {type(tensor).__name__} with {', '.join(vars(tensor)) or 'more to it than numbers'}"
            raise self._another(call, -1, what, "a plain tensor")
        if tensor.dtype != made.dtype:
            raise self._another(call, -1, f"{tensor.dtype}", f"a tensor of {made.dtype}")
        if tensor.requires_grad and not made.needs_grad:
            raise self._another(call, -1, "one with a gradient to come", "a tensor without a gradient")

    def _check_shape(self, turn: _Turn, wanted: tuple[int, ...], tensor: Tensor) -> None:
        if tensor.shape != wanted:
            raise bad_input(
                wanted=f"{self.flow.calls[turn.at].name} to give {wanted} on stage {self.part.stage}, as when the "
                "model was cut",
                got=f"{tuple(tensor.shape)}: what crosses between stages may depend on the shapes of a batch, not on "
                "its values",
                do="pad it, or pick out what is needed within a unit",
                key=_KEY,
            )


def _put(container: MutableMapping[Any, Any] | list[Any], key: Any, held: Any) -> None:
    if isinstance(container, list):
        container.append(held)
    else:
        container[key] = held


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


def _hollow_out(module: nn.Module, holds: frozenset[str], names: Mapping[str, str], absence: StageAbsence) -> None:
    """Replace every parameter and buffer outside `holds` by an absent one; tied ones stay tied."""
    empty: dict[str, Tensor] = {}
    for path, owner in module.named_modules():
        for name, tensor in [*owner._parameters.items(), *owner._buffers.items()]:
            canonical = names.get(f"{path}.{name}" if path else name, "")
            if tensor is None or canonical in holds:
                continue
            if canonical not in empty:
                kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
                empty[canonical] = absence.like(tensor, f"the {kind} {canonical or name}")
            setattr(owner, name, empty[canonical])
