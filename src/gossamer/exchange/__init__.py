"""Exchanges: how the ranks come to one mean of their gradients (or of any flat buffer), one method per file.

A method is a coroutine: it yields the messages it wants on the wire and is sent back what arrived. Several rounds,
error feedback and wrappers are then ordinary Python, and the same method runs in lockstep, priced, and for real.
Methods nest: feedback around a compressor, a codec inside an exchange, one exchange inside islands and one between.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields

from gossamer.comm.bucket import Bucket, Layout
from gossamer.comm.message import ExchangeContext, ExchangeState, ProcessGroups, Rounds, Traffic
from gossamer.exchange._compression_error import bytes_of, error_of, measure
from gossamer.exchange._encode_time import seconds_of
from gossamer.exchange._parameter_rules import ParameterRules
from gossamer.exchange._residual import has_residual, is_cumulative, is_residual, matching_rule, with_error_feedback
from gossamer.spec.method_config import Exchanges
from gossamer.spec.registry import Registry

__all__ = [
    "REGISTRY",
    "Exchange",
    "ParameterRules",
    "ExchangeTraits",
    "asks_for_islands",
    "build",
    "bytes_of",
    "error_of",
    "with_error_feedback",
    "is_residual",
    "measure",
    "names",
    "nested",
    "has_residual",
    "rules",
    "seconds_of",
    "matching_rule",
    "is_cumulative",
]


@dataclass(frozen=True, slots=True)
class ExchangeTraits:
    """What whoever uses an exchange may rely on; contract tests check every field.

    lossless:   the mean is the weighted mean, up to the order of summing.
    fixed_size: `traffic` is what will be sent, to the byte; otherwise it is a cap.
    remembers:  what was not sent is kept and sent later (feedback); a lossy exchange without it loses it.
    """

    lossless: bool = False
    fixed_size: bool = True
    remembers: bool = False


class Exchange(ABC):
    """A frozen dataclass: its fields are its whole configuration; state is passed in and handed back, never mutated.

    The bucket belongs to the exchange while it runs: afterwards its storage may hold the mean, or what was lost.
    Everything is computed in float32; the mean has the bucket's type.
    """

    @property
    @abstractmethod
    def traits(self) -> ExchangeTraits:
        """What may be relied on."""

    @abstractmethod
    def init(self, layout: Layout) -> ExchangeState:
        """The state before the first exchange of a bucket laid out so; the same on every rank."""

    @abstractmethod
    def run(self, x: Bucket, state: ExchangeState, at: ExchangeContext) -> Rounds:
        """One exchange: yields messages, is sent replies, returns the Outcome."""

    @abstractmethod
    def traffic(self, layout: Layout, levels: ProcessGroups, rank: int) -> tuple[Traffic, ...]:
        """The messages `run` will send on `rank`, one after the other, before anything is encoded. Pure.

        As many on every rank; where `traits.fixed_size` does not hold, none of them is larger than said here.
        """

    def contraction(self, layout: Layout) -> float | None:
        """delta, where E|lost|^2 <= (1 - delta)|x|^2 holds for every x; None where no delta > 0 does."""
        return 1.0 if self.traits.lossless else None

    def part_of_mean(self, at: ExchangeContext) -> float:
        """This rank's part of what is lost where the mean is rounded to the bucket's type. All ranks hold the same one,
        and each bears as much as its input has counted, unless a method says otherwise.
        """
        return at.share

    def for_island(self) -> Exchange:
        """What is left of it where only the ranks of an island meet, as while islands train apart: all of it, unless it
        speaks of islands itself. Then that is a method without state.
        """
        return self

    @property
    def has_true_norm(self) -> bool:
        """Whether the mean is about as long as the mean gradient: clipping goes by it."""
        return True

    @property
    def needs_islands(self) -> bool:
        """Whether it speaks of islands itself, and means nothing where all links are alike."""
        return False

    def check(self, layout: Layout, levels: ProcessGroups) -> None:
        """Raises BadInput where this method cannot serve such a bucket or such a wire: asked when a plan is built."""
        return None


REGISTRY: Registry[Exchange] = Registry(__name__, Exchange)
names = REGISTRY.names
build = REGISTRY.build


def rules(written: Exchanges, *, key: str = "plan.exchange") -> ParameterRules[Exchange]:
    """The exchange of every parameter, as `plan.exchange` says: one for all, or [pattern, level, exchange] by line."""
    return ParameterRules.read(REGISTRY, written, key=key)


def nested(exchange: Exchange) -> Iterator[Exchange]:
    """An exchange, and all exchanges in it at any depth."""
    yield exchange
    for one in fields(exchange):  # type: ignore[arg-type]
        inner = getattr(exchange, one.name)
        if isinstance(inner, Exchange):
            yield from nested(inner)


def asks_for_islands(written: Exchanges) -> bool:
    """Whether an exchange speaks of islands: by the level of a line, or a method that does."""
    found = rules(written)
    inside = (one for outer in found.written for one in nested(outer))
    return found.has_levels or any(one.needs_islands for one in inside)
