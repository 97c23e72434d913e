"""Loss scaling as a run carries it: the precision's pure rules, and the one value that changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from gossamer.model.precision import Precision, Scale


@dataclass(slots=True)
class LossScale:
    """With fp32 and bf16 the factor is 1 and stays 1."""

    precision: Precision
    scale: Scale

    @staticmethod
    def of(precision: Precision) -> LossScale:
        return LossScale(precision, precision.first_scale())

    @property
    def factor(self) -> float:
        """What the loss is multiplied with before backward."""
        return self.scale.factor

    def overflowed(self) -> bool:
        """Lower the factor after gradients that were not finite; False where it cannot be the scaling's fault."""
        before = self.scale.factor
        self.scale = self.precision.next_scale(self.scale, finite=False)
        return self.scale.factor < before

    def committed(self) -> None:
        """A step took effect."""
        self.scale = self.precision.next_scale(self.scale, finite=True)

    def state(self) -> dict[str, Tensor]:
        """For a checkpoint."""
        return self.scale.tensors()

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what `state` gave."""
        self.scale = Scale.of(tensors)
