"""How far the experts of a pruned model are from those that they were: the term of expert-wise distillation.

Equation: L = CE + lambda D,    D = sum_layers sum_experts mean (E_teacher(x) - E_student(x))^2
Symbols:  x what the student's router sends to an expert, E an expert's output before the router's weight. The teacher
          has no gradient; an expert without tokens adds nothing.
Source:   Xie, Zhang, Zhou, Xie, Song, Liu, Wang, Lin, Xu, MoE-Pruner, 2024, arXiv:2410.12013 (section 3; masks
          stay as they are).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.prune._experts import FusedExperts, expert_output, fused_experts, listed_experts, routed, unlike
from gossamer.spec.errors import bad_input


@contextmanager
def expert_distances(student: nn.Module, teacher: nn.Module) -> Iterator[Callable[[], Tensor]]:
    """Yield a function that returns D of the student's last forward in this context, with its graph, once.

    The teacher is a model of the same structure, frozen by the caller; its experts alone run. A forward without
    gradients adds nothing, and a block that is run again during backward adds nothing then. Raises BadInput for a model
    without experts, for a teacher that has others, and in a forward that hides the graph of its experts.
    """
    distances = _Distances()
    with ExitStack() as stack:
        handle = student.register_forward_pre_hook(lambda *_: distances.begin())
        stack.callback(handle.remove)
        pairs = 0
        for at in fused_experts(student):
            other = FusedExperts(at.path, _counterpart(teacher, at.path, at.module))
            given = partial(_of_fused, at, other, distances)
            stack.callback(at.module.register_forward_hook(given, with_kwargs=True).remove)
            pairs += 1
        for listed in listed_experts(student):
            others = [*_counterpart(teacher, listed.path, student.get_submodule(listed.path)).children()]
            for expert, counterpart in zip(listed.experts, others, strict=True):
                hook = partial(_of_member, listed.path, counterpart, distances)
                stack.callback(expert.register_forward_hook(hook, with_kwargs=True).remove)
                pairs += 1
        if not pairs:
            raise bad_input(
                wanted="a mixture of experts",
                got=f"a {type(student).__name__} without experts",
                do="distill its outputs instead",
                key="prune",
            )

        yield distances.taken


@dataclass(slots=True, eq=False)
class _Distances:
    """Distances of a forward of the student. `is_open`: it has begun with gradients, and they are not taken yet."""

    found: list[Tensor] = field(default_factory=list)
    is_open: bool = False

    def begin(self) -> None:
        self.found.clear()
        self.is_open = torch.is_grad_enabled()

    def are_wanted(self, path: str, module: nn.Module) -> bool:
        """Return whether a call has a graph. Raises BadInput for experts that learn, without one in a forward."""
        if torch.is_grad_enabled():
            return True
        if self.is_open and any(one.requires_grad for one in module.parameters()):
            raise bad_input(
                wanted=f"experts in {path} that run with gradients in the forward of a step",
                got="a forward without them, as of checkpointing with use_reentrant=True",
                do="turn gradient checkpointing off in the model, or use use_reentrant=False",
                key="train.loss",
            )
        return False

    def add(self, distance: Tensor) -> None:
        if self.is_open:  # else a block is run again for backward, and its loss is known
            self.found.append(distance)

    def taken(self) -> Tensor:
        total = torch.stack(self.found).sum() if self.found else torch.zeros(())
        self.found.clear()  # a graph is held no longer than its loss
        self.is_open = False
        return total


def _counterpart(teacher: nn.Module, path: str, own: nn.Module) -> nn.Module:
    """Return the teacher's module at `path`. Raises BadInput unless its parameters have the shapes of `own`."""
    found: nn.Module | None = dict(teacher.named_modules()).get(path)
    shapes = [
        {name: one.shape for name, one in module.named_parameters()} for module in (own, found) if module is not None
    ]
    if found is None or shapes[0] != shapes[1]:
        raise bad_input(
            wanted=f"a teacher with the experts of the student in {path}",
            got="other ones" if found is not None else "none",
            do="give the model that was pruned",
            key="prune",
        )
    return found


def _of_member(
    path: str, teacher: nn.Module, distances: _Distances, expert: nn.Module, args: Any, kwargs: Any, output: Any
) -> None:
    if not distances.are_wanted(path, expert):
        return
    if not isinstance(output, Tensor):
        raise unlike(path, expert, "it returns more than one tensor")
    if output.numel():
        with torch.no_grad():
            wanted = teacher(*args, **kwargs)
        distances.add(_mean_square(output, wanted))


def _of_fused(
    at: FusedExperts, other: FusedExperts, distances: _Distances, module: Any, args: Any, kwargs: Any, output: Tensor
) -> None:
    if not distances.are_wanted(at.path, module):
        return
    hidden, chosen, _ = routed(at, args, kwargs)
    for number in sorted(set(chosen.flatten().tolist())):
        tokens, _ = torch.where(chosen == number)
        x = hidden[tokens]
        with torch.no_grad():
            wanted = expert_output(other, number, x)
        distances.add(_mean_square(expert_output(at, number, x), wanted))


def _mean_square(one: Tensor, other: Tensor) -> Tensor:
    """Return the mean square of a difference, in float32 of half types."""
    exact = torch.promote_types(one.dtype, torch.float32)
    return (one.to(exact) - other.to(exact)).square().mean()
