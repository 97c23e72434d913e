"""How far the experts of a pruned model are from those that they were: the term of expert-wise distillation.

Equation: L = CE + lambda D,    D = sum_layers sum_experts mean (E_teacher(x) - E_student(x))^2
Symbols:  x what the student's router sends to an expert, E an expert's output before the router's weight. The teacher
          has no gradient; an expert without tokens adds nothing.
Source:   Xie, Zhang, Zhou, Xie, Song, Liu, Wang, Lin, Xu, MoE-Pruner, 2024, arXiv:2410.12013 (section 3; masks
          stay as they are).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.prune._experts import FusedExperts, expert_output, fused_experts, is_fused, listed_experts, routed, unlike
from gossamer.spec.errors import BadInput, bad_input


@dataclass(frozen=True, slots=True, eq=False)
class ExpertCall:
    """A call of one expert of the student: number `number` of the experts at `path`, with its output and their graph.

    `is_new`: whether it belongs to a step's forward, and not to one that is run again during backward.
    """

    path: str
    number: int
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Tensor
    is_new: bool


class TeacherExperts(ABC):
    """The experts of a teacher, beside the student or elsewhere."""

    @abstractmethod
    def check(self, path: str, own: nn.Module) -> None:
        """Raise BadInput unless its experts at `path` have the parameters of `own`, those of the student."""

    @abstractmethod
    def begin(self) -> None:
        """Forget the calls of the forward before."""

    @abstractmethod
    def distance(self, call: ExpertCall) -> Callable[[], Tensor]:
        """Return what gives the mean square of how far a call is from the teacher's, once the forward is over."""


@dataclass(frozen=True, slots=True, eq=False)
class ModuleExperts(TeacherExperts):
    """The experts of a model in this process, which is frozen by the caller."""

    module: nn.Module

    def check(self, path: str, own: nn.Module) -> None:
        found = dict(self.module.named_modules()).get(path)
        if found is None or parameter_shapes(found) != parameter_shapes(own):
            raise other_experts(path, is_there=found is not None)

    def begin(self) -> None:
        """Do nothing: a call is answered when it is made."""

    @torch.no_grad()
    def output(self, path: str, number: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """Return what one expert gives, before the router's weight."""
        module = self.module.get_submodule(path)
        if is_fused(module):
            return expert_output(FusedExperts(path, module), number, *args)
        found: Tensor = [*module.children()][number](*args, **kwargs)
        return found

    def distance(self, call: ExpertCall) -> Callable[[], Tensor]:
        found = mean_square(call.output, self.output(call.path, call.number, call.args, call.kwargs))
        return lambda: found


def expert_distances(student: nn.Module, teacher: nn.Module) -> AbstractContextManager[Callable[[], Tensor]]:
    """Yield a function that returns D of the student's last forward in this context, with its graph, once.

    The teacher is a model of the same structure, frozen by the caller; its experts alone run. A forward without
    gradients adds nothing, and a block that is run again during backward adds nothing then. Raises BadInput for a model
    without experts, for a teacher that has others, and in a forward that hides the graph of its experts.
    """
    return distances_from(student, ModuleExperts(teacher))


@contextmanager
def distances_from(student: nn.Module, teacher: TeacherExperts) -> Iterator[Callable[[], Tensor]]:
    """Do what `expert_distances` does, with the experts of a teacher wherever they are."""
    distances = _Distances(teacher)
    with ExitStack() as stack:
        handle = student.register_forward_pre_hook(lambda *_: distances.begin())
        stack.callback(handle.remove)
        pairs = 0
        for at in fused_experts(student):
            teacher.check(at.path, at.module)
            given = partial(_of_fused, at, distances)
            stack.callback(at.module.register_forward_hook(given, with_kwargs=True).remove)
            pairs += 1
        for listed in listed_experts(student):
            teacher.check(listed.path, student.get_submodule(listed.path))
            for number, expert in enumerate(listed.experts):
                hook = partial(_of_member, listed.path, number, distances)
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

    teacher: TeacherExperts
    found: list[Callable[[], Tensor]] = field(default_factory=list)
    is_open: bool = False

    def begin(self) -> None:
        self.found.clear()
        self.teacher.begin()
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

    def add(self, path: str, number: int, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Tensor) -> None:
        distance = self.teacher.distance(ExpertCall(path, number, args, kwargs, output, self.is_open))
        if self.is_open:  # else a block is run again for backward, and its loss is known
            self.found.append(distance)

    def taken(self) -> Tensor:
        total = torch.stack([one() for one in self.found]).sum() if self.found else torch.zeros(())
        self.found.clear()  # a graph is held no longer than its loss
        self.teacher.begin()
        self.is_open = False
        return total


def parameter_shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a module's parameters, by name."""
    return {name: tuple(one.shape) for name, one in module.named_parameters()}


def other_experts(path: str, *, is_there: bool) -> BadInput:
    """Return the error for a teacher that has other experts at `path` than the student, or none."""
    return bad_input(
        wanted=f"a teacher with the experts of the student in {path}",
        got="other ones" if is_there else "none",
        do="give the model that was pruned",
        key="prune",
    )


def _of_member(
    path: str, number: int, distances: _Distances, expert: nn.Module, args: Any, kwargs: Any, output: Any
) -> None:
    if not distances.are_wanted(path, expert):
        return
    if not isinstance(output, Tensor):
        raise unlike(path, expert, "it returns more than one tensor")
    if output.numel():
        distances.add(path, number, args, kwargs, output)


def _of_fused(at: FusedExperts, distances: _Distances, module: Any, args: Any, kwargs: Any, output: Tensor) -> None:
    if not distances.are_wanted(at.path, module):
        return
    hidden, chosen, _ = routed(at, args, kwargs)
    for number in sorted(set(chosen.flatten().tolist())):
        tokens, _ = torch.where(chosen == number)
        x = hidden[tokens]
        distances.add(at.path, number, (x,), {}, expert_output(at, number, x))


def mean_square(one: Tensor, other: Tensor) -> Tensor:
    """Return the mean square of a difference, in float32 of half types."""
    exact = torch.promote_types(one.dtype, torch.float32)
    return (one.to(exact) - other.to(exact)).square().mean()
