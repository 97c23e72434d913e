"""Exchanges: methods that average a gradient bucket (or any flat buffer) over ranks, as a DDP communication hook does.

A method is a coroutine: it yields the messages it sends and is sent back the messages that arrived. Several rounds,
error feedback and wrappers are then ordinary Python, and the same method runs in lockstep in one process, in cost
estimates, and on real links. Methods nest: error feedback around a compressor, a codec inside an exchange, one exchange
inside islands and one between.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields

from torch import Tensor

from gossamer.comm.bucket import Bucket, Layout
from gossamer.comm.message import ExchangeContext, ExchangeState, ProcessGroups, Rounds, Traffic
from gossamer.exchange._compiled import compile_kernels
from gossamer.exchange._compression_error import bytes_of, error_of, errors_of, measure
from gossamer.exchange._encode_time import seconds_of, turn_seconds_of
from gossamer.exchange._residual import (
    has_residual,
    has_state,
    is_cumulative,
    is_residual,
    matching_rule,
    with_error_feedback,
)
from gossamer.spec.registry import Registry

__all__ = [
    "REGISTRY",
    "Exchange",
    "ExchangeTraits",
    "build",
    "bytes_of",
    "compile_kernels",
    "error_of",
    "errors_of",
    "with_error_feedback",
    "is_residual",
    "measure",
    "names",
    "nested",
    "has_residual",
    "has_state",
    "seconds_of",
    "turn_seconds_of",
    "matching_rule",
    "is_cumulative",
]


@dataclass(frozen=True, slots=True)
class ExchangeTraits:
    """The properties of an exchange that callers may rely on; contract tests check every field.

    lossless:   the mean is the weighted mean, up to the order of summing.
    fixed_size: `traffic` is the size of the messages, to the byte; otherwise it is an upper limit.
    masked:     some entries are never sent, and their mean is 0: no feedback can recover them.
    remembers:  the compression error is kept and sent later (error feedback); a lossy exchange without it loses it.
    """

    lossless: bool = False
    fixed_size: bool = True
    remembers: bool = False
    masked: bool = False


class Exchange(ABC):
    """An exchange: a frozen dataclass of settings that averages a bucket over ranks, with state passed in and out.

    The bucket belongs to the exchange while it runs: afterwards its storage may hold the mean, or the compression
    error. State is never mutated. All arithmetic is in float32, that of exchanges without loss on float64 numbers in
    float64; the mean has the bucket's type.
    """

    @property
    @abstractmethod
    def traits(self) -> ExchangeTraits:
        """Return the properties callers may rely on."""

    @abstractmethod
    def init(self, layout: Layout) -> ExchangeState:
        """Return the state before the first exchange of a bucket with this layout; the same on every rank."""

    @abstractmethod
    def run(self, x: Bucket, state: ExchangeState, at: ExchangeContext) -> Rounds:
        """Run one exchange: yield messages, receive the replies, return the Outcome."""

    @abstractmethod
    def traffic(self, layout: Layout, levels: ProcessGroups, rank: int) -> tuple[Traffic, ...]:
        """Return the messages `run` sends on `rank`, in order, without encoding anything. Pure.

        Every rank has the same number of them. Without `traits.fixed_size` they are upper limits.
        """

    def expected_traffic(
        self, layout: Layout, levels: ProcessGroups, rank: int, occupied: float
    ) -> tuple[Traffic, ...]:
        """Return the messages about a bucket of which all but the fraction `occupied` is zero on every rank.

        By default those of `traffic`: few methods send less of what is zero.
        """
        return self.traffic(layout, levels, rank)

    def contraction(self, layout: Layout) -> float | None:
        """Return delta, where E|lost|^2 <= (1 - delta)|x|^2 holds for every x; None where no delta > 0 does."""
        return 1.0 if self.traits.lossless else None

    def rounding_error_weight(self, at: ExchangeContext) -> float:
        """Return this rank's part of the rounding error, where the mean is rounded to the bucket's type.

        All ranks hold the same error. Each takes its weight's share of it, unless a method overrides this.
        """
        return at.share

    def for_island(self) -> Exchange:
        """Return the exchange to use inside one island, in local steps.

        By default it is this one. A method that needs islands returns another one, without state.
        """
        return self

    @property
    def has_true_norm(self) -> bool:
        """Return whether the mean's norm is close to the mean gradient's, so that gradient clipping may use it."""
        return True

    @property
    def needs_islands(self) -> bool:
        """Return whether the exchange requires islands."""
        return False

    @property
    def needs_same_ranks(self) -> bool:
        """Return whether the mean depends on a state that its ranks hold alike, so that the same ones must always meet.

        By default not: a residual is its rank's own.
        """
        return False

    @property
    def parts(self) -> tuple[Exchange, ...]:
        """Return the exchanges in this one, in the order of their states (`ExchangeState.inner`).

        By default that of the fields.
        """
        return tuple(one for f in fields(self) if isinstance(one := getattr(self, f.name), Exchange))  # type: ignore[arg-type]

    def owned(self, layout: Layout, levels: ProcessGroups, rank: int) -> dict[str, Tensor]:
        """Return (numel,) bool, the elements whose state this rank keeps for its island, by the path of that state.

        {} where every rank keeps a state of its own for all elements.
        """
        return {
            f"{place}/{path}": mine
            for place, one in enumerate(self.parts)
            for path, mine in one.owned(layout, levels, rank).items()
        }

    def owner_numels(self, layout: Layout, levels: ProcessGroups) -> tuple[int, ...]:
        """Return how many elements of such a bucket each owner of an island has, in the order of the ranks.

        By default as its parts divide it, or one owner has all: every rank computes with the whole bucket.
        """
        inside = (one.owner_numels(layout, levels) for one in self.parts)
        return max(inside, key=len, default=(layout.numel,))

    @property
    def divides_by_name(self) -> bool:
        """Return whether the names of parameters decide which rank owns them, so that buckets of one shape differ."""
        return any(one.divides_by_name for one in self.parts)

    def settled(self, state: ExchangeState, at: ExchangeContext, debt: Tensor) -> ExchangeState:
        """Add what this rank owes to `debt` (numel,) float32, in the unit of its input; return the state without it.

        What cannot be paid in this step, as its rate or the rank's weight is 0, stays in the state.
        """
        inner = zip(self.parts, state.inner, strict=True)
        return ExchangeState(state.tensors, tuple(one.settled(kept, at, debt) for one, kept in inner))

    def check(self, layout: Layout, levels: ProcessGroups) -> None:
        """Raise BadInput where this method cannot serve such a bucket or groups; called when a plan is built."""
        return None


REGISTRY: Registry[Exchange] = Registry(__name__, Exchange)
names = REGISTRY.names
build = REGISTRY.build


def nested(exchange: Exchange) -> Iterator[Exchange]:
    """Yield an exchange and all exchanges in it, at any depth."""
    yield exchange
    for inner in exchange.parts:
        yield from nested(inner)
