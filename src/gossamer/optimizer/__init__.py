"""Update rules: how a parameter moves, given its gradient. One rule per file, state passed in and updated in place.

State is keyed by parameter name and slot, and a slot has its parameter's shape (or is 0-dim), so that a checkpoint can
store it by slice. Learning rates over time are in `optim.rate`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TypeAlias

from torch import Tensor

from gossamer.spec.registry import Registry

OptimizerState: TypeAlias = dict[str, dict[str, Tensor]]  # parameter name -> slot -> tensor


class Optimizer(ABC):
    """A frozen dataclass: its fields are its whole configuration."""

    @property
    @abstractmethod
    def lr(self) -> float:
        """The largest rate: what a Rate's factors multiply."""

    @property
    @abstractmethod
    def slots(self) -> tuple[str, ...]:
        """Names of the tensors that are kept per parameter."""

    @property
    def by_element(self) -> bool:
        """Whether each number moves by what is known of it alone: a part of a parameter then moves as in the whole."""
        return True

    @property
    def begins_apart(self) -> bool:
        """Whether islands may train apart from the first step on."""
        return True

    @property
    def counts_each(self) -> bool:
        """Whether `step` is the number of updates of each parameter, as in torch: one that got no gradient in a step is
        not counted in it. Else it is that of the run, whose phases all parameters are in together.
        """
        return True

    @property
    def is_plain(self) -> bool:
        """Whether w <- w - lr lr_scale g is all it does: whoever makes g bit by bit may then do it in its place."""
        return False

    @abstractmethod
    def init(self, params: Mapping[str, Tensor]) -> OptimizerState:
        """The state before the first update, for every parameter, on its device."""

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
        """Move the parameters that have a gradient, in place, and their state with them.

        params, grads: by name, in the parameter's own shape (a slice keeps its number of dimensions);
        lr_scale: factor on `lr`, from a Rate; step: number of updates made before this one.
        """

    def update_apart(
        self,
        params: Mapping[str, Tensor],
        grads: Mapping[str, Tensor],
        state: OptimizerState,
        *,
        lr_scale: float,
        step: int,
    ) -> None:
        """The same, in a step in which islands train apart: `grads` are those of this one alone."""
        self.update(params, grads, state, lr_scale=lr_scale, step=step)

    def meet(
        self, params: Mapping[str, Tensor], moved: Mapping[str, Tensor], state: OptimizerState, *, rates: float
    ) -> None:
        """Islands have met at `params`, some steps after they parted: for most rules there is nothing to do.

        moved: where they parted minus where each came to, the mean, as it arrived on all of them; rates: the sum of the
        learning rates of those steps, 0 where nobody has moved.
        """
        return None

    def second_moments(self, state: OptimizerState, *, step: int) -> Mapping[str, Tensor]:
        """What islands apart can tell each other after `step` updates: the mean squares that gradients of all of them
        together would have, as far as this one knows. Of most rules nothing.
        """
        return {}

    def learn(self, squares: Mapping[str, Tensor], state: OptimizerState) -> None:
        """The means over the islands of what some time ago were their `second_moments`."""
        return None


REGISTRY: Registry[Optimizer] = Registry(__name__, Optimizer)  # type: ignore[type-abstract]
names = REGISTRY.names
build = REGISTRY.build
