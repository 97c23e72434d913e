"""Is the layout one process? A pure function of what both sides say.

    d(a, b) = max over a row's columns of |a - b| / s,   s = max(size of b, 1e-6 of the largest of all)
with the largest entry for the first column and the root mean square for the others. What is forgiven, per tensor, is
`MARGIN` times the distance of two runs of one process that round otherwise, and never less than 16 units in the last
place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gossamer.proof.rows import ABSENT, Names, Table

MARGIN = 8.0
EPS = 16 * torch.finfo(torch.float32).eps
_OTHERS = 64  # times more is forgiven where ranks are of several kinds: no rank alone can measure that noise
_SMALLEST = 1e-6  # of the largest tensor's: what is smaller is measured by that


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """What is compared. `again` is one process once more, in another rounding; `divided` that of every rank."""

    names: Names
    alone: Table
    again: Table
    divided: Sequence[Table]
    exact: tuple[bool, ...]  # by round: whether it computes in float32
    continues: bool  # whether one replica has all micro-batches, and so the state of one process
    kinds: int = 1  # of processors and versions that the ranks compute with: others round otherwise

    @property
    def floor(self) -> float:
        """What is always forgiven of a float32 number."""
        return EPS if self.kinds == 1 else _OTHERS * EPS


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What differs: the first in the order of the backward."""

    what: str  # "initial value" | "loss" | "gradient" | "buffer"
    name: str  # of a tensor; of a loss, its micro-batch
    rank: int
    round: int
    got: float
    wanted: float
    distance: float
    limit: float
    factor: float | None = None  # what is there is so many times what should be


