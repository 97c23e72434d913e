"""Outputs of other stages' units, as placeholders and shadow runs give them: received, passed through or absent."""

from __future__ import annotations

import math
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.model.split.absent_tensor import AbsentTensor, Over, StageAbsence
from gossamer.model.split.call_containers import CallContainers, added_elements, kept_lengths
from gossamer.model.split.dataflow import (
    KEPT,
    TOLD,
    CallOutput,
    SideOutput,
    UnitCall,
    containers_of,
)
from gossamer.model.split.forward_run import ForwardRun
from gossamer.model.split.output_leaf import (
    ArgumentLeaf,
    OutputLeaf,
    OverwrittenLeaf,
    Produced,
    PythonLeaf,
    RepeatedLeaf,
    TensorLeaf,
)
from gossamer.model.split.pytree import TreeShape, flatten
from gossamer.model.split.value_reads import ValueReads


@dataclass(frozen=True)
class PlaceholderOutputs:
    """The outputs that units of other stages have on this stage, and the side outputs that they leave.

    `answers`: outputs of inner modules that are about to be called for their forward hooks.
    """

    module: nn.Module
    absence: StageAbsence
    answers: list[Any] = field(default_factory=list)

    def give(self, run: ForwardRun, call: UnitCall, args: Any, kwargs: Any) -> Any:
        """Return what a unit of another stage would return, and leave its side outputs where it would."""
        given, containers = flatten((args, kwargs))[0], containers_of((args, kwargs))
        kinds, kept = self._kinds(run, call), kept_lengths(self.module, call)
        for inside in (i for i in call.insides if i.container != KEPT):
            structure = self._filled(run, inside.leaves, inside.places, inside.spec, given)
            target = self.module.get_submodule(inside.module)
            if inside.container >= 0:
                _put(containers[inside.container], inside.key, structure)
            elif inside.attribute:
                setattr(target, inside.attribute, structure)
            else:
                self.answers.append(structure)
                target()  # runs its forward hooks on `structure`
        self._place_kept(run, call, kept)  # tensors that hooks have added
        leaves: list[Any] = []
        for place, leaf in enumerate(call.leaves):
            leaves.append(self._leaf(run, leaf, place, given, leaves))
        for place, kind in kinds.items():
            made = Produced(kind[0], kind[1], call.made(TOLD).device, needs_grad=False) if kind else None
            leaves[place] = self.absence.tensor(made, run.origin(place)) if made else None
        return call.spec.fill(leaves)

    def complete(
        self, run: ForwardRun, call: UnitCall, output: Any, arguments: Sequence[Any], before: CallContainers
    ) -> Any:
        """Return the output of a shadow run with the received tensors in it, and put them into its side outputs."""
        self._place_insides(run, call, before)
        self._place_kept(run, call, before.kept)
        leaves, spec = flatten(output)
        run.check_structure(call, leaves)
        placed: list[Any] = []
        for place, (leaf, came) in enumerate(zip(call.leaves, leaves, strict=True)):
            if isinstance(leaf, RepeatedLeaf) and came is leaves[leaf.same]:
                placed.append(placed[leaf.same])
            else:
                placed.append(self._placed(run, leaf, place, came, arguments))
        return spec.fill(placed)

    def _kinds(self, run: ForwardRun, call: UnitCall) -> dict[int, tuple[tuple[int, ...], torch.dtype] | None]:
        """Return the outputs of a call that this time are of another kind than in the trace, by place."""
        if not call.is_told:
            return {}
        told = run.given.get(CallOutput(run.at, TOLD))
        if told is None:  # it runs on a later stage
            raise Over
        return ValueReads.of_bytes(told).kinds()

    def _filled(
        self, run: ForwardRun, leaves: Sequence[OutputLeaf], places: Sequence[int], spec: TreeShape, given: Any = ()
    ) -> Any:
        return spec.fill([self._leaf(run, a, p, given) for a, p in zip(leaves, places, strict=True)])

    def _leaf(
        self, run: ForwardRun, leaf: OutputLeaf, place: int, given: Sequence[Any], before: Sequence[Any] = ()
    ) -> Any:
        if isinstance(leaf, RepeatedLeaf):
            return before[leaf.same]
        if isinstance(leaf, ArgumentLeaf):
            return given[leaf.source]
        if isinstance(leaf, PythonLeaf):
            return leaf.value
        assert isinstance(leaf, TensorLeaf)
        received = run.given.get(CallOutput(run.at, place))
        if isinstance(leaf, OverwrittenLeaf):  # other holders of the argument see the unit's write
            return self._written(given[leaf.source], received, run.origin(place))
        if received is None or received.numel() != math.prod(leaf.made.shape):
            return self.absence.tensor(leaf.made, run.origin(place))
        if received.shape != leaf.made.shape:  # the same memory in other dims, where a hook sees it so
            received = received.view(leaf.made.shape)
        return received.clone() if leaf.made.written else received

    def _written(self, given: Tensor, received: Tensor | None, origin: str) -> Tensor:
        """Return an argument that the unit has changed in place."""
        if received is None:
            self.absence.mark(given, origin)
            return given
        return received if isinstance(given, AbsentTensor) else given.copy_(received)

    def _placed(self, run: ForwardRun, leaf: OutputLeaf, place: int, came: Any, given: Sequence[Any]) -> Any:
        is_there = isinstance(came, Tensor) and isinstance(leaf, TensorLeaf) and CallOutput(run.at, place) in run.given
        if isinstance(came, AbsentTensor):
            came.origin = run.origin(place)
        return self._leaf(run, leaf, place, given) if is_there else came

    def _place_insides(self, run: ForwardRun, call: UnitCall, before: CallContainers) -> None:
        for inside in call.insides:
            if inside.container >= 0:
                container = before.given[inside.container]
                key = inside.key
                if isinstance(container, list):
                    key = before.lengths[inside.container]
                    before.lengths[inside.container] += 1
                if key in range(len(container)) if isinstance(container, list) else key in container:
                    container[key] = self.received(run, inside, container[key])
            elif inside.attribute and inside.container != KEPT:
                target = self.module.get_submodule(inside.module)
                setattr(target, inside.attribute, self.received(run, inside, getattr(target, inside.attribute)))

    def _place_kept(self, run: ForwardRun, call: UnitCall, lengths: dict[tuple[str, str], int]) -> None:
        for inside, container, key in added_elements(self.module, call, lengths):
            if container is not None:
                container[key] = self.received(run, inside, container[key])

    def received(self, run: ForwardRun, inside: SideOutput, came: Any) -> Any:
        """Return a side output of a shadow run, with the received tensors in it."""
        leaves, spec = flatten(came)
        if not any(CallOutput(run.at, place) in run.given for place in inside.places) or len(leaves) != len(
            inside.leaves
        ):
            return came
        pairs = zip(inside.leaves, inside.places, leaves, strict=True)
        return spec.fill([self._placed(run, leaf, place, x, ()) for leaf, place, x in pairs])


def _put(container: MutableMapping[Any, Any] | list[Any], key: Any, held: Any) -> None:
    if isinstance(container, list):
        container.append(held)
    else:
        container[key] = held
