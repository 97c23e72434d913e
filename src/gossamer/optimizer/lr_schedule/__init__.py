"""Learning-rate schedules: pure functions of the step, so that a resumed run continues the schedule."""

from __future__ import annotations

from abc import ABC, abstractmethod

from gossamer.spec.registry import Registry


class LRSchedule(ABC):
    """A learning-rate schedule: a frozen dataclass whose factor multiplies an optimizer's `lr`."""

    @property
    def never_falls(self) -> bool:
        """Return whether the factor of an update is at least that of the update before it, in a run of any length."""
        return False

    @abstractmethod
    def factor(self, step: int, steps: int) -> float:
        """Return the factor on the learning rate of update `step` (0 .. steps - 1), from 0 to 1.

        Raise BadInput where the settings do not fit into `steps`: call it for step 0 before a run starts.
        """


REGISTRY: Registry[LRSchedule] = Registry(__name__, LRSchedule)  # type: ignore[type-abstract]
names = REGISTRY.names
build = REGISTRY.build
