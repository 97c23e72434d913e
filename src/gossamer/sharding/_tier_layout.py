"""Where everything lies in a tier file: by group of parameters two records of weights and states, and gradients.

A group is a gradient bucket: its parameters are updated together. An update reads the record that counts and writes
the other one; the journal then switches. Frozen parameters have one record, of weights alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from gossamer.optimizer import Optimizer, OptimizerState
from gossamer.sharding._tier_shares import TierShares
from gossamer.store.tier_file import paged

WEIGHT = ""  # the slot of the parameter itself


@dataclass(frozen=True, slots=True)
class TierTensor:
    """A tensor of a record: the parameter and its slot (WEIGHT: itself), and the bytes from the record's start."""

    name: str
    slot: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def of(self, record: Tensor) -> Tensor:
        """Return the view of it in a record's bytes, (nbytes,) uint8."""
        flat = record[self.start : self.start + self.nbytes]
        return flat.view(self.dtype).view(self.shape) if self.nbytes else torch.empty(self.shape, dtype=self.dtype)


@dataclass(frozen=True, slots=True)
class TierGroup:
    """A group: the tensors of its record (weights first), where its records start, and where its gradient does.

    Pages keep every tensor's start aligned, so that some weights can be read without the others.
    """

    names: tuple[str, ...]
    tensors: tuple[TierTensor, ...]
    record_bytes: int
    starts: tuple[int, ...]  # of both records; of the only one where the group is frozen
    gradient_start: int
    gradient_bytes: int  # of the parameters that are in the file, in memory; in the file, whole pages
    open_bytes: int  # of the whole gradient, in memory until the update has read its part

    @property
    def is_frozen(self) -> bool:
        return len(self.starts) == 1

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of its weights and of its gradient."""
        return next(one.dtype for one in self.tensors if one.slot == WEIGHT)

    @property
    def weights(self) -> dict[str, TierTensor]:
        return {one.name: one for one in self.tensors if one.slot == WEIGHT}

    def views(self, record: Tensor) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
        """Return the weights and the optimizer states in a record's bytes, by parameter."""
        weights, states = dict[str, Tensor](), {name: dict[str, Tensor]() for name in self.names}
        for one in self.tensors:
            if one.slot == WEIGHT:
                weights[one.name] = one.of(record)
            else:
                states[one.name][one.slot] = one.of(record)
        return weights, states


@dataclass(frozen=True, slots=True)
class TierLayout:
    """The layout of a tier file. `keeps_gradients`: it has room for the gradients too."""

    groups: tuple[TierGroup, ...]
    size_bytes: int
    keeps_gradients: bool

    @staticmethod
    def of(
        params: Mapping[str, Tensor],
        groups: Sequence[Sequence[str]],
        rule: Optimizer,
        *,
        keeps_gradients: bool,
        shares: TierShares,
    ) -> TierLayout:
        """Lay out `params`: those of `groups` are trained, the others frozen. No value of a parameter is read.

        `shares`: which of them the file has; of others there is an empty tensor.
        """
        trained = {name for names in groups for name in names}
        frozen = tuple(name for name in params if name not in trained)
        found, at = [], 0
        for names in (*groups, *([frozen] if frozen else [])):
            is_trained = names is not frozen
            tensors, record = _record({n: params[n] for n in names}, rule if is_trained else None, shares)
            starts = (at, at + record) if is_trained else (at,)
            at += record * len(starts)
            gradient = sum(one.nbytes for one in tensors if one.slot == WEIGHT) if is_trained else 0
            whole = sum(params[n].nbytes for n in names) if is_trained else 0
            found.append(TierGroup(tuple(names), tensors, record, starts, at, gradient, whole))
            at += paged(gradient) if keeps_gradients else 0
        return TierLayout(tuple(found), at, keeps_gradients)

    @property
    def trained(self) -> tuple[TierGroup, ...]:
        return tuple(group for group in self.groups if not group.is_frozen)

    @property
    def norm_dtype(self) -> torch.dtype:
        """Return the type in which the norm of all gradients is computed (see ops.norm)."""
        kinds = {one.dtype for group in self.trained for one in group.weights.values()}
        return torch.float64 if torch.float64 in kinds else torch.float32

    @property
    def window_bytes(self) -> int:
        """Return the bytes of the largest record of a trained group, with its gradient where that is in the file."""
        return max((self.window_of(group) for group in self.trained), default=0)

    def window_of(self, group: TierGroup) -> int:
        """Return the bytes that an update of the group holds in memory, beside a gradient that is there already."""
        return group.record_bytes + (paged(group.gradient_bytes) if self.keeps_gradients else 0)

    def step_bytes(self, reads: Mapping[str, int]) -> tuple[int, int]:
        """Return the bytes that a step reads and writes. `reads`: how often the weights of a parameter are fetched."""
        weights = {one.name: paged(one.nbytes) for group in self.groups for one in group.weights.values()}
        records = sum(group.record_bytes for group in self.trained)
        gradients = sum(paged(group.gradient_bytes) for group in self.trained) if self.keeps_gradients else 0
        fetched = sum(weights[name] * times for name, times in reads.items())
        return fetched + records + gradients, records + gradients


def _record(
    params: Mapping[str, Tensor], rule: Optimizer | None, shares: TierShares
) -> tuple[tuple[TierTensor, ...], int]:
    """Return the tensors of a record and its bytes: all weights, then all states."""
    shapes = {name: torch.empty(p.shape, dtype=p.dtype, device="meta") for name, p in params.items()}
    own = {name: shares.own(name, p) for name, p in shapes.items()}
    named = [(name, WEIGHT, p) for name, p in own.items()]
    if rule is not None:
        states = first_states(rule, shapes, shares)
        named += [(name, slot, one) for name in states for slot, one in states[name].items()]
    found, at = [], 0
    for name, slot, one in named:
        found.append(TierTensor(name, slot, tuple(one.shape), one.dtype, at))
        at += paged(one.nbytes)
    return tuple(found), at


def first_states(rule: Optimizer, params: Mapping[str, Tensor], shares: TierShares) -> OptimizerState:
    """Return the first states of those parameters that a rank has."""
    return rule.init({name: p for name, p in params.items() if shares.has(name, p.shape)})
