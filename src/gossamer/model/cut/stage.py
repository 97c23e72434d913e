"""A stage: the user's whole forward, in which what other stages own are ghosts.

A ghost holds no storage and returns what the real unit would have: the tensor received from an earlier stage, the
argument that the unit passed through, or an absent tensor where nothing of this stage depends on it. The module objects
stay, with their attributes and hooks; only their parameters are absent and their `forward` is another. Every stage runs
the forward to its end, so that what the model keeps (counters, switches, memories) is what one process would keep.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.model.cut.absent import Absence, Absent, Over
from gossamer.model.cut.again import buffers_of, detached, nothing_saved, once_more
from gossamer.model.cut.cuts import Part, canonical_names
from gossamer.model.cut.flow import Call, Flow, Inside, Leaf, Value, containers_of
from gossamer.model.cut.live import Live
from gossamer.model.cut.switches import switches_put_back
from gossamer.model.cut.tree import Shape, flatten
from gossamer.model.randomness import Keyed
from gossamer.spec.errors import BadInput, bad_input

_KEY = "plan.mesh.pipe"


@dataclass(slots=True)
class _Turn:
    """One forward while it runs."""

    given: dict[Value, Tensor]  # what ghosts return: views of what was received
    made: dict[Value, Tensor] = field(default_factory=dict)
    at: int = 0  # number of the next call
    inside: Call | None = None  # the owned call that is running
    turns: dict[str, int] = field(default_factory=dict)  # of inner modules, in that call
    is_cut_short: bool = False  # it ended before its end


class Stage:
    """`module` as stage `part` of `flow`; the module is changed in place, and cannot be used as before.

    One module may be several stages: then `keep` names what all of them hold.
    """

    def __init__(self, module: nn.Module, flow: Flow, part: Part, *, keep: frozenset[str] = frozenset()) -> None:
        self.module, self.flow, self.part = module, flow, part
        self.names = canonical_names(module)
        self._turn: _Turn | None = None
        self._answers: list[Any] = []
        self._absence = Absence(part.stage)
        _hollow_out(module, part.holds | keep, self.names, self._absence)
        for name in flow.units:
            unit = module.get_submodule(name)
            assert not isinstance(unit.forward, Keyed), "a ghost would not seed: key the randomness of a stage last"
            unit.forward = self._unit(name, unit.forward)  # type: ignore[method-assign]
        self._wrapped: set[str] = set()
        self.follow(flow, part)

    def follow(self, flow: Flow, part: Part) -> None:
        """From the next forward on, batches are of another kind: the same calls, with other shapes and edges."""
        if (part.low, part.high) != (self.part.low, self.part.high) or not part.holds <= self.part.holds:
            raise bad_input(
                wanted=f"batches by which stage {self.part.stage} has the same units",
                got="one of another kind, which takes another way through the model",
                do="give all batches the same keys",
                key=_KEY,
            )
        self.flow, self.part = flow, replace(part, holds=self.part.holds)
        for path in {
            i.module for call in flow.calls for i in call.insides if i.module and not i.attribute
        } - self._wrapped:
            self._wrapped.add(path)
            inner = self.module.get_submodule(path)
            inner.forward = self._inner(path, inner.forward)  # type: ignore[method-assign]

    def parameters(self) -> dict[str, nn.Parameter]:
        """What this stage holds, by canonical name."""
        return {name: p for name, p in self.module.named_parameters() if self.names[name] in self.part.holds}

    def receive(self, tensors: Mapping[Value, Tensor]) -> dict[Value, Tensor]:
        """Leaves of a graph, of what came over the wire."""
        made = {v: self.flow.calls[v.call].made(v.place) for v in self.part.receives}
        return {v: tensors[v].detach().requires_grad_(m.needs_grad) for v, m in made.items()}

    def forward(self, run: Callable[[], Any], tensors: Mapping[Value, Tensor], *, keep_graph: bool = True) -> Live:
        """Run this stage's part of `run`, which calls `self.module`, on what stage - 1 sent.

        Without `keep_graph` only what was received is kept, and `Live.recompute` comes before the backward.
        """
        if keep_graph:
            return self._forward(run, tensors)
        received = {v: tensors[v] for v in self.part.receives}
        forward = functools.partial(self._way_of, self.flow, self.part, run, received)
        held = {path for path, name in self.names.items() if name in self.part.holds}
        buffers = buffers_of(self.module, held)
        with nothing_saved():
            live = self._forward(run, tensors)
        again = functools.partial(once_more, forward, buffers)
        return Live({}, detached(live.sent), detached(live.result), again)

    def _way_of(self, flow: Flow, part: Part, run: Callable[[], Any], tensors: Mapping[Value, Tensor]) -> Live:
        """The forward of a batch, when `follow` may have gone on to others."""
        now = self.flow, self.part
        self.flow, self.part = flow, part
        try:
            return self._forward(run, tensors)
        finally:
            self.flow, self.part = now

    def _forward(self, run: Callable[[], Any], tensors: Mapping[Value, Tensor]) -> Live:
        leaves = self.receive(tensors)
        # A view of each: autocast caches leaves as if they were weights, and would add their gradients in bf16.
        turn = self._turn = _Turn({v: x.view_as(x) for v, x in leaves.items()})
        result = None
        try:
            with switches_put_back() as switches, self._absence.forward():
                self._advance(turn)
                result = run()
                switches.keep()
        except Over:
            turn.is_cut_short = True
        finally:
            self._turn = None
        if not turn.is_cut_short and turn.at != self.flow.end:
            raise self._strayed(turn, "the end of the forward")
        if not self.part.is_last:
            result = None
        elif origin := self._absence.origin_of(flatten(result)[0]):
            self._absence.refuse(origin, "the loss is computed from it")
        sent = {v: self._sent(turn, v, leaves) for v in self.part.sends}
        return Live(leaves, sent, result)

    def _sent(self, turn: _Turn, value: Value, leaves: Mapping[Value, Tensor]) -> Tensor:
        if value in turn.given:
            return turn.given[value]
        return turn.made[value]

    def _advance(self, turn: _Turn) -> None:
        """Whether a unit of this stage is still to run."""
        self._absence.is_over = turn.at >= self.part.high and not self.part.is_last

    def _unit(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def forward(*args: Any, **kwargs: Any) -> Any:
            turn = self._turn
            if turn is None or turn.inside is not None or torch._C._current_graph_task_id() != -1:
                return real(*args, **kwargs)  # within a unit, or recomputed in a backward
            call = self._next(turn, name)
            if not self.part.owns(turn.at):
                output = self._ghost(turn, call, args, kwargs)
            else:
                turn.inside, turn.turns = call, {}
                self._absence.unit = call.name
                containers = containers_of((args, kwargs))
                lengths = [len(container) for container in containers]
                try:
                    output = real(*args, **kwargs)
                finally:
                    turn.inside, self._absence.unit = None, ""
                self._keep(turn, call, output)
                self._keep_added(turn, call, containers, lengths)
            turn.at += 1
            self._advance(turn)
            return output

        return forward

    def _next(self, turn: _Turn, name: str) -> Call:
        if self._absence.refused is not None:
            raise self._absence.refused  # the model's code caught it
        call = self.flow.calls[turn.at] if turn.at < self.flow.end else None
        if call is None or call.unit != name:
            raise self._strayed(turn, name)
        return call

    def _strayed(self, turn: _Turn, came: str) -> BadInput:
        wanted = self.flow.calls[turn.at].name if turn.at < self.flow.end else "the end of the forward"
        return bad_input(
            wanted=f"{wanted} to come next in the forward on stage {self.part.stage}, as when the model was cut",
            got=f"{came}: it took another way",
            do="call the same units in every forward, and let each decide within itself what it does",
            key=_KEY,
        )

    def _ghost(self, turn: _Turn, call: Call, args: Any, kwargs: Any) -> Any:
        given, containers = flatten((args, kwargs))[0], containers_of((args, kwargs))
        for inside in call.insides:
            structure = self._filled(turn, inside.leaves, inside.places, inside.spec, given)
            target = self.module.get_submodule(inside.module)
            if inside.container >= 0:
                _put(containers[inside.container], inside.key, structure)
            elif inside.attribute:
                setattr(target, inside.attribute, structure)
            else:
                self._answers.append(structure)
                target()  # its hooks take it from there
        return self._filled(turn, call.leaves, range(len(call.leaves)), call.spec, given)

    def _filled(self, turn: _Turn, leaves: Sequence[Leaf], places: Sequence[int], spec: Shape, given: Any = ()) -> Any:
        return spec.fill([self._leaf(turn, a, p, given) for a, p in zip(leaves, places, strict=True)])

    def _leaf(self, turn: _Turn, leaf: Leaf, place: int, given: Sequence[Any]) -> Any:
        if leaf.made is None:
            return leaf.constant if leaf.source is None else given[leaf.source]
        received = turn.given.get(Value(turn.at, place))
        if leaf.source is not None:  # whoever else holds the argument finds in it what the unit has written
            return self._written(given[leaf.source], received, self._origin(turn, place))
        if received is None or received.numel() != math.prod(leaf.made.shape):
            return self._absence.tensor(leaf.made, self._origin(turn, place))
        if received.shape != leaf.made.shape:  # the same memory in other dims, where a hook sees it so
            received = received.view(leaf.made.shape)
        return received.clone() if leaf.made.written else received

    def _written(self, given: Tensor, received: Tensor | None, origin: str) -> Tensor:
        """An argument that the unit has changed in place."""
        if received is None:
            self._absence.mark(given, origin)
            return given
        return received if isinstance(given, Absent) else given.copy_(received)

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
                        self._keep_inside(turn, inside, output)
            return output

        return forward

    def _keep(self, turn: _Turn, call: Call, output: Any) -> None:
        """Remember what later stages will ask for."""
        self._keep_leaves(turn, call.leaves, range(len(call.leaves)), output)
        for inside in call.insides:
            if inside.attribute:
                self._keep_inside(turn, inside, getattr(self.module.get_submodule(inside.module), inside.attribute))

    def _keep_added(self, turn: _Turn, call: Call, containers: list[Any], lengths: list[int]) -> None:
        for inside in (i for i in call.insides if i.container >= 0):
            container = containers[inside.container]
            if isinstance(container, list):
                self._keep_inside(turn, inside, container[lengths[inside.container]])
                lengths[inside.container] += 1
            else:
                self._keep_inside(turn, inside, container[inside.key])

    def _keep_inside(self, turn: _Turn, inside: Inside, output: Any) -> None:
        self._keep_leaves(turn, inside.leaves, inside.places, output)

    def _keep_leaves(self, turn: _Turn, leaves: Sequence[Leaf], places: Sequence[int], output: Any) -> None:
        for leaf, place, tensor in zip(leaves, places, flatten(output)[0], strict=True):
            value = Value(turn.at, place)
            if value not in self.part.sends or leaf.made is None:
                continue
            if leaf.made.shape == self.flow.calls[turn.at].made(place).shape:
                self._check_shape(turn, leaf.made.shape, tensor)
                turn.made[value] = tensor.clone() if leaf.made.written else tensor

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


def _hollow_out(module: nn.Module, holds: frozenset[str], names: Mapping[str, str], absence: Absence) -> None:
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
