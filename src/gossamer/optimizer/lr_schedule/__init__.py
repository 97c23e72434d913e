"""Learning rates over time: a pure function of the step, so that a resumed run goes on where it was."""

from __future__ import annotations

from abc import ABC, abstractmethod

from gossamer.spec.registry import Registry


class LRSchedule(ABC):
    """A frozen dataclass; multiplies a rule's `lr`."""

    @abstractmethod
    def factor(self, step: int, steps: int) -> float:
        """What the update number `step` (0 .. steps - 1) multiplies the rate with: from 0 to 1.

        Raises BadInput where the fields do not fit into `steps`: ask for step 0 before a run starts.
        """


REGISTRY: Registry[LRSchedule] = Registry(__name__, LRSchedule)  # type: ignore[type-abstract]
names = REGISTRY.names
build = REGISTRY.build
