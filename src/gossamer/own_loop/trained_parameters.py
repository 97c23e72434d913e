"""Which parameters a model and its optimizers train, as they are frozen, unfrozen and added on the way."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

from torch import nn
from torch.optim import Optimizer


class TrainedParameters:
    """Those of one model, by name; `optimizers` may move others, of no model, which go with the first one."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], others: frozenset[int]) -> None:
        """`others`: ids of the parameters that belong to another model."""
        self._optimizers = [weakref.ref(one) for one in optimizers]
        self._others = others
        self._own = {name: p for name, p in model.named_parameters() if id(p) not in others}
        self._sizes: list[int] = []
        self._loose: dict[str, nn.Parameter] = {}

    def new(self, known: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """Those that require a gradient and are not among `known`."""
        self._look()
        every = {**self._own, **self._loose}
        return {name: p for name, p in every.items() if name not in known and p.requires_grad}

    def holds(self, param: nn.Parameter) -> bool:
        """Whether it is one of them, now or once it is unfrozen."""
        self._look()
        return any(one is param for one in (*self._own.values(), *self._loose.values()))

    def _look(self) -> None:
        """Parameters that optimizers have and the model has not, when there may be new ones."""
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
