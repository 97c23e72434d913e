"""torch's switches for a whole thread, which a forward may turn and turn back: put back where it never got there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

_DEVICES = ("cpu", "cuda")


@dataclass
class TorchSwitches:
    """How they stood. Some us to read."""

    is_kept: bool = False
    _was: list[tuple[Callable[[Any], Any], Any]] = field(default_factory=list)

    @staticmethod
    def now() -> TorchSwitches:
        """As they stand."""
        found = TorchSwitches()
        found._was = [
            (torch.set_grad_enabled, torch.is_grad_enabled()),
            (torch.set_default_dtype, torch.get_default_dtype()),
            (torch._C._set_deterministic_algorithms, torch.are_deterministic_algorithms_enabled()),
            (torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled()),
        ]
        for device in _DEVICES:
            found._was += [
                (partial(torch.set_autocast_enabled, device), torch.is_autocast_enabled(device)),
                (partial(torch.set_autocast_dtype, device), torch.get_autocast_dtype(device)),
            ]
        return found

    def keep(self) -> None:
        """The forward got to its end: they are as it left them."""
        self.is_kept = True

    def put_back(self) -> None:
        """As they stood."""
        for turn, was in self._was:
            turn(was)


@contextmanager
def switches_put_back() -> Iterator[TorchSwitches]:
    """What is in here leaves them as they were, unless it gets to its end and says so."""
    switches = TorchSwitches.now()
    try:
        yield switches
    finally:
        if not switches.is_kept:
            switches.put_back()
