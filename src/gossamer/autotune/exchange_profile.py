"""Profile what the choice of exchanges needs besides links: when buckets fill, and each candidate's cost and error."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import Tensor

from gossamer import exchange as exchange_methods
from gossamer.comm.bucket import Layout
from gossamer.comm.channel import gathered
from gossamer.comm.comm_thread import CommThread
from gossamer.comm.message import ProcessGroups
from gossamer.exchange import Exchange
from gossamer.exchange.dense import Dense
from gossamer.plan.exchange import (
    BucketMeasurements,
    Candidate,
    Option,
    RoundMeasurements,
    StepMeasurements,
    check_finite,
    cost_of_step,
    tasks_of_step,
    wire_seconds,
)
from gossamer.recipe import ParameterRules
from gossamer.run.profile_step import StepProfile, encode_slowdown
from gossamer.spec.clock import play
from gossamer.spec.errors import BadInput
from gossamer.spec.method_config import told
from gossamer.spec.network import Network
from gossamer.spec.plan import BUCKET_BYTES
from gossamer.sync import OuterLoopConfig, buckets_of, exchange_of_second_moments, exchanges_of_round

_SAMPLED_RANKS = 16  # beyond, traffic is computed for the first and the last ranks only

_Groups: TypeAlias = tuple[tuple[str, tuple[tuple[int, ...], ...]], ...]


@dataclass(frozen=True, slots=True)
class _Cut:
    """The buckets of one size: where their gradients lie, |gradient|^2, and when they are ready."""

    layouts: tuple[Layout, ...]
    squares: tuple[float, ...]
    ready_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Cell:
    """A candidate for a bucket, on any link: seconds of encoding and decoding, and compression error."""

    exchange: Exchange
    cpu_s: float
    loss: float


@dataclass(slots=True)
class ExchangeProfile:
    """The measurements of exchanges that do not depend on the links.

    Ranks measure at the same time, as they will compute at the same time, and the largest number over all ranks counts.
    More is measured on demand: candidates for buckets of another size, or between islands that were detected later.
    """

    params: Mapping[str, Tensor]
    pump: CommThread
    ready_s: Mapping[str, float]  # this rank's, by parameter
    times: tuple[float, float, float]  # compute, backward, stolen share
    squares: Mapping[str, float]  # |gradient|^2, this rank's; empty if gradients were not finite
    lost: Mapping[str, Mapping[str, float]]  # |x - kept|^2 by exchange and parameter, this rank's
    _cuts: dict[int, _Cut] = field(default_factory=dict)  # by bucket_bytes
    _columns: dict[tuple[str, _Groups, int], tuple[_Cell | None, ...]] = field(default_factory=dict)

    @staticmethod
    def by(
        rehearsal: StepProfile,
        params: Mapping[str, Tensor],
        candidates: Sequence[Candidate],
        pump: CommThread,
        *,
        knows: bool,
    ) -> ExchangeProfile:
        """Return the profile: the step's times, and the compression error of each candidate, measured once.

        `rehearsal`: a profiled step with its gradients. `knows`: whether these are finite on all ranks; if not, the
        errors of lossy candidates stay unknown. All ranks must call it.
        """
        times = [rehearsal.compute_s, rehearsal.backward_s, encode_slowdown()]
        agreed = _largest(pump, ("compute_s", "backward_s", "stolen"), times)
        gradients = rehearsal.gradients if knows else {}
        squares = {n: float(g.double().square().sum()) for n, g in gradients.items()}
        lost = {told(c.loses_as): _lost(c, gradients) for c in candidates} if knows else {}
        return ExchangeProfile(params, pump, rehearsal.ready_s, (agreed[0], agreed[1], agreed[2]), squares, lost)

    @property
    def knows(self) -> bool:
        """Return whether the compression errors of lossy exchanges are known."""
        return bool(self.lost)

    def facts(self, links: Network, candidates: Sequence[Candidate], bucket_bytes: int) -> StepMeasurements:
        """Return the measurements of a step, with the time on these links. All ranks must call it together."""
        cut = self._cut(bucket_bytes)
        columns = [self._column(c, bucket_bytes) for c in candidates]
        total = sum(cut.squares) or 1.0
        buckets = []
        for b, where in enumerate(cut.layouts):
            options = tuple(_option(column[b], where, self.pump.channel.levels, links) for column in columns)
            names = tuple(e.name for e in where.entries)
            buckets.append(BucketMeasurements(names, where.numel, cut.ready_s[b], cut.squares[b] / total, options))
        return StepMeasurements(tuple(buckets), *self.times)

    def _cut(self, bucket_bytes: int) -> _Cut:
        if bucket_bytes not in self._cuts:
            found = buckets_of(self.params, dict.fromkeys(self.params, Dense()), bucket_bytes=bucket_bytes)
            layouts = tuple(where for where, _ in found)
            names = [f"{what} of bucket {b}" for what in ("|gradient|^2", "ready_s") for b in range(len(layouts))]
            mine = [sum(self.squares.get(e.name, 0.0) for e in where.entries) for where in layouts]
            mine += [max(self.ready_s[e.name] for e in where.entries) for where in layouts]
            agreed = _largest(self.pump, names, mine)
            self._cuts[bucket_bytes] = _Cut(layouts, agreed[: len(layouts)], agreed[len(layouts) :])
        return self._cuts[bucket_bytes]

    def _column(self, candidate: Candidate, bucket_bytes: int) -> tuple[_Cell | None, ...]:
        """Return the candidate for every bucket; None if it cannot serve, or if its compression error is unknown."""
        levels, cut = self.pump.channel.levels, self._cut(bucket_bytes)
        key = (told(candidate.written), tuple(sorted(levels.groups.items())), bucket_bytes)
        if key not in self._columns:
            one = ParameterRules.single(candidate.written)
            serving = [_serves(candidate, one, where, levels) for where in cut.layouts]
            cpu = [
                exchange_methods.seconds_of(one, where, levels, self.pump.channel.rank) if serves else 0.0
                for where, serves in zip(cut.layouts, serving, strict=True)
            ]
            names = [f"cpu_s of {candidate.said} for bucket {b}" for b in range(len(cpu))]
            cpu_s = _largest(self.pump, names, cpu)
            loss = gathered(self.pump.channel, self._loss(candidate, cut)).max(0).values.tolist()
            self._columns[key] = tuple(
                _Cell(one, seconds, part) if serves and math.isfinite(part) else None
                for serves, seconds, part in zip(serving, cpu_s, loss, strict=True)
            )
        return self._columns[key]

    def _loss(self, candidate: Candidate, cut: _Cut) -> list[float]:
        """Return |x - kept|^2 / |x|^2 of this rank's gradients by bucket; nan if unknown and the candidate is lossy."""
        if not self.knows:
            return [math.nan if candidate.lossy else 0.0] * len(cut.layouts)
        by_name, found = self.lost[told(candidate.loses_as)], []
        for where in cut.layouts:
            names = [e.name for e in where.entries]
            square = sum(self.squares[n] for n in names)
            found.append(sum(by_name[n] for n in names) / square if square else 0.0)
        return found

    def round_facts(
        self, loop: OuterLoopConfig, links: Network, levels: ProcessGroups, units: Sequence[str], bucket_bytes: int
    ) -> RoundMeasurements:
        """Return the measurements of an island's own step, and of a round of `loop` between the islands of `levels`.

        All ranks must call it: they measure the encoding at the same time, and the slowest counts.
        """
        inside, cut, rank = levels.only("island"), self._cut(bucket_bytes), self.pump.channel.rank
        near = links.model_copy(update={"levels": {"all": links.levels.get("island", links.levels["all"])}})
        buckets = tuple(
            BucketMeasurements((), w.numel, at, 0.0, ()) for w, at in zip(cut.layouts, cut.ready_s, strict=True)
        )
        alone = StepMeasurements(buckets, *self.times)
        dense = [Option(0.0, *_on_wire(Dense(), where, inside, near), 0.0) for where in cut.layouts]
        fragments = exchanges_of_round(loop, self.params, levels, units=units, bucket_bytes=BUCKET_BYTES)
        squares = exchange_of_second_moments(levels)
        cpu_s = sum(exchange_methods.seconds_of(x, where, levels, rank) for one in fragments for where, x in one)
        return RoundMeasurements(
            step_s=cost_of_step(alone, play(tasks_of_step(alone, dense))).step_s,
            fragments_s=tuple(sum(_on_wire(x, where, levels, links)[0] for where, x in one) for one in fragments),
            cpu_s=_largest(self.pump, ("cpu_s of a round",), [cpu_s])[0],
            stolen=self.times[2],
            second_moments_s=sum(_on_wire(squares, where, levels, links)[0] for one in fragments for where, _ in one),
        )


