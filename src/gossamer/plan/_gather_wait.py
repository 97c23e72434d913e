"""Seconds that a step with sharded states waits for rows of others, beside its gradients, on measured links.

Two kinds: the rows that others have updated, gathered bucket by bucket once the update is done, with nothing beside
them; and those of sharded parameters, gathered unit by unit while the unit before is running. Of a unit's computing two
thirds are its backward pass, and units compute in proportion to their elements.

The gathers of units share the links with gradients in the last backward pass. Neither is played beside the other here,
so what both wait for is a lower bound where they meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import prod

from gossamer.comm.bucket import Layout
from gossamer.comm.message import ProcessGroups, Traffic
from gossamer.plan._traffic import Shapes, state_buckets
from gossamer.plan.exchange import MessagePrice, PricedMessage, StepMeasurements, priced
from gossamer.plan.exchange.send_order import Job, schedule_jobs
from gossamer.recipe import PlanMethods
from gossamer.sharding import UnshardOrder, UnshardUnit, gather_traffic, unit_traffic
from gossamer.spec.network import Network

_BACKWARD = 2 / 3  # of computing
_NOTHING = StepMeasurements((), 0.0, 0.0, 0.0)


def gather_wait_seconds(
    methods: PlanMethods,
    shapes: Shapes,
    levels: ProcessGroups,
    links: Network,
    *,
    price: MessagePrice,
    compute_s: float,
    walk: UnshardOrder | None,
) -> float:
    """Return the seconds that a step waits for rows of sharded states: 0 where nothing is sharded.

    `compute_s`: of a step; `walk`: the order of the units, where parameters are sharded too. States in tiers are not
    forecast.
    """
    sharding, deal = methods.sharding, methods.sharding.deal(levels)
    if not sharding.is_sharded or sharding.is_tiered:
        return 0.0

    def taken(sent: Callable[[int], Iterable[Traffic]]) -> tuple[PricedMessage, ...]:
        return priced({rank: tuple(sent(rank)) for rank in levels.everyone}, levels, links, price)[0]

    def updated(layout: Layout) -> tuple[PricedMessage, ...]:
        return taken(lambda rank: gather_traffic(layout, deal, rank, sharding.differences))

    def unsharded(unit: UnshardUnit) -> tuple[PricedMessage, ...]:
        return taken(lambda rank: unit_traffic(unit, deal.of_parameters, rank))

    rows = [updated(layout) for layout, _ in state_buckets(methods, shapes, deal)]
    after_s = schedule_jobs(_NOTHING, [_job(one) for one in rows if one]).step_s
    if walk is None or not sharding.takes_parameters:
        return after_s
    gathers = {unit.name: unsharded(unit) for unit in (walk.always, *walk.units)}
    return after_s + _units_s(walk, gathers, compute_s, methods.plan.microbatches[0])


def _job(messages: tuple[PricedMessage, ...]) -> Job:
    """Return the turns and messages of one bucket whose rows are there: the thread prepares each, and sends it."""
    turns_s = (*(one.start_s for one in messages), 0.0)
    return 0.0, turns_s, tuple((one.link, one.busy_s, one.latency_s, one.hops) for one in messages)


@dataclass(slots=True)
class _Line:
    """The links while units are gathered: the messages of one gather follow each other, and wait for gathers before."""

    free: dict[str, float] = field(default_factory=dict)  # by link, when it has carried what was begun

    def arrival_s(self, now: float, messages: Iterable[PricedMessage]) -> float:
        """Return when the messages of a gather that begins `now` have arrived."""
        for one in messages:
            begins = max(now + one.start_s, self.free.get(one.link, 0.0))
            self.free[one.link] = begins + one.busy_s
            now = self.free[one.link] + one.latency_s * one.hops
        return now


def _units_s(
    walk: UnshardOrder, gathers: dict[str, tuple[PricedMessage, ...]], compute_s: float, microbatches: int
) -> float:
    """Return what a step of `compute_s` waits for the units that it runs one after the other."""
    numels = [_numel(unit) for unit in walk.units]
    total = max(1, _numel(walk.always) + sum(numels))
    line, there = _Line(), dict[int, float]()
    now = waited_s = 0.0
    always_s = line.arrival_s(now, gathers[walk.always.name])
    for visit in walk.visits(microbatches):
        for index in visit.gathered:
            there[index] = line.arrival_s(now, gathers[walk.units[index].name])
        needed_s = there[visit.index]  # which is after what was begun before it: that which stays for the whole step
        waited_s += max(0.0, needed_s - now)
        part = 1 - _BACKWARD if visit.is_forward else _BACKWARD
        now = max(now, needed_s) + part * compute_s / microbatches * numels[visit.index] / total
    return waited_s if numels else always_s


def _numel(unit: UnshardUnit) -> int:
    return sum(prod(entry.shape) for layout in unit.layouts for entry in layout.entries)
