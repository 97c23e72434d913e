"""Optimizers: update a parameter given its gradient. One optimizer per file, state passed in and updated in place.

State is keyed by parameter name and slot. A slot is one number for all of a parameter (0-dim), or it has its rows: its
first dimension is the parameter's, and row i of it belongs to row i of the parameter and to no other. The rest of its
shape and its type are the optimizer's affair. So a checkpoint can store it by slice, sharding can divide it by rows,
and another number of ranks finds it bit for bit. A state in 8 bits is a code: it means something only beside the other
slots of its parameter, and nobody may average it (`is_coded`). Only optimizers that need all parameters at once
(`has_one_clip`) have slots of other shapes. Learning-rate schedules are in `optimizer.lr_schedule`,
penalties in `optimizer.proximal_operator`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gossamer.ops.static_mask import StaticMaskDraw
from gossamer.spec.registry import Registry

OptimizerState: TypeAlias = dict[str, dict[str, Tensor]]  # parameter name -> slot -> tensor


@dataclass(frozen=True, slots=True)
class LayerVectors:
    """A layer's mean input, over all positions of a step's batch, and the gradient of the mean loss by its output.

    The gradient is summed over positions: it is that of a bias. A kernel's input is its patch, flattened.
    """

    input: Tensor  # (inputs,)
    output: Tensor  # (outputs,)


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
    def made_by(self) -> str:
        """Return the rule that the states belong to, such as "adamw" or "muon(rest=adamw)", without its settings.

        Slots of one name are other numbers under another rule. Settings such as rates may change where a run resumes.
        """
        name = type(self).__module__.rpartition(".")[2]
        inside: dict[str, Any] = (
            {one.name: getattr(self, one.name) for one in fields(self)} if is_dataclass(self) else {}
        )
        rules = [f"{field}={rule.made_by}" for field, rule in inside.items() if isinstance(rule, Optimizer)]
        return f"{name}({', '.join(rules)})" if rules else name

    @property
    def by_element(self) -> bool:
        """Return whether each row is updated by itself, so that rows of a parameter get the same update alone."""
        return True

    @property
    def by_parameter(self) -> bool:
        """Return whether each parameter is updated by itself, so that one rank may own all of it and its states."""
        return True

    @property
    def has_one_clip(self) -> bool:
        """Return whether an update needs all parameters of the model in one call, as they move under one clip."""
        return False

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

    @property
    def has_average(self) -> bool:
        """Return whether a run is evaluated, exported and compared at an averaged point, not at its parameters."""
        return False

    def average(self, params: Mapping[str, Tensor], state: OptimizerState) -> Mapping[str, Tensor]:
        """Return the averaged point of these parameters (slices, too) as new tensors, where `has_average`."""
        return {}

    @property
    def sets_zeros(self) -> bool:
        """Return whether an update sets elements to exactly 0 on purpose.

        An average of parameters, or a rounded difference of them, would not keep these zeros.
        """
        return False

    @property
    def draws_to_zero(self) -> bool:
        """Return whether an update draws weights to 0 beside what their gradients say, by a decay or penalty."""
        inside: list[Any] = [getattr(self, one.name) for one in fields(self)] if is_dataclass(self) else []
        return bool(getattr(self, "weight_decay", 0.0)) or any(
            isinstance(o, Optimizer) and o.draws_to_zero for o in inside
        )

    @property
    def owns_weights(self) -> bool:
        """Return whether weights follow from the states alone, so that what else changes them would be undone."""
        return False

    @property
    def mask(self) -> StaticMaskDraw | None:
        """Return how the masks of weights that never move are drawn; None for most optimizers."""
        return None

    def said(self, shapes: Mapping[str, tuple[int, ...]], *, flop_per_token: float) -> str:
        """Return what is to be said of a run's model when it starts, "" for most. Raises BadInput where it is unfit.

        shapes: of all trained parameters; flop_per_token: of a forward pass, 0 where it is not known.
        """
        return ""

    def prepare(self, params: Mapping[str, Tensor]) -> None:
        """Change whole parameters in place before the first step, the same way on every rank; most do nothing."""
        return None

    def restrict(self, grads: Mapping[str, Tensor], state: OptimizerState) -> None:
        """Set the elements of mean gradients to 0 that an update does not use, so that no norm counts them."""
        return None

    @property
    def keeps_masks(self) -> bool:
        """Return whether an update keeps the zeros that the masks of a start folder say, in its slot `kept`."""
        return False

    def flop(self, shapes: Mapping[str, tuple[int, ...]]) -> float:
        """Return the floating-point operations of the matmuls in one update of parameters with these shapes; most
        optimizers have none.
        """
        return 0.0

    def check(self, names: Collection[str]) -> None:
        """Raise BadInput unless the settings fit a model whose trained parameters have these names."""
        return None

    def guessed(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, str]:
        """Return the parameters that are taken for weights of linear layers by their names, none for most.

        Each with the key of the setting that says which these are.
        """
        return {}

    @abstractmethod
    def init(self, params: Mapping[str, Tensor]) -> OptimizerState:
        """Return the states of every parameter before the first update, on its device."""

    def init_rows(
        self,
        rows: Mapping[str, Tensor],
        shapes: Mapping[str, tuple[int, ...]],
        starts: Mapping[str, int] | None = None,
    ) -> OptimizerState:
        """Return the states of some rows of every parameter: those rows of the states of all of it.

        shapes: of the whole parameters, by name; starts: the number of the first row, 0 where there is none. To be
        overridden where states depend on more than a row.
        """
        return self.init(rows)

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

    def row_bytes(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> int:
        """Return the bytes of the states of one row of the parameter `name`; a number for all of it counts as none."""
        param = torch.empty(shape, device="meta", dtype=dtype)
        rows = shape[0] if shape else 1
        held = self.init({name: param})[name].values()
        return sum(one.nbytes for one in held if one.dim() or not shape) // rows if rows else 0

    def wants_vectors(self, params: Mapping[str, Tensor]) -> Collection[str]:
        """Return those of `params` whose layers' vectors `see` needs, where layers are linear; none for most."""
        return ()

    def see(self, vectors: Mapping[str, LayerVectors], state: OptimizerState) -> None:
        """Take in the vectors of a step by the name of the layer's weight, before `update`. Equal on all ranks."""
        return None

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


def is_coded(slots: Mapping[str, Tensor]) -> bool:
    """Return whether the states of a parameter are codes, which neither sums nor means of them are."""
    return any(one.element_size() == 1 for one in slots.values())


REGISTRY: Registry[Optimizer] = Registry(__name__, Optimizer)  # type: ignore[type-abstract]
names = REGISTRY.names
build = REGISTRY.build
