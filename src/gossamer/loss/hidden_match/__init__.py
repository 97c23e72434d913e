"""Matches of hidden states: what is asked of a student's block beside a teacher's, one per file.

A match compares the outputs of two blocks at the same tokens, x (n, D) of the student and y (n, E) of the teacher, with
learned maps between the two widths, which are trained with the student and belong to the training alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor

from gossamer.spec.registry import Registry

__all__ = ["REGISTRY", "HiddenMatch", "build", "names"]


class HiddenMatch(ABC):
    """A match of two blocks: a frozen dataclass of settings."""

    @property
    def most_tokens(self) -> int:
        """Return how many tokens of a micro-batch are compared at most, drawn at random; 0: all."""
        return 0

    @abstractmethod
    def shapes(self, student: int, teacher: int) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the learned maps between these widths, by name: a matrix is (out, in), others start at
        0.
        """

    @abstractmethod
    def loss(self, student: Tensor, teacher: Tensor, maps: Mapping[str, Tensor]) -> Tensor:
        """Return the mean loss over tokens, (), of rows (n, D) and (n, E) in float32; 0 with a graph where too few."""


REGISTRY: Registry[HiddenMatch] = Registry(__name__, HiddenMatch)  # type: ignore[type-abstract]
names, build = REGISTRY.names, REGISTRY.build
