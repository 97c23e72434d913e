"""The numbers a choice of exchanges is made from. Measured by others; the slowest rank's wherever ranks differ."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from gossamer.comm.message import Collective, ProcessGroups, Traffic
from gossamer.comm.meter import sent_bytes
from gossamer.spec.errors import bad_input
from gossamer.spec.network import Network


@dataclass(frozen=True, slots=True)
class Option:
    """One candidate for one bucket."""

    cpu_s: float  # encoding and decoding
    wire_s: float  # as long as the link is its own
    sent_bytes: int  # by the rank that sends most
    loss: float  # |x - kept|^2 / |x|^2 of a gradient: what one exchange leaves out


@dataclass(frozen=True, slots=True)
class BucketMeasurements:
    """`ready_s`: after the step's last backward began, its gradients are complete. `options` follow the candidates;
    None where a candidate cannot or should not serve this bucket. `weight`: its part of |x|^2.
    """

    names: tuple[str, ...]
    numel: int
    ready_s: float
    weight: float
    options: tuple[Option | None, ...]


@dataclass(frozen=True, slots=True)
class StepMeasurements:
    """One step: `compute_s` of it all without exchange, `backward_s` of the last backward, in which buckets fill.

    `stolen`: the part of encoding that the backward pass loses; 0 where encoding has a core of its own, 1 where not.
    """

    buckets: tuple[BucketMeasurements, ...]
    compute_s: float
    backward_s: float
    stolen: float

    def __post_init__(self) -> None:
        """Raises BadInput for a number that is not finite: nothing is less than it, so nothing could be chosen."""
        for name in ("compute_s", "backward_s", "stolen"):
            check_finite(name, getattr(self, name))
        for place, bucket in enumerate(self.buckets):
            for name in ("ready_s", "weight"):
                check_finite(f"{name} of bucket {place}", getattr(bucket, name))
            for number, option in enumerate(bucket.options):
                for one in fields(Option) if option is not None else ():
                    check_finite(f"{one.name} of candidate {number} for bucket {place}", getattr(option, one.name))


def check_finite(name: str, value: float, where: str = "") -> None:
    """Raises BadInput where a measured number is none."""
    if not math.isfinite(value):
        do = "measure again, or name the exchange in plan.exchange"
        raise bad_input(wanted=f"a finite {name}", got=f"{value:g}{where}", do=do, key="plan.exchange")


def wire_seconds(per_rank: dict[int, tuple[Traffic, ...]], levels: ProcessGroups, links: Network) -> tuple[float, int]:
    """(seconds, bytes of the rank that sends most) of one exchange: messages follow one another, ranks send at once."""
    seconds, rounds = 0.0, len(next(iter(per_rank.values())))
    total = dict.fromkeys(per_rank, 0)
    for turn in range(rounds):
        sent = {rank: _sent(traffic[turn], levels, rank) for rank, traffic in per_rank.items()}
        one = next(iter(per_rank.values()))[turn]
        ranks = max(len(group) for group in levels.groups[one.level])
        if any(sent.values()):
            link = links.levels.get(one.level) or links.levels["all"]
            seconds += link.seconds(max(sent.values()), hops=_hops(one.combine, ranks))
        total = {rank: total[rank] + sent[rank] for rank in total}
    return seconds, max(total.values())


def _sent(one: Traffic, levels: ProcessGroups, rank: int) -> int:
    group = levels.group(one.level, rank)
    if one.splits is not None:
        mine = group.index(rank)
        return sum(n for i, n in enumerate(one.splits) if i != mine) * one.itemsize
    return sum(sent_bytes(one.combine, one.nbytes, one.itemsize, group, rank).values())


def _hops(combine: Collective, ranks: int) -> int:
    """Messages that wait for one another."""
    return {Collective.SHUFFLE: 1, Collective.GATHER: ranks - 1}.get(combine, 2 * (ranks - 1))
