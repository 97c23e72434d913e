"""Optimizers: update a parameter given its gradient. One optimizer per file, state passed in and updated in place.

State is keyed by parameter name and slot, and a slot has its parameter's shape (or is 0-dim), so that a checkpoint can
store it by slice. Learning-rate schedules are in `optimizer.lr_schedule`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from gossamer.spec.registry import Registry

OptimizerState: TypeAlias = dict[str, dict[str, Tensor]]  # parameter name -> slot -> tensor


class Optimizer(ABC):
    """An optimizer: a frozen dataclass of settings; its states are passed in and updated in place."""

    @property
    @abstractmethod
    def lr(self) -> float:
        """Return the peak learning rate, which an LRSchedule's factors multiply."""

    @property
    @abstractmethod
    def slots(self) -> tuple[str, ...]:
        """Return the names of the optimizer states per parameter."""

    @property
    def by_element(self) -> bool:
        """Return whether each element is updated by itself, so that a slice of a parameter gets the same update."""
        return True

    @property
    def by_parameter(self) -> bool:
        """Return whether each parameter is updated by itself, so that one rank may own all of it and its states."""
        return True

    @property
    def can_start_local(self) -> bool:
        """Return whether local steps may start with the first step, without synchronous warm-up."""
        return True

    @property
    def remark(self) -> str:
        """Return a note for the plan: what is not known of this optimizer; empty for most."""
        return ""

    @property
    def counts_each(self) -> bool:
        """Return whether `step` counts each parameter's own updates, as in torch: steps without its gradient do not
        count.

        Otherwise it counts the updates of the run, as for phases that all parameters enter together.
        """
        return True

    @property
    def is_plain(self) -> bool:
        """Return whether the update is w <- w - lr lr_scale g and nothing else.

        Code that generates g bit by bit may then apply it in place of this optimizer.
        """
        return False

    def flop(self, shapes: Mapping[str, tuple[int, ...]]) -> float:
        """Return the floating-point operations of the matmuls in one update of parameters with these shapes; most
        optimizers have none.
        """
        return 0.0

    def check(self, names: Collection[str]) -> None:
        """Raise BadInput unless the settings fit a model whose trained parameters have these names."""
        return None

    @abstractmethod
    def init(self, params: Mapping[str, Tensor]) -> OptimizerState:
        """Return the states of every parameter before the first update, on its device."""

    @abstractmethod
    def update(
        self,
        params: Mapping[str, Tensor],
        grads: Mapping[str, Tensor],
        state: OptimizerState,
        *,
        lr_scale: float,
        step: int,
    ) -> None:
        """Update the parameters that have a gradient, and their states, in place.

        params, grads: by name, in the parameter's own shape (a slice keeps its number of dimensions); lr_scale: factor
        on `lr`, from an LRSchedule; step: number of updates made before this one.
        """

    def states_of(self, name: str, shape: tuple[int, ...]) -> int:
        """Return how many states of its own shape the parameter `name` has; a number for all of it is none."""
        param = torch.empty(shape, device="meta")
        return sum(one.shape == param.shape for one in self.init({name: param})[name].values())

    def update_apart(
        self,
        params: Mapping[str, Tensor],
        grads: Mapping[str, Tensor],
        state: OptimizerState,
        *,
        lr_scale: float,
        step: int,
    ) -> None:
        """Update the parameters in a local step: `grads` are averaged within this island only."""
        self.update(params, grads, state, lr_scale=lr_scale, step=step)

    def meet(
        self, params: Mapping[str, Tensor], moved: Mapping[str, Tensor], state: OptimizerState, *, rates: float
    ) -> None:
        """Update the states after a sync round, when `params` are the global parameters; most optimizers do nothing.

        moved: mean pseudo-gradient by name (global parameters before the round minus local ones), equal on all islands;
        rates: sum of the learning rates of the round's steps, 0 where no island took part.
        """
        return None

    def second_moments(self, state: OptimizerState, *, step: int) -> Mapping[str, Tensor]:
        """Return the second moments that islands average, after `step` updates; empty for most optimizers.

        They are this island's estimate of the mean squares of the gradients of all islands together.
        """
        return {}

    def learn(self, squares: Mapping[str, Tensor], state: OptimizerState) -> None:
        """Load the average over islands of what `second_moments` returned some time ago."""
        return None


REGISTRY: Registry[Optimizer] = Registry(__name__, Optimizer)  # type: ignore[type-abstract]
names = REGISTRY.names
build = REGISTRY.build
