"""The outer loop as a trainer sees it, and that of synchronous training, which does nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gossamer.sync._fragments import Fragment
from gossamer.sync._quorum import QuorumThread
from gossamer.sync._sync_round import LocalStep, SyncResult


class OuterLoop(ABC):
    """The outer loop on one rank."""

    exposed_s: float  # seconds waited since they were last set to 0
    roll: QuorumThread[Any, Any] | None  # where rounds do not wait for stragglers

    @property
    @abstractmethod
    def fragments(self) -> Sequence[Fragment]:
        """The fragments of the model; none for synchronous training."""

    @property
    @abstractmethod
    def factor(self) -> float:
        """Return the factor on the learning rate of the inner steps: the outer optimizer's, averaged over fragments."""

    @abstractmethod
    def begin(self, done: int, steps: int, seed: int) -> None:
        """Start after `done` of the run's `steps`, once the state is restored."""

    @abstractmethod
    def close(self) -> None:
        """End the quorum thread, if there is one."""

    @abstractmethod
    def is_late(self, done: int) -> bool:
        """Return whether a round that ends after more than `done` steps has continued without this island.

        The island then skips the remaining inner steps of that round. All ranks of an island must call this together.
        """

    @abstractmethod
    def anchor_here(self) -> None:
        """Set the anchor (global parameters) to this rank's parameters, which must be equal on all islands."""

    @abstractmethod
    def after(self, moved: LocalStep) -> list[SyncResult]:
        """Advance the outer loop by one training step and return the results of the rounds that ended with it.

        `moved`: the step; one without an update has rate 0 and 0 samples.
        """

    @abstractmethod
    def agreed(self, done: int) -> AbstractContextManager[None]:
        """Load the global parameters inside the context; restore this replica group's local parameters afterwards.

        Nothing changes where the last of `done` steps was synchronous.
        """

    @abstractmethod
    def settle(self, done: int) -> None:
        """Wait for all pending exchanges before a checkpoint after `done` steps; they are applied when they are due."""

    @abstractmethod
    def part(self) -> None:
        """Set this rank's parameters to the anchor, which is loaded already."""

    @abstractmethod
    def common(self) -> dict[str, Tensor]:
        """Return the anchor (global parameters) by name, as views."""

    @abstractmethod
    def shared(self) -> dict[str, Tensor]:
        """Return all other state equal on all ranks, after `settle`: outer-optimizer states, counters, pending mean."""

    @abstractmethod
    def own(self) -> dict[str, Tensor]:
        """Return the state of this rank alone, after `settle`: its parameters and the state of its exchanges."""

    @abstractmethod
    def restore(self, shared: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
        """Restore the tensors of `shared` and `own`; those of `common` are loaded already.

        With another number of ranks, entries of `own` may be missing: this rank then starts from the anchor.
        """


@dataclass(slots=True)
class NoOuterLoop(OuterLoop):
    """The outer loop of synchronous training: no global parameters beside the rank's own, no rounds, no state."""

    exposed_s: float = 0.0
    roll: QuorumThread[Any, Any] | None = None

    @property
    def fragments(self) -> Sequence[Fragment]:
        return ()

    @property
    def factor(self) -> float:
        return 1.0

    def begin(self, done: int, steps: int, seed: int) -> None:
        pass

    def close(self) -> None:
        pass

    def is_late(self, done: int) -> bool:
        return False

    def anchor_here(self) -> None:
        pass

    def after(self, moved: LocalStep) -> list[SyncResult]:
        return []

    def agreed(self, done: int) -> AbstractContextManager[None]:
        return nullcontext()

    def settle(self, done: int) -> None:
        pass

    def part(self) -> None:
        pass

    def common(self) -> dict[str, Tensor]:
        return {}

    def shared(self) -> dict[str, Tensor]:
        return {}

    def own(self) -> dict[str, Tensor]:
        return {}

    def restore(self, shared: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
        pass
