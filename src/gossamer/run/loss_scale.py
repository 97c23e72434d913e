"""Loss scaling during a run: the rules of the precision, and the current scale."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from gossamer.model.precision import Precision, Scale


@dataclass(slots=True)
class LossScale:
    """The loss scale of a run; the factor is always 1 with fp32 and bf16."""

    precision: Precision
    scale: Scale

    @staticmethod
    def of(precision: Precision) -> LossScale:
        """Return the initial loss scale of a precision."""
        return LossScale(precision, precision.first_scale())

    @property
    def factor(self) -> float:
        """Return the factor that multiplies the loss before the backward pass."""
        return self.scale.factor

    def overflowed(self) -> bool:
        """Lower the factor after non-finite gradients; return False if it is not lowered: scaling is not the cause."""
        before = self.scale.factor
        self.scale = self.precision.next_scale(self.scale, finite=False)
        return self.scale.factor < before

    def committed(self) -> None:
        """Count a committed step."""
        self.scale = self.precision.next_scale(self.scale, finite=True)

    def state(self) -> dict[str, Tensor]:
        """Return the state to save in a checkpoint."""
        return self.scale.tensors()

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore a state that `state` returned."""
        self.scale = Scale.of(tensors)
