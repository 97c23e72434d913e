"""Random generators of torch, numpy and Python: the default ones, and those that a model holds."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer.model.python_state.record import StateRecord


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the default generators of torch, numpy and `random` on exit."""
    torchs, pythons, numpys = torch.get_rng_state(), random.getstate(), np.random.get_state()
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    try:
        yield
    finally:
        torch.set_rng_state(torchs)
        random.setstate(pythons)
        np.random.set_state(numpys)
        if gpus:
            torch.cuda.set_rng_state_all(gpus)


def generator_states() -> tuple[object, ...]:
    """Return the states of the default generators of torch (on the CPU), Python and numpy, to be compared."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), str(name), np.asarray(keys).tobytes(), *rest


@dataclass(frozen=True)
class RandomGenerators:
    """The reader of random generators into `record`."""

    record: StateRecord

    def note_defaults(self) -> None:
        """Note how to restore the default generators."""
        torchs, pythons, numpys = torch.get_rng_state(), random.getstate(), np.random.get_state()
        self.record.note_restore(lambda: random.setstate(pythons))
        self.record.note_restore(lambda: np.random.set_state(numpys))
        self.record.note_restore(lambda: torch.set_rng_state(torchs))
        if torch.cuda.is_available():
            states = torch.cuda.get_rng_state_all()
            self.record.note_restore(lambda: torch.cuda.set_rng_state_all(states))

    def note(self, held: Any) -> bool:
        """Note a generator of random numbers; return whether `held` is one."""
        if isinstance(held, torch.Generator):
            state = held.get_state()
            self.record.note_restore(lambda: _set_torch(held, state))
            self.record.note_state(held, lambda: held.get_state().tolist() != state.tolist())
        elif isinstance(held, np.random.Generator):
            return self.note(held.bit_generator)
        elif isinstance(held, np.random.BitGenerator):
            bits = copy.deepcopy(held.state)
            self.record.note_restore(lambda: setattr(held, "state", bits))
            self.record.note_state(held, lambda: repr(held.state) != repr(bits))
        elif isinstance(held, np.random.RandomState):
            numpys = held.get_state()
            self.record.note_restore(lambda: held.set_state(numpys))
            self.record.note_state(held, lambda: repr(held.get_state()) != repr(numpys))
        elif isinstance(held, random.Random) and not isinstance(held, random.SystemRandom):
            pythons = held.getstate()
            self.record.note_restore(lambda: held.setstate(pythons))
            self.record.note_state(held, lambda: held.getstate() != pythons)
        else:
            return False
        return True


def _set_torch(generator: torch.Generator, state: Tensor) -> None:
    generator.set_state(state)
