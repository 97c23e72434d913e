"""The trials that both sides run: which micro-batches, at which weights, in which precision."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gossamer.loss import IGNORE, Loss
from gossamer.model.precision import Precision
from gossamer.model.unit_seeds import mix
from gossamer.ops.random_signs import signed_sums
from gossamer.run.batches import Batches, Feed, MicroBatch, RankBatch
from gossamer.spec.plan import Plan

_MOVED_BY, _AT_LEAST = 0.05, 0.01  # fraction of a tensor's root mean square; absolute, for a tensor of zeros
_FINER = 16  # fraction 1/16 of a value's last place, by which it is changed
_FP16_SCALE = 1024.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One round of a proof: some micro-batches of every replica that takes part, computed at the same weights."""

    number: int  # step number for random generators
    precision: Precision
    moves: bool  # whether the weights are moved before it
    pieces: Mapping[int, Mapping[int, MicroBatch]]  # replica -> number -> micro-batch
    labels: Mapping[int, Mapping[int, float]]  # valid labels of each

    @property
    def total(self) -> float:
        """Return the number of valid labels of all micro-batches."""
        return sum(sum(mine.values()) for mine in self.labels.values())

    @property
    def is_half_precision(self) -> bool:
        """Return whether the round computes in half precision, in which case it is the last one."""
        return self.precision.compute is not torch.float32

    @property
    def scale(self) -> float:
        """Return the loss scale, which keeps fp16 gradients from underflow; 1 in other precisions."""
        return _FP16_SCALE if self.precision.compute is torch.float16 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSet:
    """All rounds of a proof in order; the buffers and other state of the model carry over from round to round."""

    rounds: tuple[Trial, ...]
    seed: int

    @property
    def replicas(self) -> tuple[int, ...]:
        """Return the replicas that take part."""
        return tuple(self.rounds[0].pieces)

    @property
    def microbatches(self) -> int:
        """Return the number of micro-batches of a round, over all replicas."""
        return sum(map(len, self.rounds[0].pieces.values()))


def question_of(
    batches: Batches, plan: Plan, objective: Loss, *, seed: int, steps: int, precision: Precision, exact: Precision
) -> TrialSet:
    """Return the trials of a proof, with micro-batches of the first and of the last replica as the run has them.

    The first round has those of the run's first step, the second, at moved weights, those of its last step. If the run
    computes in another precision than `exact`, a third round has some in `precision`.
    """
    replicas = sorted({0, plan.mesh.replica - 1})
    count = max([2, *map(len, plan.stage_ranks)])
    asked = [(exact, False, 0), (exact, True, max(1, steps - 1))]
    if precision.compute is not exact.compute:
        asked.append((precision, False, max(1, steps // 2)))
    rounds = []
    for number, (computes_in, moves, step) in enumerate(asked):
        pieces: dict[int, dict[int, MicroBatch]] = {}
        for place, replica in enumerate(replicas):
            found = _some(Feed(batches, plan, replica, seed), step, count)
            keys = range(place * count, (place + 1) * count)
            pieces[replica] = {n: MicroBatch(key, rows) for n, (key, rows) in enumerate(zip(keys, found, strict=True))}
        rounds.append(_round(number, computes_in, moves, pieces, objective))
    return TrialSet(rounds=tuple(rounds), seed=seed)


def uneven(question: TrialSet, objective: Loss) -> TrialSet:
    """Return the same trials with fewer labels and more padding in all micro-batches but the first."""
    rounds = []
    for one in question.rounds:
        pieces = {
            replica: {n: MicroBatch(p.key, _shortened(p.rows, p.key, objective)) for n, p in mine.items()}
            for replica, mine in one.pieces.items()
        }
        rounds.append(_round(one.number, one.precision, one.moves, pieces, objective))
    return replace(question, rounds=tuple(rounds))


@torch.no_grad()
def move(tensors: Mapping[str, Tensor], seed: int) -> None:
    """Add random signs, scaled to the tensor, to every parameter: the same bits on every rank, by its name."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        size = float(tensor.double().square().mean().sqrt())
        if not math.isfinite(size):
            continue
        # A power of two: equal on ranks that round the mean differently.
        by = 2.0 ** round(math.log2(_MOVED_BY * size + _AT_LEAST))
        added = torch.empty(tensor.numel(), device=tensor.device)
        for where, signs in signed_sums(tensor.numel(), [(mix(seed, zlib.crc32(name.encode())), by)], tensor.device):
            added[where] = signs
        tensor.add_(added.view(tensor.shape).to(tensor.dtype))


@torch.no_grad()
def nudge(tensors: Mapping[str, Tensor], seed: int, compute: torch.dtype) -> None:
    """Change parameters by less than the resolution of `compute`, so that all values derived from them are rounded
    differently.
    """
    by = torch.finfo(compute).eps / _FINER
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        changed = torch.empty(tensor.numel(), device=tensor.device)
        for where, signs in signed_sums(tensor.numel(), [(mix(seed, zlib.crc32(name.encode())), by)], tensor.device):
            changed[where] = signs
        tensor.mul_(1 + changed.view(tensor.shape))


def owned(rows: RankBatch, device: torch.device) -> RankBatch:
    """Return a copy of the batch on `device`, as a forward may write to its input."""
    return {name: value.to(device, copy=True) for name, value in rows.items()}


def _round(
    number: int,
    precision: Precision,
    moves: bool,
    pieces: Mapping[int, Mapping[int, MicroBatch]],
    objective: Loss,
) -> Trial:
    labels = {r: {n: float(objective.weight(p.rows)) for n, p in mine.items()} for r, mine in pieces.items()}
    return Trial(number=number, precision=precision, moves=moves, pieces=pieces, labels=labels)


def _some(feed: Feed, step: int, count: int) -> list[RankBatch]:
    """Return the first and the last micro-batches of the steps from `step` on; uneven batches differ there."""
    found: list[RankBatch] = []
    for numbers in _numbers(feed.plan.microbatches[feed.replica], count):
        fetched = replace(feed, only=frozenset(numbers)).fetch(step)
        found += [fetched[n].rows for n in numbers]
        step += 1
    return found


def _numbers(there: int, count: int) -> Iterator[list[int]]:
    """Yield, step by step, which of a step's `there` micro-batches to take, until `count` are taken."""
    while count > 0:
        taken = min(there, count)
        yield [*range(taken - 1), there - 1]
        count -= taken


def _shortened(rows: RankBatch, turn: int, objective: Loss) -> RankBatch:
    labels = rows.get("labels")
    if labels is None or labels.dtype is not torch.int64 or labels.ndim not in (1, 2) or not turn:
        return rows
    gone = torch.zeros_like(labels, dtype=torch.bool)
    if labels.ndim == 1:
        gone[len(labels) - min(turn, len(labels) - 1) :] = True
    else:
        for row in range(len(labels)):
            gone[row, labels.shape[1] - labels.shape[1] * (1 + (turn + row) % 3) // 6 :] = True
    found = {**rows, "labels": labels.masked_fill(gone, IGNORE)}
    mask = rows.get("attention_mask")
    if mask is not None and mask.shape == labels.shape:
        found["attention_mask"] = mask.masked_fill(gone, 0)
    return found if float(objective.weight(found)) > 0 else rows
