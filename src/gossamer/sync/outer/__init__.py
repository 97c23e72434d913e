"""Outer optimizers: they update the global parameters by the mean pseudo-gradient of all islands.

A pseudo-gradient is the global parameters minus an island's local ones, so it points like a gradient. All islands run
the same optimizer on the same numbers, so nothing here may depend on the rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from gossamer.spec.registry import Registry

OuterState: TypeAlias = dict[str, list[Tensor]]  # slot -> tensors like the anchor's, or one number


@dataclass(frozen=True, slots=True)
class OuterStep:
    """The round of one fragment, as the outer optimizer sees it.

    `number`: rounds before it; `steps`: its inner steps; `rates`: the sum of their learning rates (where islands differ
    in these two, means weighted by samples); `key`: a random key, equal on all islands.
    """

    number: int
    steps: float
    rates: float
    key: tuple[int, int, int]

    @property
    def rate(self) -> float:
        """Return the mean learning rate of its steps."""
        return self.rates / max(1.0, self.steps)


class OuterOptimizer(ABC):
    """An outer optimizer: a frozen dataclass of settings, whose state is passed in and updated in place."""

    @property
    @abstractmethod
    def slots(self) -> tuple[str, ...]:
        """Return the names of its state tensors, each as large as the anchor (the global parameters)."""

    @property
    def numbers(self) -> tuple[str, ...]:
        """Return the names of its single-number states, zero at first."""
        return ()

    def init(self, anchor: Sequence[Tensor]) -> OuterState:
        """Return the state before the first round."""
        tensors = {slot: [torch.zeros_like(a) for a in anchor] for slot in self.slots}
        return tensors | {name: [torch.zeros((), dtype=torch.float64)] for name in self.numbers}

    @abstractmethod
    def step(self, anchor: Sequence[Tensor], mean: Sequence[Tensor], state: OuterState, at: OuterStep) -> None:
        """Update a fragment's anchor, in place, by the mean pseudo-gradient; both are flat float32 buffers."""

    def inner_factor(self, state: OuterState) -> float:
        """Return the factor on the learning rate of the inner steps from now on."""
        return 1.0


REGISTRY: Registry[OuterOptimizer] = Registry(__name__, OuterOptimizer)
names = REGISTRY.names
build = REGISTRY.build
