"""A forward of a unit with something around it, in place of the unit's own."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import nn


class UnitForward(ABC):
    """A wrapped forward of `unit`; `real` is the one inside. It is an object, so that a copy calls the copy's own."""

    def __init__(self, unit: nn.Module) -> None:
        self.unit = unit
        self.real: Callable[..., Any] = unit.forward
        self._of_class = "forward" not in vars(unit)
        functools.update_wrapper(self, self.real, updated=())
        unit.forward = self  # type: ignore[method-assign]

    def put_back(self) -> None:
        """Give the unit the forward inside back, unless it has been wrapped again since."""
        if vars(self.unit).get("forward") is not self:
            return
        if self._of_class:
            del self.unit.forward
        else:
            self.unit.forward = self.real  # type: ignore[method-assign]

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward inside."""
