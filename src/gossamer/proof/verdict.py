"""Verdict on whether the parallel layout equals one process: a pure function of both sides' fingerprint tables.

    d(a, b) = max over a row's columns of |a - b| / s,   s = max(size of b, 1e-6 of the largest of all)
with the largest entry for the first column and the root mean square for the others. The tolerance of a tensor is
`MARGIN` times the distance of two runs of one process that round differently. It is at least 16 units in the last
place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gossamer.proof.fingerprints import ABSENT, FingerprintTable, TensorNames

MARGIN = 8.0
EPS = 16 * torch.finfo(torch.float32).eps
_OTHERS = 64  # times the tolerance on mixed processors or versions: no rank alone can measure that noise
_SMALLEST = 1e-6  # of the largest tensor's size: the least scale of a difference


@dataclass(frozen=True, slots=True, kw_only=True)
class BothTables:
    """The fingerprint tables to compare. `alone`: of one process. `again`: of one process with different rounding,
    whose second replica starts with the state of the first. `divided`: of every rank of the layout.
    """

    names: TensorNames
    alone: FingerprintTable
    again: FingerprintTable
    divided: Sequence[FingerprintTable]
    exact: tuple[bool, ...]  # by round: whether it computes in float32
    own: int  # micro-batches of the first replica, which come first
    kinds: int = 1  # number of different processors and versions, which round differently

    @property
    def floor(self) -> float:
        """Return the smallest relative tolerance of a float32 value."""
        return EPS if self.kinds == 1 else _OTHERS * EPS


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One difference beyond the tolerance: an initial value, loss, gradient or buffer, by rank and round."""

    what: str  # "initial value" | "loss" | "gradient" | "buffer"
    name: str  # of a tensor; of a loss, its micro-batch
    rank: int
    round: int
    got: float
    wanted: float
    distance: float
    limit: float
    factor: float | None = None  # got = factor * wanted, if it is a multiple


@dataclass(frozen=True, slots=True, order=True)
class Spot:
    """The position of a forward value: the leaf `place` of a call's output in a micro-batch; `into`: the stage that
    received it, else -1.
    """

    round: int
    key: int  # of the micro-batch
    call: str
    place: int
    into: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    """The first forward value that differs from that of one process, with its rank and micro-batch."""

    spot: Spot
    rank: int
    got: str
    wanted: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryDifference:
    """The differing entries, in words, of the first gradient that differs."""

    fault: Fault
    said: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateStateFindings:
    """The state that each data-parallel replica keeps for itself, so that together they are not one process."""

    apart: Fault | None = None  # first difference if replicas shared one state
    writes: bool = False  # whether the forward writes to parameters, on each replica by itself
    counted: str = ""  # a buffer that each replica updates from its own batches


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofVerdict:
    """The result of a proof: losses, the number of gradients proved, distances and faults.

    Without `faults` and `unsteady` names both sides agree.
    """

    losses: tuple[float, float]  # of the first round: the layout's mean, one process's
    tensors: int
    proved: int
    idle: tuple[str, ...]  # had no gradient on either side
    within: float  # the largest distance of a gradient in float32
    within_coarse: float  # in the run's own precision if it is not float32; else 0
    unsteady: tuple[str, ...] = ()  # tensors that differ between two builds on one rank
    faults: tuple[Fault, ...] = ()
    parting: Parting | None = None  # the first forward value that differs
    entries: EntryDifference | None = None
    own: PrivateStateFindings = PrivateStateFindings()


def first_of(faults: Sequence[Fault]) -> Fault:
    """Return the fault to report first: an initial value, else the first of the earliest round.

    Within a round, gradients come before buffers and buffers before losses.
    """
    order = {"initial value": 0, "gradient": 1, "buffer": 2, "loss": 3}
    return min(faults, key=lambda f: (f.what != "initial value", f.round, order[f.what]))


def judge(sides: BothTables) -> ProofVerdict:
    """Compare both sides' tables and return the verdict."""
    unsteady, parted = _unsteady(sides), _parted(sides)
    noises = _Noises.of(sides, is_parted=parted is not None)
    values = [] if unsteady else _initial(sides)
    losses = _losses(sides, noises)
    gradients, distances = _gradients(sides, noises)
    buffers = _buffers(sides)
    told = _told(sides)
    moved = ((sides.alone.gradients[:, :, 0] > 0) & sides.alone.gradients.isfinite().all(2)).any(0)
    idle = tuple(n for n, m in zip(sides.names.trained, moved.tolist(), strict=True) if not m)
    exact = [distances[r] for r, is_exact in enumerate(sides.exact) if is_exact]
    coarse = [distances[r] for r, is_exact in enumerate(sides.exact) if not is_exact]
    return ProofVerdict(
        losses=told,
        tensors=len(sides.names.trained),
        proved=len(sides.names.trained) - len(idle),
        idle=idle,
        within=max(exact, default=0.0),
        within_coarse=max(coarse, default=0.0),
        unsteady=unsteady,
        faults=(*values, *losses, *gradients, *buffers),
        own=PrivateStateFindings(
            apart=parted,
            writes=bool(sides.alone.keeps[1]),
            counted=("", *sides.names.buffers)[int(sides.alone.keeps[2])],
        ),
    )


