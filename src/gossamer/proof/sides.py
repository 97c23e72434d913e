"""A side of the comparison: what answers a question with a table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from gossamer.model.snapshot import Copies, Snapshot, context_kept
from gossamer.proof.fingerprints import FingerprintTable
from gossamer.proof.trials import TrialSet


class ProofSide(ABC):
    """The seam: whatever divides a model shows here what its gradients are."""

    @abstractmethod
    def answer(self, question: TrialSet) -> FingerprintTable:
        """Run all rounds. Costs forward and backward of every micro-batch."""


@dataclass(frozen=True, slots=True)
class ProofRanks:
    """What the code of a module keeps from one forward to the next, but for parameters: buffers, Python state,
    generators. To be put back once.
    """

    snapshot: Snapshot
    copies: Copies

    @staticmethod
    def of(module: nn.Module) -> ProofRanks:
        """As it is now."""
        snapshot = Snapshot.of(module, without=list(module.parameters()))
        found = ProofRanks(snapshot, Copies(snapshot.tensors))
        found.copies.make()
        return found

    def is_another(self) -> bool:
        """Whether it has changed since."""
        return self.copies.differ() or next(self.snapshot.differences(), None) is not None

    def put_back(self) -> None:
        self.copies.put_back()
        self.snapshot.put_back()


@contextmanager
def world_kept(module: nn.Module) -> Iterator[None]:
    """What the code of `module` changes outside of it (globals, attributes of classes, generators) is afterwards as it
    was. The module itself is not to be used again.
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
