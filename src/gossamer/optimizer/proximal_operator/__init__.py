"""Proximal operators: the exact minimizer of a penalty plus the distance to a point. One penalty per file.

prox(v, s) = argmin_x P(x) + |x - v|^2 / (2 s). The optimizer `proximal` applies one after another optimizer's update.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from gossamer.spec.registry import Registry


class ProximalOperator(ABC):
    """The proximal operator of a penalty: a frozen dataclass of its settings."""

    @property
    def by_element(self) -> bool:
        """Return whether the penalty is a sum over elements, so that a slice of a tensor gets the same result."""
        return True

    @abstractmethod
    def penalty(self, x: Tensor) -> Tensor:
        """Return the penalty of `x`: by element, or by group where it is not a sum over elements."""

    @abstractmethod
    def prox(self, v: Tensor, step: float) -> Tensor:
        """Return the minimizer of penalty(x).sum() + (x - v).square().sum() / (2 step), for a step above 0.

        Elements that the penalty takes to 0 are exactly 0. `v` is only read.
        """


REGISTRY: Registry[ProximalOperator] = Registry(__name__, ProximalOperator)  # type: ignore[type-abstract]
names = REGISTRY.names
build = REGISTRY.build