@dataclass(frozen=True, slots=True)
class _Noises:
    """The distance of two runs of one process: (rounds, trained) of gradients, (rounds, micro-batches) of losses.

    If replicas have state that changes their values, only the first replica ran twice in the same way.
    """

    gradients: Tensor
    losses: Tensor

    @staticmethod
    def of(sides: BothTables, *, is_parted: bool) -> _Noises:
        alone, again = sides.alone, sides.again
        if not is_parted:
            far = [_far(b, a, _sizes(a)) for a, b in zip(alone.gradients, again.gradients, strict=True)]
            return _Noises(torch.stack(far).nan_to_num(0.0), (again.losses - alone.losses).abs())
        far = [_far(b, a, _sizes(a)) for a, b in zip(alone.first, again.first, strict=True)]
        gradients = torch.stack(far).nan_to_num(0.0)
        most = gradients.max(1, keepdim=True).values if gradients.numel() else gradients
        gradients = torch.where(alone.first[:, :, 0] > 0, gradients, most)  # for parameters used by other replicas only
        losses = (again.losses - alone.losses).abs()
        losses[:, sides.own :] = losses[:, : sides.own].max(1, keepdim=True).values
        return _Noises(gradients, losses)


def _parted(sides: BothTables) -> Fault | None:
    """Return the first value that would differ if all replicas shared one state; None if none would."""
    if not bool(sides.alone.keeps[0]):
        return None
    noises = _Noises.of(sides, is_parted=True)
    together = replace(sides, alone=sides.again, divided=[sides.alone], exact=sides.exact[:1])
    return next(iter([*_losses(together, noises), *_gradients(together, noises)[0]]), None)


def _unsteady(sides: BothTables) -> tuple[str, ...]:
    differ = (sides.alone.initial[:, :2] != sides.again.initial[:, :2]).any(1)
    return tuple(n for n, d in zip(sides.names.values, differ.tolist(), strict=True) if d)


def _initial(sides: BothTables) -> list[Fault]:
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


def _losses(sides: BothTables, noises: _Noises) -> list[Fault]:
    found = []
    for r in range(len(sides.exact)):
        wanted, noise = sides.alone.losses[r], noises.losses[r]
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


def _gradients(sides: BothTables, noises: _Noises) -> tuple[list[Fault], list[float]]:
    """Return the gradient faults in the order of names, round by round, and the largest distance of every round."""
    found: list[Fault] = []
    largest = []
    for r in range(len(sides.exact)):
        rows = [table.gradients[r] for table in sides.divided]
        faults, far = _compared(sides, "gradient", r, rows, sides.alone.gradients[r], noises.gradients[r])
        found += faults
        largest.append(far)
    return found, largest


def _buffers(sides: BothTables) -> list[Fault]:
    found: list[Fault] = []
    for r, alone in enumerate(sides.alone.buffers):
        rows = [table.buffers[r] for table in sides.divided]
        noise = _far(sides.again.buffers[r], alone, _sizes(alone)).nan_to_num(0.0) if sides.names.buffers else alone
        found += _compared(sides, "buffer", r, rows, alone, noise)[0]
    return found


def _compared(
    sides: BothTables, what: str, r: int, divided: Sequence[Tensor], alone: Tensor, noise: Tensor
) -> tuple[list[Fault], float]:
    names = sides.names.trained if what == "gradient" else sides.names.buffers
    if not names:
        return [], 0.0
    sizes = _sizes(alone)
    eps = torch.tensor(sides.names.eps if what == "gradient" else [0.0] * len(names))
    limits = (MARGIN * noise).clamp(min=sides.floor).maximum(16 * eps)
    found, largest = [], 0.0
    for rank, rows in enumerate(divided):
        held = (rows[:, 0] != ABSENT) & alone.isfinite().all(1)  # non-finite values of one process are not compared
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
    """Return the scale of each column, (names, WIDTH), by which differences are divided."""
    found = alone[:, 1:2].abs().expand(alone.shape).clone()
    found[:, 0] = alone[:, 0].abs()
    largest = found.nan_to_num(0.0, 0.0, 0.0).max(0).values
    return torch.maximum(found, _SMALLEST * largest).clamp(min=torch.finfo(torch.float32).tiny)


def _far(rows: Tensor, alone: Tensor, sizes: Tensor) -> Tensor:
    """Return the distance of rows, (names,); inf or nan where a row is not finite."""
    both = (rows - alone).abs() / sizes
    return torch.where(rows == alone, torch.zeros_like(both), both).max(1).values


def _factor(got: Tensor, wanted: Tensor) -> float | None:
    """Return the factor of `got` over `wanted`; None if one row is no multiple of the other."""
    a, b = got[2:].double(), wanted[2:].double()
    size = float(b.square().sum())
    if not size or not bool(a.isfinite().all()):
        return None
    factor = float((a * b).sum()) / size
    rest = float((a - factor * b).square().sum()) ** 0.5
    apart = float((a - b).square().sum()) ** 0.5
    return factor if rest < 0.02 * apart else None


def _told(sides: BothTables) -> tuple[float, float]:
    wanted = sides.alone.losses[0]
    known = torch.stack([table.losses[0] for table in sides.divided])
    got = known.nan_to_num(0.0).sum(0) / (~known.isnan()).sum(0).clamp(min=1)
    return float(got.mean()), float(wanted.mean())
