"""Training objectives: what a model's output is worth on a batch. One objective per file.

The loss is the mean over the valid labels, so `weight` (how many there are) is what makes the means of unequal
micro-batches and unequal ranks add up exactly: the mean over all = sum(weight * loss) / sum(weight).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gossamer.spec.registry import Registry

IGNORE = -100  # the label that counts for nothing, as in torch and transformers


class Loss(ABC):
    """A frozen dataclass."""

    @abstractmethod
    def __call__(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Mean loss over the valid labels of `batch`, () float32, with a graph. `output` is what forward returned.

        Without a valid label it is 0 where the objective computes it, and nan where the model did.
        """

    @abstractmethod
    def weight(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Number of valid labels of `batch`, () int64; needs no output, so it is known before the forward."""


REGISTRY: Registry[Loss] = Registry(__name__, Loss)  # type: ignore[type-abstract]
names = REGISTRY.names
build = REGISTRY.build
