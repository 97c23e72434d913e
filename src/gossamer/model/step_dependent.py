"""Modules that compute differently in every training step, as a function of (seed, step) alone."""

from __future__ import annotations

from abc import ABC, abstractmethod


class StepDependent(ABC):
    """The interface of such a module. What a step does is equal on all ranks, in all micro-batches, and again where a
    forward is run again for its backward.
    """

    @abstractmethod
    def begin_step(self, seed: int, step: int) -> None:
        """Become what the module is in `step` of a run with `seed`; called before every forward in training mode."""