def _largest(pump: CommThread, names: Sequence[str], mine: Sequence[float]) -> tuple[float, ...]:
    """Return the largest of each number over all ranks. Raises BadInput for non-finite ones, with name and rank."""
    rows = gathered(pump.channel, mine).tolist()
    for rank, row in zip(pump.channel.levels.everyone, rows, strict=True):
        for name, value in zip(names, row, strict=True):
            check_finite(name, value, where=f" on rank {rank}")
    return tuple(map(max, zip(*rows, strict=True)))


def _serves(candidate: Candidate, exchange: Exchange, where: Layout, levels: ProcessGroups) -> bool:
    if where.numel < candidate.least_numel:
        return False
    try:
        exchange.check(where, levels)
    except BadInput:
        return False
    return True


def _option(cell: _Cell | None, where: Layout, levels: ProcessGroups, links: Network) -> Option | None:
    return None if cell is None else Option(cell.cpu_s, *_on_wire(cell.exchange, where, levels, links), cell.loss)


def _on_wire(exchange: Exchange, where: Layout, levels: ProcessGroups, links: Network) -> tuple[float, int]:
    """(seconds, bytes of the rank that sends most)."""
    everyone = sorted(r for group in levels.groups["all"] for r in group)
    half = _SAMPLED_RANKS // 2
    asked = everyone if len(everyone) <= _SAMPLED_RANKS else [*everyone[:half], *everyone[-half:]]
    return wire_seconds({r: exchange.traffic(where, levels, r) for r in asked}, levels, links)


def _lost(candidate: Candidate, gradients: Mapping[str, Tensor]) -> dict[str, float]:
    """Return |x - kept|^2 of every gradient by itself; nan for one that the candidate cannot serve."""
    one, found = ParameterRules.single(candidate.loses_as), dict.fromkeys(gradients, 0.0)
    if one.traits.lossless:
        return found
    for name, gradient in gradients.items():
        try:
            found[name] = exchange_methods.error_of(one, gradient, name=name) ** 2
        except BadInput:
            found[name] = math.nan
    return found
