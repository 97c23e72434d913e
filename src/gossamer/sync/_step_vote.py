"""The vote of all ranks on a step before its update: what each says, and what they conclude alike from all rows."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.spec.errors import WireMismatch

_MARKS = 2**48  # hashes of sets of idle parameters: the fraction of a vote whose integer part is a request


@dataclass(frozen=True, slots=True)
class StepContext:
    """The context of one step on its rank: step number, random seed, learning rate, valid labels, averaging level."""

    step: int
    seed: int
    lr: float
    weight: float  # valid labels of this rank
    scale: float = 1.0  # loss scale (fp16), divided out before gradients are encoded
    together: bool = False  # each loss was divided by the labels of all ranks that hold these parameters, not by mine
    level: str = "all"  # the ranks over which gradients are averaged


@dataclass(frozen=True, slots=True)
class StepVote:
    """The vote of one rank on a step before the update. `ask` is a small code for `stop` or `save` requests."""

    loss: float  # mean over this rank's valid labels
    ask: int = 0
    speaks: bool = True  # whether this rank computes the loss: with pipeline stages, the last one does
    squared: float | None = None  # its part of the squared norm, where no bucket holds the gradient
    beside: Tensor | None = None  # a tensor to gather with the votes, equal in shape and type on all ranks


@dataclass(frozen=True, slots=True)
class StepAgreement:
    """The outcome of the votes on a step: the same numbers on all ranks, or on those of one island."""

    finite: bool
    loss: float  # mean over all valid labels
    weight: float  # valid labels of all who voted
    norm: float  # of the mean gradient, over all stages; in a local step, of this island's
    ask: int  # the largest request
    bad_ranks: tuple[int, ...]
    idle: frozenset[str] = frozenset()  # parameters without a gradient on any rank: they are not updated
    beside: Tensor | None = None  # (voters, *shape): the tensors gathered with the votes


@dataclass(frozen=True, slots=True)
class GradientReport:
    """The gradients of a step on one rank, as its vote reports them.

    `is_mine`: this rank gave numbers that are not finite; `is_hidden`: a lossy exchange might have hidden them.
    """

    squared: float  # this rank's part of the squared norm
    is_mine: bool
    is_hidden: bool
    idle: frozenset[str]  # parameters without a gradient on this rank


def row_of(step: int, vote: StepVote, weight: float, report: GradientReport) -> list[float]:
    """Return a rank's row of the vote: step, squared norm, loss times labels, labels, request and mark."""
    # The sign bit tells whose it is: where all learn the same mean, all have what one has given.
    squared = math.copysign(math.nan if report.is_hidden else report.squared, -1.0 if report.is_mine else 1.0)
    # A rank without labels has a weight of zero, and 0 * nan would still poison the mean.
    spoken = weight if vote.speaks else 0.0
    ask = vote.ask + _mark(report.idle)
    return [float(step), squared, vote.loss * spoken if spoken else 0.0, spoken, ask]


@dataclass(frozen=True, slots=True)
class StepBallot:
    """The rows of all voters on a step, `votes` (voters, 5) float64; equal on all of them."""

    votes: Tensor
    voters: Sequence[int]  # their ranks

    def check(self, step: int) -> None:
        """Raise WireMismatch where a voter is at another step."""
        if not bool((self.votes[:, 0] == step).all()):
            steps = [int(s) for s in self.votes[:, 0].tolist()]
            raise WireMismatch(
                f"wanted all ranks at the same step, got steps {steps} by rank: start them from one checkpoint"
            )

    def marks(self, ranks: Sequence[int]) -> Tensor:
        """Return the marks of the idle parameters of `ranks`."""
        return self.votes[[self.voters.index(rank) for rank in ranks], 4] % 1

    def verdict(self, firsts: Sequence[int], idle: frozenset[str], beside: Tensor | None) -> StepAgreement:
        """Return the outcome; `firsts`: the voters that each report another part of the squared norm."""
        votes = self.votes
        sick = ~(torch.isfinite(votes[:, 1]) & torch.isfinite(votes[:, 2]))
        guilty = torch.signbit(votes[:, 1]) | ~torch.isfinite(votes[:, 2])  # they gave what the others got
        squares = votes[:, 1].abs()
        total = float(votes[:, 3].sum())
        return StepAgreement(
            finite=not bool(sick.any()),
            loss=float(votes[:, 2].sum()) / total if total else 0.0,
            weight=total,
            norm=math.sqrt(float(squares.max()) if bool(sick.any()) else float(squares[firsts].sum())),
            ask=int(votes[:, 4].max()),
            bad_ranks=_blamed(self.voters, sick, guilty),
            idle=idle,
            beside=beside,
        )


def _mark(idle: frozenset[str]) -> float:
    """Return a number below 1 that differs for every set of parameters; 0 for the empty set."""
    if not idle:
        return 0.0
    said = hashlib.blake2b("\0".join(sorted(idle)).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return (int.from_bytes(said, "big") % (_MARKS - 1) + 1) / _MARKS


def _blamed(voters: Sequence[int], sick: Tensor, guilty: Tensor) -> tuple[int, ...]:
    """Return the ranks that gave non-finite numbers; if none can be named, those that received them."""
    if not bool(sick.any()):
        return ()
    return tuple(voters[i] for i in torch.nonzero(guilty if bool(guilty.any()) else sick).flatten().tolist())
