"""Modules that compute differently in every training step, as a function of (seed, step) alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import nn

from gossamer.spec.errors import bad_input


class StepDependent(ABC):
    """The interface of such a module. What a step does is equal on all ranks, in all micro-batches, and again where a
    forward is run again for its backward. `gives_subnets`: in training it returns the logits of subnets beside its own,
    for a loss that needs them.
    """

    gives_subnets: ClassVar[bool] = False

    @abstractmethod
    def begin_step(self, seed: int, step: int) -> None:
        """Become what the module is in `step` of a run with `seed`; called before every forward in training mode."""


def check_subnets(module: nn.Module, *, needs_subnets: bool) -> None:
    """Raise BadInput for a module with subnets and a loss that does not train them, or the other way round."""
    gives = next((one for one in module.modules() if isinstance(one, StepDependent) and one.gives_subnets), None)
    if needs_subnets and gives is None:
        raise bad_input(
            wanted="a supernet, whose forward gives the logits of subnets, with train.loss deps",
            got=f"a {type(module).__name__}",
            do="wrap it in gossamer.model.deps_supernet.DepsSupernet, or set train.loss to classification",
            key="train.loss",
        )
    if gives is not None and not needs_subnets:
        raise bad_input(
            wanted=f"a loss that trains the subnets of a {type(gives).__name__}",
            got="one of the whole network alone",
            do="set train.loss to deps, or train the network without subnets",
            key="train.loss",
        )
