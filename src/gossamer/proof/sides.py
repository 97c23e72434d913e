"""The interface of both sides of a proof, and snapshots of the state that a module's code keeps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from gossamer.model.python_state.context_variables import context_kept
from gossamer.model.snapshot import Snapshot
from gossamer.model.tensor_copies import Copies
from gossamer.proof.fingerprints import FingerprintTable
from gossamer.proof.trials import TrialSet


class ProofSide(ABC):
    """The interface of both sides: an implementation runs the trials and returns the gradients' fingerprints."""

    @abstractmethod
    def answer(self, question: TrialSet) -> FingerprintTable:
        """Run all rounds and return their fingerprint table. Costs a forward and backward pass per micro-batch."""


@dataclass(frozen=True, slots=True)
class ModuleState:
    """A snapshot of the state that a module keeps between forward passes: buffers, Python attributes and random
    generators, but no parameters. It can be restored once.
    """

    snapshot: Snapshot
    copies: Copies

    @staticmethod
    def of(module: nn.Module) -> ModuleState:
        """Return a snapshot of the module's current state."""
        snapshot = Snapshot.of(module, without=list(module.parameters()))
        found = ModuleState(snapshot, Copies(snapshot.tensors))
        found.copies.make()
        return found

    def is_another(self) -> bool:
        """Return whether the state has changed since the snapshot."""
        return self.copies.differ() or next(self.snapshot.differences(), None) is not None

    def put_back(self) -> None:
        """Restore the buffers, attributes and generators of the snapshot."""
        self.copies.put_back()
        self.snapshot.put_back()


@contextmanager
def world_kept(module: nn.Module) -> Iterator[None]:
    """Restore on exit all state outside of `module` that its code changes: globals, class attributes, random
    generators.

    The module itself must not be used afterwards.
    """
    snapshot = Snapshot.of(module)
    own = {id(t) for t in [*module.parameters(), *module.buffers()]}
    copies = Copies([t for t in snapshot.tensors if id(t) not in own])
    copies.make()
    try:
        with context_kept():
            yield
    finally:
        copies.put_back()
        snapshot.put_back()