@dataclass(frozen=True, slots=True, order=True)
class Spot:
    """A value of a forward: the leaf `place` of what a call gives; `into`: the stage that received it, else -1."""

    round: int
    key: int  # of the micro-batch
    call: str
    place: int
    into: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    """The first value that is another one than in one process."""

    spot: Spot
    rank: int
    got: str
    wanted: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How it went. With faults, the first is what to begin with."""

    losses: tuple[float, float]  # of the first round: the layout's mean, one process's
    tensors: int
    proved: int
    idle: tuple[str, ...]  # had no gradient on either side
    within: float  # the largest distance of a gradient in float32
    within_coarse: float  # in the run's own precision, where that is another; else 0
    unsteady: tuple[str, ...] = ()  # two builds of the same model on one rank differ in these
    faults: tuple[Fault, ...] = ()
    parting: Parting | None = None  # the first value of a forward that is another one
    apart: Fault | None = None  # replicas are one process only where each has state of its own; what else it would be


def judge(sides: Sides) -> Verdict:
    """Compare."""
    unsteady = _unsteady(sides)
    values = [] if unsteady else _initial(sides)
    losses = _losses(sides)
    gradients, distances = _gradients(sides)
    buffers = _buffers(sides)
    told = _told(sides)
    moved = ((sides.alone.gradients[:, :, 0] > 0) & sides.alone.gradients.isfinite().all(2)).any(0)
    idle = tuple(n for n, m in zip(sides.names.trained, moved.tolist(), strict=True) if not m)
    exact = [distances[r] for r, is_exact in enumerate(sides.exact) if is_exact]
    coarse = [distances[r] for r, is_exact in enumerate(sides.exact) if not is_exact]
    return Verdict(
        losses=told,
        tensors=len(sides.names.trained),
        proved=len(sides.names.trained) - len(idle),
        idle=idle,
        within=max(exact, default=0.0),
        within_coarse=max(coarse, default=0.0),
        unsteady=unsteady,
        faults=(*values, *losses, *gradients, *buffers),
    )


def apart(sides: Sides, alone: Table) -> Sides:
    """The same beside a process for every replica, which rounds as one process does."""
    again = replace(
        alone,
        gradients=alone.gradients + sides.again.gradients - sides.alone.gradients,
        buffers=alone.buffers + sides.again.buffers - sides.alone.buffers,
        losses=alone.losses + sides.again.losses - sides.alone.losses,
    )
    return replace(sides, alone=alone, again=again, continues=True)


def _unsteady(sides: Sides) -> tuple[str, ...]:
    differ = (sides.alone.initial[:, :2] != sides.again.initial[:, :2]).any(1)
    return tuple(n for n, d in zip(sides.names.values, differ.tolist(), strict=True) if d)


def _initial(sides: Sides) -> list[Fault]:
    found = []
    for rank, table in enumerate(sides.divided):
        held = table.initial[:, 0] != ABSENT
        differ = held & (table.initial[:, :2] != sides.alone.initial[:, :2]).any(1)
        for place in differ.nonzero().flatten().tolist():
            found.append(
                Fault(
                    what="initial value",
                    name=sides.names.values[place],
                    rank=rank,
                    round=0,
                    got=float(table.initial[place, 2]),
                    wanted=float(sides.alone.initial[place, 2]),
                    distance=1.0,
                    limit=0.0,
                )
            )
    return found


def _losses(sides: Sides) -> list[Fault]:
    found = []
    for r, wanted in enumerate(sides.alone.losses):
        noise = (sides.again.losses[r] - wanted).abs()
        floor = sides.floor if sides.exact[r] else EPS * 2**8
        limit = torch.maximum(MARGIN * noise, floor * wanted.abs().clamp(min=1.0))
        for rank, table in enumerate(sides.divided):
            got = table.losses[r]
            apart = (got - wanted).abs()
            bad = (apart > limit) | (got.isinf() & wanted.isfinite())
            for micro in bad.nonzero().flatten().tolist():
                size = max(1.0, abs(float(wanted[micro])))
                found.append(
                    Fault(
                        what="loss",
                        name=f"micro-batch {micro}",
                        rank=rank,
                        round=r,
                        got=float(got[micro]),
                        wanted=float(wanted[micro]),
                        distance=float(apart[micro]) / size,
                        limit=float(limit[micro]) / size,
                    )
                )
    return found


def _gradients(sides: Sides) -> tuple[list[Fault], list[float]]:
    """Faults in the order of names, round by round; the largest distance of every round."""
    found: list[Fault] = []
    largest = []
    for r in range(len(sides.exact)):
        rows = [table.gradients[r] for table in sides.divided]
        faults, far = _compared(
            sides, "gradient", sides.names.trained, r, rows, sides.alone.gradients[r], sides.again.gradients[r]
        )
        found += faults
        largest.append(far)
    return found, largest


def _buffers(sides: Sides) -> list[Fault]:
    found: list[Fault] = []
    for r in range(len(sides.exact) if sides.continues else 1):
        rows = [table.buffers[r] for table in sides.divided]
        found += _compared(
            sides, "buffer", sides.names.buffers, r, rows, sides.alone.buffers[r], sides.again.buffers[r]
        )[0]
    return found


def _compared(
    sides: Sides, what: str, names: Sequence[str], r: int, divided: Sequence[Tensor], alone: Tensor, again: Tensor
) -> tuple[list[Fault], float]:
    if not names:
        return [], 0.0
    sizes = _sizes(alone)
    noise = _far(again, alone, sizes)
    eps = torch.tensor(sides.names.eps if what == "gradient" else [0.0] * len(names))
    limits = (MARGIN * noise.nan_to_num(0.0)).clamp(min=sides.floor).maximum(16 * eps)
    found, largest = [], 0.0
    for rank, rows in enumerate(divided):
        held = (rows[:, 0] != ABSENT) & alone.isfinite().all(1)  # what is not finite in one process proves nothing
        far = _far(rows, alone, sizes)
        bad = held & ~(far <= limits)
        good = far[held & ~bad]
        largest = max(largest, float(good.max()) if len(good) else 0.0)
        for place in bad.nonzero().flatten().tolist():
            found.append(
                Fault(
                    what=what,
                    name=names[place],
                    rank=rank,
                    round=r,
                    got=float(rows[place, 1]),
                    wanted=float(alone[place, 1]),
                    distance=float(far[place]),
                    limit=float(limits[place]),
                    factor=_factor(rows[place], alone[place]),
                )
            )
    return sorted(found, key=lambda one: names.index(one.name)), largest


def _sizes(alone: Tensor) -> Tensor:
    """(names, WIDTH): what a difference in each column is measured by."""
    found = alone[:, 1:2].abs().expand(alone.shape).clone()
    found[:, 0] = alone[:, 0].abs()
    largest = found.nan_to_num(0.0, 0.0, 0.0).max(0).values
    return torch.maximum(found, _SMALLEST * largest).clamp(min=torch.finfo(torch.float32).tiny)


def _far(rows: Tensor, alone: Tensor, sizes: Tensor) -> Tensor:
    """(names,): how far rows are apart; nan where one of them is not finite, or not held."""
    both = (rows - alone).abs() / sizes
    return torch.where(rows == alone, torch.zeros_like(both), both).max(1).values


def _factor(got: Tensor, wanted: Tensor) -> float | None:
    """How many times `wanted` a row is; None where it is no multiple of it."""
    a, b = got[2:].double(), wanted[2:].double()
    size = float(b.square().sum())
    if not size or not bool(a.isfinite().all()):
        return None
    factor = float((a * b).sum()) / size
    rest = float((a - factor * b).square().sum()) ** 0.5
    apart = float((a - b).square().sum()) ** 0.5
    return factor if rest < 0.02 * apart else None


def _told(sides: Sides) -> tuple[float, float]:
    wanted = sides.alone.losses[0]
    known = torch.stack([table.losses[0] for table in sides.divided])
    got = known.nan_to_num(0.0).sum(0) / (~known.isnan()).sum(0).clamp(min=1)
    return float(got.mean()), float(wanted.mean())
