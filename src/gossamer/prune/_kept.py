"""How many weights of a row are kept, and which: a fraction of the row, or n of every m neighbors."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.spec.errors import bad_input

_PATTERN = re.compile(r"(\d+):(\d+)")
_DEFAULT = 0.5
_ROUND = 1e-9  # 0.3 * 10 is a little below 3


@dataclass(frozen=True, slots=True)
class Kept:
    """Of every row `sparsity` goes; or, where `per_group` is set, so many of each `group` neighbors stay."""

    sparsity: float
    per_group: int = 0
    group: int = 0

    @classmethod
    def of(cls, sparsity: float | None, pattern: str) -> Kept:
        """Read the settings of a pruning. Raises BadInput, also for both at once."""
        if not pattern:
            share = _DEFAULT if sparsity is None else sparsity
            if not (math.isfinite(share) and 0 < share < 1):
                raise bad_input(
                    wanted="a sparsity above 0 and below 1, the fraction that is set to zero",
                    got=f"{share:g}",
                    do="give one such as 0.5",
                    key="sparsity",
                )
            return cls(share)
        if sparsity is not None:
            raise bad_input(
                wanted="a sparsity or a pattern", got=f"{sparsity:g} and {pattern}", do="leave one out", key="pattern"
            )
        match = _PATTERN.fullmatch(pattern)
        few, many = (int(match[1]), int(match[2])) if match else (0, 0)
        if not 0 < few < many:
            raise bad_input(
                wanted="a pattern n:m, of which n of every m neighbors are kept, 0 < n < m",
                got=repr(pattern),
                do="give one such as 2:4",
                key="pattern",
            )
        return cls(1 - few / many, few, many)

    def check(self, columns: int, name: str) -> None:
        """Raise BadInput for a row that the pattern does not divide."""
        if self.group and columns % self.group:
            raise bad_input(
                wanted=f"rows that are divided into groups of {self.group}",
                got=f"{columns} weights a row in {name}",
                do="exclude this layer, or give a sparsity",
                key="pattern",
            )

    def mask(self, scores: Tensor) -> Tensor:
        """Return which weights are kept (bool) of scores (rows, columns); of equal scores the first ones go."""
        rows, columns = scores.shape
        groups = scores.reshape(-1, self.group) if self.group else scores
        gone = self.group - self.per_group if self.group else math.floor(self.sparsity * columns + _ROUND)
        lowest = groups.sort(dim=1, stable=True).indices[:, :gone]
        kept = torch.ones(groups.shape, dtype=torch.bool, device=scores.device).scatter_(1, lowest, False)
        return kept.view(rows, columns)
