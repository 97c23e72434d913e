"""Partition: choose the group over which each training state is sharded, for the least exposed communication that fits.

Equations (states s, groups p_s of each, links of levels j):
    p* = argmin sum_s T(p_s)   subject to   sum_s M(p_s) <= M
    T(p) = max(0, sum over gradients of W - hidden) + sum over all-gathers after the update of W
    W = hops latency_j + b_j / B_j   of a message at level j, b_j of the rank that sends most
Symbols: M bytes of memory for the states on a rank, M(p) those they take on the rank with most; b_j bytes at level j,
B_j its bandwidth, latency_j its latency; `hidden` seconds of the exchange that overlap with the backward pass.
Work:    the product of the numbers of groups: a few of a few states.
Paper:   the choice of Xu et al., arXiv 2501.04266 (weights innermost, gradients in a node, optimizer states over all),
made from measured links instead of by rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from gossamer import sharding as sharding_methods
from gossamer.comm.message import ProcessGroups
from gossamer.plan._traffic import Shapes, state_buckets
from gossamer.plan.exchange import wire_seconds
from gossamer.recipe import PlanMethods
from gossamer.spec.clock import TimedTask, compute, cost, play, wire
from gossamer.spec.errors import NoPlan
from gossamer.spec.method_config import Exchanges, Written
from gossamer.spec.network import Network
from gossamer.spec.plan import Plan
from gossamer.spec.units import show_bytes

STATES: tuple[Written, ...] = ("none", {"zero1": {"shard_group": "island"}}, "zero1")


@dataclass(frozen=True, slots=True)
class ShardingPlace:
    """A sharding of one state: exposed seconds per step on idle links, and bytes on the rank with most."""

    written: Written
    seconds: float
    held_bytes: int


def least_wait(places: Mapping[str, Sequence[ShardingPlace]], *, room_bytes: int) -> dict[str, ShardingPlace]:
    """Return the sharding of every state with the least exposed communication; of equal ones the smallest.

    `room_bytes`: memory for the states on a rank. Raises NoPlan if nothing fits.
    """
    found = [dict(zip(places, chosen, strict=True)) for chosen in product(*places.values())]
    least = min(_held(one) for one in found)
    if least > room_bytes:
        raise NoPlan(
            f"{' and '.join(places)} need at least {show_bytes(least)} on a rank, got {show_bytes(room_bytes)} of "
            "memory for them: use more ranks, or an optimizer with less state"
        )
    fitting = [one for one in found if _held(one) <= room_bytes]
    return min(fitting, key=lambda one: (sum(p.seconds for p in one.values()), _held(one)))


def places_of_states(
    shapes: Shapes,
    levels: ProcessGroups,
    links: Network,
    *,
    number_bytes: int,
    bucket_bytes: int,
    hidden_s: float = 0.0,
    exchange: Exchanges = "dense",
    among: Sequence[Written] = STATES,
) -> tuple[ShardingPlace, ...]:
    """Return the candidate shardings of the optimizer states, with their costs.

    `number_bytes`: bytes of optimizer state per parameter element (adamw: 8); `hidden_s`: seconds of the gradient
    exchange that overlap with the backward pass; `exchange`: of the gradients; `among`: the shardings to consider. The
    cost of each includes its gradient exchange and the all-gather after the update.
    """
    found = []
    sizes = {name: sharding_methods.ElementBytes(kept=0, gradient=0, owned=number_bytes) for name, _ in shapes}
    exact = PlanMethods.of(Plan(rows=(1,), microbatches=(1,), exchange=exchange, bucket_bytes=bucket_bytes))
    for written in among:
        methods = exact.under(sharding=written)
        sharding, deal = methods.sharding, methods.sharding.deal(levels)
        there, back = list[float](), list[float]()
        for layout, one in state_buckets(methods, shapes, deal):
            gather = {
                r: sharding_methods.gather_traffic(layout, deal, r, sharding.differences) for r in levels.everyone
            }
            there.append(wire_seconds({r: one.traffic(layout, levels, r) for r in levels.everyone}, levels, links)[0])
            back.append(wire_seconds(gather, levels, links)[0])
        seconds = cost(play(tasks_of_gathers(hidden_s, there, back))).exposed_s
        held = (sharding_methods.holdings(deal, dict(shapes), rank) for rank in levels.everyone)
        most = max(sharding_methods.bytes_of(one.values(), sizes) for one in held)
        found.append(ShardingPlace(written, seconds, most))
    return tuple(found)


def tasks_of_gathers(hidden_s: float, there: Sequence[float], back: Sequence[float]) -> tuple[TimedTask, ...]:
    """Return the tasks of a step with sharded states: the exchanges of its buckets beside the backward pass, and after
    both, the update done, the all-gather of each bucket.
    """
    sent = [TimedTask(wire("all"), seconds) for seconds in there]
    after = (0, *([len(sent)] if sent else []))
    return (TimedTask(compute(0), hidden_s), *sent, *(TimedTask(wire("all"), seconds, after) for seconds in back))


def _held(chosen: Mapping[str, ShardingPlace]) -> int:
    return sum(place.held_bytes for place in chosen.values())
