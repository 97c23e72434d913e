"""The parameters that a model and its optimizers train, tracked as the user freezes, unfreezes and adds them."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

from torch import nn
from torch.optim import Optimizer


class TrainedParameters:
    """The trained parameters of one model by name, and those of `optimizers` that belong to no model."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], others: frozenset[int]) -> None:
        """Collect the model's parameters. `others`: ids of the parameters that belong to another model."""
        self._optimizers = [weakref.ref(one) for one in optimizers]
        self._others = others
        self._own = {name: p for name, p in model.named_parameters() if id(p) not in others}
        self._sizes: list[int] = []
        self._loose: dict[str, nn.Parameter] = {}

    def new(self, known: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """Return the parameters that require a gradient and are not in `known`."""
        self._look()
        every = {**self._own, **self._loose}
        return {name: p for name, p in every.items() if name not in known and p.requires_grad}

    def holds(self, param: nn.Parameter) -> bool:
        """Return whether `param` is one of these parameters, trained or frozen."""
        self._look()
        return any(one is param for one in (*self._own.values(), *self._loose.values()))

    def _look(self) -> None:
        """Collect parameters that only the optimizers hold, when a parameter group has changed in size."""
        living = [one for ref in self._optimizers if (one := ref()) is not None]
        sizes = [len(group["params"]) for one in living for group in one.param_groups]
        if sizes == self._sizes:
            return
        self._sizes = sizes
        mine = {id(param) for param in self._own.values()} | self._others
        for index, one in enumerate(living):
            for number, param in enumerate(p for group in one.param_groups for p in group["params"]):
                if id(param) not in mine:
                    self._loose[f"optimizer {index} parameter {number}"] = param
