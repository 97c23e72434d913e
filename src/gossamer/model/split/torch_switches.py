"""Thread-wide switches of torch that a forward may change and reset: restored if the forward ends before its reset."""

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
    """The saved values of torch's switches: gradient mode, default dtype, determinism, autocast.

    Reading them takes some us.
    """

    is_kept: bool = False
    _was: list[tuple[Callable[[Any], Any], Any]] = field(default_factory=list)

    @staticmethod
    def now() -> TorchSwitches:
        """Read the switches."""
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
        """Keep the switches as the forward left them: it ran to its end."""
        self.is_kept = True

    def put_back(self) -> None:
        """Restore the saved values."""
        for turn, was in self._was:
            turn(was)


@contextmanager
def switches_put_back() -> Iterator[TorchSwitches]:
    """Restore the switches on exit, unless the code in this context runs to its end and calls `keep`."""
    switches = TorchSwitches.now()
    try:
        yield switches
    finally:
        if not switches.is_kept:
            switches.put_back()
