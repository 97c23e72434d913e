"""The generators that a forward may draw from: torch's, Python's and numpy's, saved, seeded and put back alike."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand


class Generator(ABC):
    """One of those that code draws from without naming it."""

    @abstractmethod
    def save(self) -> Any:
        """What `restore` takes."""

    @abstractmethod
    def restore(self, state: Any) -> None:
        """Go on as at `save`."""

    @abstractmethod
    def seed(self, key: int) -> None:
        """Draw from here on what 64 bits say."""


class TorchGenerator(Generator):
    """torch's of one device. On the CPU it takes 32 bits of a seed (torch drops the rest), on a GPU all 64."""

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
    """That of the module `random`."""

    def save(self) -> Any:
        return random.getstate()

    def restore(self, state: Any) -> None:
        random.setstate(state)

    def seed(self, key: int) -> None:
        random.seed(key)


@dataclass
class NumpyGenerator(Generator):
    """That of `numpy.random`. To copy its state takes 200 us, so another one stands in for it meanwhile.

    Unlike the others: the second of a pair of Gaussians, drawn before `save` and not yet given out, is lost.
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
