"""The measurements that the choice of exchanges is based on; where ranks differ, those of the slowest rank."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from gossamer.comm.message import Collective, ProcessGroups, Traffic
from gossamer.comm.meter import sent_bytes
from gossamer.spec.errors import bad_input
from gossamer.spec.network import Network


@dataclass(frozen=True, slots=True)
class Option:
    """The measured cost of one candidate exchange for one bucket."""

    cpu_s: float  # encoding and decoding
    wire_s: float  # on a link without other traffic
    sent_bytes: int  # by the rank that sends most
    loss: float  # |x - kept|^2 / |x|^2 of a gradient: the compression error of one exchange


@dataclass(frozen=True, slots=True)
class BucketMeasurements:
    """The measurements of one gradient bucket.

    `ready_s`: seconds from the start of the step's last backward until its gradients are complete. `weight`: its part
    of |x|^2. `options`: one per candidate; None if the candidate cannot or should not serve this bucket.
    """

    names: tuple[str, ...]
    numel: int
    ready_s: float
    weight: float
    options: tuple[Option | None, ...]


@dataclass(frozen=True, slots=True)
class StepMeasurements:
    """The measurements of one step.

    `compute_s`: seconds of the step without any exchange; `backward_s`: of the last backward, in which buckets fill.
    `stolen`: the fraction of encode time that slows the backward pass: 0 if encoding has a core of its own, 1 if not.
    """

    buckets: tuple[BucketMeasurements, ...]
    compute_s: float
    backward_s: float
    stolen: float

    def __post_init__(self) -> None:
        """Raise BadInput for a number that is not finite: no comparison with it would choose anything."""
        for name in ("compute_s", "backward_s", "stolen"):
            check_finite(name, getattr(self, name))
        for place, bucket in enumerate(self.buckets):
            for name in ("ready_s", "weight"):
                check_finite(f"{name} of bucket {place}", getattr(bucket, name))
            for number, option in enumerate(bucket.options):
                for one in fields(Option) if option is not None else ():
                    check_finite(f"{one.name} of candidate {number} for bucket {place}", getattr(option, one.name))


def check_finite(name: str, value: float, where: str = "") -> None:
    """Raise BadInput if the measured number `value` is not finite. `name` and `where` describe it in the error."""
    if not math.isfinite(value):
        do = "measure again, or name the exchange in plan.exchange"
        raise bad_input(wanted=f"a finite {name}", got=f"{value:g}{where}", do=do, key="plan.exchange")


def wire_seconds(per_rank: dict[int, tuple[Traffic, ...]], levels: ProcessGroups, links: Network) -> tuple[float, int]:
    """Return (seconds, bytes of the rank that sends most) of one exchange.

    Messages follow one another; ranks send at the same time.
    """
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
    """Return the number of messages that wait for one another."""
    return {Collective.SHUFFLE: 1, Collective.GATHER: ranks - 1}.get(combine, 2 * (ranks - 1))
