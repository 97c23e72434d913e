"""The parameters that a model and its optimizers train, tracked as the user freezes, unfreezes and adds them."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

from torch import nn
from torch.optim import Optimizer


class TrainedParameters:
    """The trained parameters of one model by name, those of `optimizers` that belong to no model, and which of the
    optimizers move each.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], others: frozenset[int], *, has_loose: bool = True
    ) -> None:
        """Collect the model's parameters. `optimizers`: all of the loop. `others`: ids of the parameters that belong to
        another model. `has_loose`: whether parameters that belong to no model count among this one's.
        """
        self._optimizers = [weakref.ref(one) for one in optimizers]
        self._others, self._has_loose = others, has_loose
        self._own = {name: p for name, p in model.named_parameters() if id(p) not in others}
        self._sizes: list[int] = []
        self._loose: dict[str, nn.Parameter] = {}
        self._movers: dict[str, frozenset[int]] = {}

    def new(self, known: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """Return the parameters that require a gradient and are not in `known`."""
        self._look()
        every = {**self._own, **self._loose}
        return {name: p for name, p in every.items() if name not in known and p.requires_grad}

    def holds(self, param: nn.Parameter) -> bool:
        """Return whether `param` is one of these parameters, trained or frozen."""
        self._look()
        return any(one is param for one in (*self._own.values(), *self._loose.values()))

    def movers(self) -> Mapping[str, frozenset[int]]:
        """Return by name the places (see `place`) of the optimizers that move a parameter; those of none are left out.

        The same mapping is returned until a parameter group changes in size.
        """
        self._look()
        return self._movers

    def place(self, optimizer: Optimizer) -> int:
        """Return the place of an optimizer among those of the loop."""
        return next(place for place, ref in enumerate(self._optimizers) if ref() is optimizer)

    def _look(self) -> None:
        """Read the optimizers' parameter groups, when one has changed in size."""
        living = [(place, one) for place, ref in enumerate(self._optimizers) if (one := ref()) is not None]
        sizes = [len(group["params"]) for _, one in living for group in one.param_groups]
        if sizes == self._sizes:
            return
        self._sizes = sizes
        mine = {id(param) for param in (*self._own.values(), *self._loose.values())} | self._others
        places: dict[int, set[int]] = {}
        for place, one in living:
            for number, param in enumerate(p for group in one.param_groups for p in group["params"]):
                places.setdefault(id(param), set()).add(place)
                if self._has_loose and id(param) not in mine:
                    self._loose[f"optimizer {place} parameter {number}"] = param
                    mine.add(id(param))  # another optimizer may move it as well
        every = {**self._own, **self._loose}
        self._movers = {name: frozenset(places[id(p)]) for name, p in every.items() if id(p) in places}
