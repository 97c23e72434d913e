"""Group lasso: the norm of every group of elements, which sets whole rows (neurons, heads, experts) to 0.

Paper: Yuan, Lin, JRSS B 2006. Symbols: x_g a group of n_g elements, l `strength`, s step.
Equations: P(x) = l sum_g sqrt(n_g) |x_g| ;  prox = v_g max(0, 1 - s l sqrt(n_g) / |v_g|)
Groups:    the slices along `dimension`; the elements of a tensor without that dimension.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.optimizer.proximal_operator import ProximalOperator
from gossamer.spec.errors import bad_input
from gossamer.spec.validate import positive


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLasso(ProximalOperator):
    """The norm of each slice along `dimension`, times `strength` and the root of its number of elements.

    Of a linear layer's weight, dimension 0 has a group for every output, dimension 1 one for every input.
    """

    strength: float = 1e-4
    dimension: int = 0

    def __post_init__(self) -> None:
        positive("strength", self.strength)
        if self.dimension < 0:
            do = "write 0 for the rows of a matrix, 1 for its columns"
            raise bad_input(wanted="a dimension of at least 0", got=f"{self.dimension}", do=do, key="dimension")

    @property
    def by_element(self) -> bool:
        return False

    def penalty(self, x: Tensor) -> Tensor:
        groups = self._groups(x)
        found: Tensor = self.strength * math.sqrt(groups.shape[1]) * groups.norm(dim=1)
        return found

    def prox(self, v: Tensor, step: float) -> Tensor:
        if not v.numel():
            return v.clone()
        groups = self._groups(v)
        norms = groups.norm(dim=1, keepdim=True)
        least = step * self.strength * math.sqrt(groups.shape[1])
        kept = torch.where(norms > least, groups * (1 - least / norms), 0.0)
        if v.ndim <= self.dimension:
            return kept.view(v.shape)
        return kept.view(v.transpose(0, self.dimension).shape).transpose(0, self.dimension)

    def _groups(self, x: Tensor) -> Tensor:
        """Return the groups as the rows of a matrix."""
        if x.ndim <= self.dimension:
            return x.reshape(-1, 1)
        turned = x.transpose(0, self.dimension)
        return turned.reshape(turned.shape[0], -1)
