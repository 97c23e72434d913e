"""Loss functions of a model's output on a batch. One per file.

The loss is the mean over the valid labels, so `weight` (how many there are) is what makes the means of unequal
micro-batches and unequal ranks add up exactly: the mean over all = sum(weight * loss) / sum(weight).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from gossamer.spec.errors import bad_input
from gossamer.spec.registry import Registry

IGNORE = -100  # the label that counts for nothing, as in torch and transformers


class Loss(ABC):
    """A loss function: a frozen dataclass of settings.

    `together`: rows of a batch that it takes as one, side by side; `needs_reference`: whether it compares with the
    model that the run began with; `by_token`: whether it judges each token by what was made of those before it;
    `needs_subnets`: whether it trains the subnets of a supernet with it.
    """

    together: ClassVar[int] = 1
    needs_reference: ClassVar[bool] = False
    by_token: ClassVar[bool] = False
    needs_subnets: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the mean loss over the valid labels of `batch`, () float32, with a graph. `output`: of the forward.

        Without a valid label it is 0 where this function computes the loss, and nan where the model did.
        """

    @abstractmethod
    def weight(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the number of valid labels of `batch`, () int64; needs no output, so it is known before forward."""

    def evaluated(self) -> Loss:
        """Return the loss that evaluations of a run report."""
        return self

    def predictions(self, output: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the logits (*, C) of a forward's output and the labels (*) that they predict, -100 for none.

        Raises BadInput where this loss has no label for each row of logits, or where the model gives no logits.
        """
        raise bad_input(
            wanted="a loss with one label for each row of logits, to compute metrics of both",
            got=type(self).__name__,
            do="leave train.metrics out, or set train.loss to next_token or classification",
            key="train.metrics",
        )


REGISTRY: Registry[Loss] = Registry(__name__, Loss)  # type: ignore[type-abstract]
names = REGISTRY.names
build = REGISTRY.build
