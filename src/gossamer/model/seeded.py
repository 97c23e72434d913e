"""Seeded construction of a model."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode

from gossamer.model.unit_seeds import mix


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run the body with torch's, numpy's and `random`'s generators seeded; they are restored afterwards.

    Every random operation of torch is keyed on its own, by the parameter it is for. So its numbers are the same if
    those before it drew nothing, as when parts of a model are built without memory.
    """
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    before_gpu = torch.cuda.get_rng_state_all() if on_gpu else []
    torch.default_generator.manual_seed(seed)  # not torch.manual_seed: it would reseed a GPU not yet in use
    if on_gpu:
        torch.cuda.manual_seed_all(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
    try:
        keyed = _Keyed(seed)
        watching = register_module_parameter_registration_hook(keyed.register)
        try:
            with keyed:
                yield
        finally:
            watching.remove()
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])
        if on_gpu:
            torch.cuda.set_rng_state_all(before_gpu)


class _Keyed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that seeds the generators before every operation that draws from them.

    The key is the parameter that was last an argument of any operator, the number of times that others came between,
    and the number of the draw since. So an initializer that draws until it accepts (a truncated normal) changes no
    other's numbers.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seed = seed
        self.count = 0
        self.known: dict[int, tuple[Callable[[], nn.Parameter | None], int]] = {}  # storage -> parameter, its number
        self.visits: dict[int, int] = {}
        self.current, self.draws = 0, 0

    def register(self, _: nn.Module, __: str, parameter: nn.Parameter | None) -> None:
        """Number a parameter that a module is given."""
        if parameter is not None and _memory(parameter) and self._number(parameter) is None:
            self.count += 1
            self.known[_memory(parameter)] = (_reference(parameter), self.count)
            self._visit(self.count)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for given in args:
            number = self._number(given) if isinstance(given, torch.Tensor) else None
            if number is not None and number != self.current:
                self._visit(number)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.draws += 1
            key = mix(self.seed, self.current, self.visits.get(self.current, 0), self.draws)
            torch.default_generator.manual_seed(key)
            if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                torch.cuda.manual_seed_all(key)
        return func(*args, **(kwargs or {}))

    def _visit(self, number: int) -> None:
        self.current, self.draws = number, 0
        self.visits[number] = self.visits.get(number, 0) + 1

    def _number(self, tensor: torch.Tensor) -> int | None:
        place = _memory(tensor)
        parameter, number = self.known.get(place, (None, 0))
        alive = parameter() if parameter is not None else None
        return number if alive is not None and _memory(alive) == place else None


def _memory(tensor: torch.Tensor) -> int:
    """Return a number for the tensor's memory; 0 if it has none (sparse), or none yet (of a lazy module)."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError, ValueError):
        return 0


def _reference(parameter: nn.Parameter) -> Callable[[], nn.Parameter | None]:
    """Return a weak reference, so that a parameter that is replaced at once frees its memory.

    Fake parameters are held instead: with a weak reference they could not change their type.
    """
    return (lambda: parameter) if isinstance(parameter, FakeTensor) else weakref.ref(parameter)
