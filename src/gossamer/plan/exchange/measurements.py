"""The measurements that the choice of exchanges is based on; where ranks differ, those of the slowest rank."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from gossamer.comm.message import Collective, ProcessGroups, Traffic
from gossamer.comm.meter import hop_count, sent_bytes
from gossamer.spec.errors import bad_input
from gossamer.spec.network import Network
from gossamer.spec.units import show_seconds

_NEAR, _BETWEEN = "island", "between"  # levels whose messages do not cross the links between islands, and which do


@dataclass(frozen=True, slots=True)
class MessagePrice:
    """What messages cost a rank's processors beside encoding: hand-offs between threads, and the transport's own work.

    `start_s` of a message, `byte_s` more of each byte that a rank sends, `hop_s` more of each hop after the first.
    """

    start_s: float = 0.0
    byte_s: float = 0.0
    hop_s: float = 0.0

    def of(self, nbytes: int, hops: int = 1) -> float:
        """Return the processor seconds of a message of which a rank sends `nbytes`; 0 of one that carries nothing."""
        return self.start_s + (hops - 1) * self.hop_s + self.byte_s * nbytes if nbytes else 0.0

    def show(self) -> str:
        """Return the price of a message for the user."""
        return f"{show_seconds(self.start_s)} of processor time a message"


@dataclass(frozen=True, slots=True)
class PricedMessage:
    """The price of one message: `busy_s` of bytes on `link`, in `hops` that wait for one another for `latency_s` each.

    Bytes on a link follow one another. Latencies pass beside each other and beside the bytes of other messages: while a
    hop is on its way, the link carries hops of others. `start_s`: of the rank's processors, where they are shared with
    the backward pass as those of encoding are.
    """

    busy_s: float
    latency_s: float = 0.0
    link: str = "all"
    hops: int = 1
    start_s: float = 0.0

    @property
    def alone_s(self) -> float:
        """Return the seconds of the message on a link without other traffic."""
        return self.busy_s + self.hops * self.latency_s


@dataclass(frozen=True, slots=True)
class Option:
    """The cost of one candidate exchange for one bucket.

    `turns_s`: seconds of encoding and decoding before each message and after the last one, so one entry more than
    `messages`. `sent_bytes`: by the rank that sends most. `loss`: |x - kept|^2 / |x|^2 of a gradient, the compression
    error of one exchange.
    """

    turns_s: tuple[float, ...]
    messages: tuple[PricedMessage, ...]
    sent_bytes: int
    loss: float

    @staticmethod
    def of_one_message(cpu_s: float, wire_s: float, sent_bytes: int, loss: float) -> Option:
        """Return the option of an exchange with a single message, encoding and decoding taking equally long."""
        return Option((cpu_s / 2, cpu_s / 2), (PricedMessage(wire_s),), sent_bytes, loss)

    @property
    def cpu_s(self) -> float:
        """Return the seconds of encoding and decoding."""
        return sum(self.turns_s)

    @property
    def thread_s(self) -> tuple[float, ...]:
        """Return by turn what it takes of the communication thread: encoding, and the message behind it."""
        turns_s = self.turns_s
        return (*[turns_s[turn] + one.start_s for turn, one in enumerate(self.messages)], turns_s[-1])

    @property
    def wire_s(self) -> float:
        """Return the seconds of all messages on links without other traffic, one after the other."""
        return sum(one.alone_s for one in self.messages)


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

    def option(self, candidate: int) -> Option:
        """Return the option of a candidate that serves this bucket."""
        found = self.options[candidate]
        assert found is not None, "a candidate that serves the bucket"
        return found


@dataclass(frozen=True, slots=True)
class StepMeasurements:
    """The measurements of one step, whose gradients lie in `buckets`, in the order in which backward fills them.

    `compute_s`: seconds of the step without any exchange; `backward_s`: of the last backward, in which buckets fill.
    `stolen`: the fraction of encode time that slows the backward pass: 0 if encoding has a core of its own, 1 if not.
    `ran`: the fraction of the seconds of encoding, as they were timed, in which its thread ran: below 1 where other
    processes have a part of the processor. `look_ahead`: the buckets that start before the next message of an earlier
    one, in runs that keep to no planned order.
    """

    buckets: tuple[BucketMeasurements, ...]
    compute_s: float
    backward_s: float
    stolen: float
    ran: float = 1.0
    look_ahead: int | None = None

    def __post_init__(self) -> None:
        """Raise BadInput for a number that is not finite: no comparison with it would choose anything."""
        for name in ("compute_s", "backward_s", "stolen", "ran"):
            check_finite(name, getattr(self, name))
        for place, bucket in enumerate(self.buckets):
            _check_bucket(bucket, place)


def _check_bucket(bucket: BucketMeasurements, place: int) -> None:
    for name in ("ready_s", "weight"):
        check_finite(f"{name} of bucket {place}", getattr(bucket, name))
    for number, option in enumerate(bucket.options):
        if option is None or math.isfinite(sum(option.thread_s) + option.wire_s + option.sent_bytes + option.loss):
            continue
        for name in ("cpu_s", "wire_s", "sent_bytes", "loss"):
            check_finite(f"{name} of candidate {number} for bucket {place}", getattr(option, name))
        check_finite(f"start_s of candidate {number} for bucket {place}", sum(one.start_s for one in option.messages))


def check_finite(name: str, value: float, where: str = "") -> None:
    """Raise BadInput if the measured number `value` is not finite. `name` and `where` describe it in the error."""
    if not math.isfinite(value):
        do = "measure again, or name the exchange instead of auto"
        raise bad_input(wanted=f"a finite {name}", got=f"{value:g}{where}", do=do, key="plan.exchange")


_FREE = MessagePrice()


def priced(
    per_rank: Mapping[int, tuple[Traffic, ...]], levels: ProcessGroups, links: Network, price: MessagePrice = _FREE
) -> tuple[tuple[PricedMessage, ...], int]:
    """Return the prices of an exchange's messages, and the bytes of the rank that sends most.

    `per_rank`: the messages of every rank, or of some that send or receive as much as any, and of all of their islands
    that send anything to others. All ranks send at the same time; the rank that sends or receives most counts, between
    islands the one whose ranks need longest for their way out. `price`: what a message takes of a rank's processors.
    """
    found, rounds = list[PricedMessage](), len(next(iter(per_rank.values())))
    total = dict.fromkeys(per_rank, 0)
    for turn in range(rounds):
        moved = {rank: _moved(traffic[turn], levels, rank) for rank, traffic in per_rank.items()}
        larger = {rank: max(ways) for rank, ways in moved.items()}
        busiest = max(larger, key=larger.__getitem__)
        one, most = per_rank[busiest][turn], larger[busiest]  # a rank that owns nothing has messages of another kind
        link = links.levels.get(one.level) or links.levels["all"]
        islands = levels.owners_by_island if one.level == _BETWEEN else ()
        each = [link.shared_seconds([larger.get(rank, 0) for rank in owners]) for owners in islands]
        in_ring = 0.0 if one.combine is Collective.SHUFFLE else link.ring_bytes_per_s
        busy_s = max(each, default=most / (in_ring or link.bytes_per_s))
        ranks = max(len(group) for group in levels.groups[one.level])
        latency_s, where = link.hop_s if most else 0.0, _NEAR if one.level == _NEAR else "all"
        hops = hop_count(one.combine, ranks)
        found.append(PricedMessage(busy_s, latency_s, where, hops, price.of(most, hops)))
        total = {rank: total[rank] + moved[rank][0] for rank in total}
    return tuple(found), max(total.values())


def wire_seconds(
    per_rank: Mapping[int, tuple[Traffic, ...]], levels: ProcessGroups, links: Network
) -> tuple[float, int]:
    """Return (seconds, bytes of the rank that sends most) of one exchange whose messages follow one another."""
    messages, sent = priced(per_rank, levels, links)
    return sum(one.alone_s for one in messages), sent


def _moved(one: Traffic, levels: ProcessGroups, rank: int) -> tuple[int, int]:
    """Return (bytes that the rank sends, bytes that it receives)."""
    group = levels.group(one.level, rank)
    if one.splits is not None:
        me, arriving = group.index(rank), one.arriving or one.splits
        return (sum(one.splits) - one.splits[me]) * one.itemsize, (sum(arriving) - arriving[me]) * one.itemsize
    sent = sum(sent_bytes(one.combine, one.nbytes, one.itemsize, group, rank).values())
    return sent, sent
