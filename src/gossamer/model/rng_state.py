"""Random generators of torch, Python and numpy that a forward may draw from, saved, seeded and restored alike."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand


class Generator(ABC):
    """A default random generator, from which code draws without naming it."""

    @abstractmethod
    def save(self) -> Any:
        """Return the state for `restore`."""

    @abstractmethod
    def restore(self, state: Any) -> None:
        """Continue from the state at `save`."""

    @abstractmethod
    def seed(self, key: int) -> None:
        """Seed the generator with 64 bits."""


class TorchGenerator(Generator):
    """The default generator of torch for one device.

    On the CPU it takes 32 bits of a seed (torch drops the rest), on a GPU all 64.
    """

    def __init__(self, device: torch.device) -> None:
        self._of = torch.default_generator
        if device.type == "cuda":
            index = device.index if device.index is not None else torch.cuda.current_device()
            self._of = torch.cuda.default_generators[index]

    def save(self) -> Any:
        return self._of.get_state()

    def restore(self, state: Any) -> None:
        self._of.set_state(state)

    def seed(self, key: int) -> None:
        self._of.manual_seed(key)


class PythonGenerator(Generator):
    """The default generator of the module `random`."""

    def save(self) -> Any:
        return random.getstate()

    def restore(self, state: Any) -> None:
        random.setstate(state)

    def seed(self, key: int) -> None:
        random.seed(key)


@dataclass
class NumpyGenerator(Generator):
    """The default generator of `numpy.random`. Another one replaces it from `save` to `restore`.

    A copy of its state would take 200 us. Unlike the others, it loses the second of a pair of Gaussians that was drawn
    before `save` and not yet returned.
    """

    _spare: list[np.random.BitGenerator] = field(default_factory=list)

    def save(self) -> Any:
        outer = mtrand.get_bit_generator()
        mtrand.set_bit_generator(self._spare.pop() if self._spare else np.random.MT19937())
        return outer

    def restore(self, state: Any) -> None:
        self._spare.append(mtrand.get_bit_generator())
        mtrand.set_bit_generator(state)

    def seed(self, key: int) -> None:
        np.random.seed(key & 0xFFFFFFFF)
