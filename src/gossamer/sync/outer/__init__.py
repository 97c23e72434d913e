"""Outer rules: how the parameters that all islands share move, once their displacements have met.

A displacement is where an island was minus where it came to: it points like a gradient. All islands apply the same
rule to the same numbers, so nothing here may depend on the rank.
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
    """One round of one fragment: how many there were before, its steps, the sum of their learning rates (where islands
    differ in them, the means over the samples), a random key that is the same on all islands.
    """

    number: int
    steps: float
    rates: float
    key: tuple[int, int, int]

    @property
    def rate(self) -> float:
        """The mean learning rate of its steps."""
        return self.rates / max(1.0, self.steps)


class OuterOptimizer(ABC):
    """A frozen dataclass: its fields are its whole configuration; state is passed in and updated in place."""

    @property
    @abstractmethod
    def slots(self) -> tuple[str, ...]:
        """Names of the tensors that are kept beside the anchor, each as large as it."""

    @property
    def numbers(self) -> tuple[str, ...]:
        """Names of the single numbers that are kept, zero at first."""
        return ()

    def init(self, anchor: Sequence[Tensor]) -> OuterState:
        """The state before the first round."""
        tensors = {slot: [torch.zeros_like(a) for a in anchor] for slot in self.slots}
        return tensors | {name: [torch.zeros((), dtype=torch.float64)] for name in self.numbers}

    @abstractmethod
    def step(self, anchor: Sequence[Tensor], mean: Sequence[Tensor], state: OuterState, at: OuterStep) -> None:
        """Move a fragment's anchor, in place, by the mean displacement; both are flat float32 buffers."""

    def inner_factor(self, state: OuterState) -> float:
        """What the learning rate of the islands' own steps is to be multiplied with from now on."""
        return 1.0


REGISTRY: Registry[OuterOptimizer] = Registry(__name__, OuterOptimizer)
names = REGISTRY.names
build = REGISTRY.build
