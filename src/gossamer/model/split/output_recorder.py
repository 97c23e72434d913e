"""Outputs of a stage's own units that later stages receive: kept as they are made, if they are as in the trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.model.split.call_containers import CallContainers, added_elements
from gossamer.model.split.dataflow import KEPT, CallOutput, SideOutput, UnitCall
from gossamer.model.split.forward_run import ForwardRun
from gossamer.model.split.output_leaf import ArgumentLeaf, OutputLeaf, Produced, PythonLeaf, RepeatedLeaf, TensorLeaf
from gossamer.model.split.pytree import flatten
from gossamer.model.split.split_error import split_error


@dataclass(frozen=True)
class OutputRecorder:
    """The recorder of the outputs and side outputs of unit calls into `ForwardRun.made`."""

    module: nn.Module

    def record(self, run: ForwardRun, call: UnitCall, output: Any, given: Sequence[Any]) -> None:
        """Keep the outputs that later stages receive; raise BadInput unless they are as in the trace."""
        leaves = flatten(output)[0]
        run.check_structure(call, leaves)
        for place, (leaf, came) in enumerate(zip(call.leaves, leaves, strict=True)):
            if isinstance(leaf, RepeatedLeaf) and came is not leaves[leaf.same]:
                raise run.differing(call, place, came, f"its output {leaf.same} again (the same tensor)")
            if isinstance(leaf, ArgumentLeaf) and came is not given[leaf.source]:
                raise run.differing(call, place, came, "its argument itself")
        if call.is_pure:
            self._check_kinds(run, call, leaves)
        self._record_leaves(run, call.leaves, range(len(call.leaves)), leaves)
        for inside in call.insides:
            if inside.attribute and inside.container != KEPT:
                self.record_inside(run, inside, getattr(self.module.get_submodule(inside.module), inside.attribute))

    def record_added(self, run: ForwardRun, call: UnitCall, before: CallContainers) -> None:
        """Keep what the call has added to lists and dicts among its arguments."""
        for inside in (i for i in call.insides if i.container >= 0):
            container = before.given[inside.container]
            if isinstance(container, list):
                self.record_inside(run, inside, container[before.lengths[inside.container]])
                before.lengths[inside.container] += 1
            else:
                self.record_inside(run, inside, container[inside.key])

    def record_kept(self, run: ForwardRun, call: UnitCall, before: CallContainers) -> None:
        """Keep what the call has added to lists and dicts of modules."""
        for inside, container, key in added_elements(self.module, call, before.kept):
            if not any(CallOutput(run.at, place) in run.part.sends for place in inside.places):
                continue
            if container is None:
                raise run.differing(call, -1, "no tensor there", f"a tensor in {inside.attribute}")
            self.record_inside(run, inside, container[key])

    def record_inside(self, run: ForwardRun, inside: SideOutput, output: Any) -> None:
        """Keep the tensors of a side output."""
        leaves = flatten(output)[0]
        if len(leaves) != len(inside.leaves):
            raise run.differing(
                run.flow.calls[run.at], -1, f"{len(leaves)} stored values", f"{len(inside.leaves)} stored values"
            )
        self._record_leaves(run, inside.leaves, inside.places, leaves)

    def _record_leaves(
        self, run: ForwardRun, leaves: Sequence[OutputLeaf], places: Sequence[int], came: Sequence[Any]
    ) -> None:
        for leaf, place, tensor in zip(leaves, places, came, strict=True):
            value = CallOutput(run.at, place)
            if value not in run.part.sends or not isinstance(leaf, TensorLeaf):
                continue
            made = leaf.made
            if not isinstance(tensor, Tensor):  # None this time: the message to placeholders says so
                run.made.setdefault(value, torch.zeros(made.shape, dtype=made.dtype, device=made.device))
            elif made.shape == run.flow.calls[run.at].made(place).shape:
                self._check_like(run, made, tensor)
                run.made[value] = tensor.clone() if made.written else tensor
                run.hooks[value] = frozenset(tensor._backward_hooks or ())

    def _check_kinds(self, run: ForwardRun, call: UnitCall, leaves: Sequence[Any]) -> None:
        for place, (leaf, came) in enumerate(zip(call.leaves, leaves, strict=True)):
            if isinstance(leaf, PythonLeaf) and isinstance(came, Tensor):
                raise run.differing(call, place, came, repr(leaf.value))
            if isinstance(leaf, TensorLeaf) and not isinstance(came, Tensor):
                raise run.differing(call, place, came, "a tensor")

    def _check_like(self, run: ForwardRun, made: Produced, tensor: Tensor) -> None:
        self._check_shape(run, made.shape, tensor)
        call = run.flow.calls[run.at]
        names = ", ".join(vars(tensor))
        if type(tensor) not in (Tensor, nn.Parameter) or any(not name.startswith("_") for name in vars(tensor)):
            what = f"a {type(tensor).__name__} with {f'the attributes {names}' if names else 'more than its elements'}"
            raise run.differing(call, -1, what, "a plain tensor")
        if tensor.dtype != made.dtype:
            raise run.differing(call, -1, f"{tensor.dtype}", f"a tensor of {made.dtype}")
        if tensor.requires_grad and not made.needs_grad:
            raise run.differing(call, -1, "a tensor that requires a gradient", "a tensor without a gradient")

    def _check_shape(self, run: ForwardRun, wanted: tuple[int, ...], tensor: Tensor) -> None:
        if tensor.shape != wanted:
            raise split_error(
                wanted=f"{run.flow.calls[run.at].name} to produce a tensor of shape {wanted} on stage "
                f"{run.part.stage}, as in the traced forward",
                got=f"{tuple(tensor.shape)}: the shape of a tensor between stages may depend on the shapes of a "
                "batch, not on its values",
                do="pad it, or select the elements within the unit that needs them",
            )
