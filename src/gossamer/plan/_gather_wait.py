"""Seconds that a step with sharded states waits for rows of others, beside its gradients, on measured links.

Two kinds: the rows that others have updated, gathered bucket by bucket once the update is done, with nothing beside
them; and those of sharded parameters, gathered unit by unit while the unit before is running. Of a unit's computing two
thirds are its backward pass, and units compute in proportion to their elements.

The gathers of units share the links with gradients in the last backward pass. Neither is played beside the other here,
so what both wait for is a lower bound where they meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod

from gossamer.comm.bucket import Layout
from gossamer.comm.message import ProcessGroups, Traffic
from gossamer.plan._traffic import Shapes, state_buckets
from gossamer.plan.exchange import MessagePrice, PricedMessage, StepMeasurements, priced
from gossamer.plan.exchange.send_order import Job, schedule_jobs
from gossamer.recipe import PlanMethods
from gossamer.sharding import RowPartition, UnshardOrder, UnshardUnit, gather_traffic, unit_traffic
from gossamer.spec.clock import TimedTask, compute, play, wire
from gossamer.spec.network import Network

_BACKWARD = 2 / 3  # of computing
_THREAD = "communication parameters"
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
    deal: RowPartition | None = None,
) -> float:
    """Return the seconds that a step waits for rows of sharded states: 0 where nothing is sharded.

    `compute_s`: of a step; `walk`: the order of the units, where parameters are sharded too; `deal`: the rows of each
    rank, where they are dealt already, None: as the process groups suggest. States in tiers are not forecast.
    """
    sharding, dealt = methods.sharding, deal or methods.sharding.deal(levels)
    if not sharding.is_sharded or sharding.is_tiered:
        return 0.0

    def taken(sent: Callable[[int], Iterable[Traffic]]) -> tuple[PricedMessage, ...]:
        return priced({rank: tuple(sent(rank)) for rank in levels.everyone}, levels, links, price)[0]

    def updated(layout: Layout) -> tuple[PricedMessage, ...]:
        return taken(lambda rank: gather_traffic(layout, dealt, rank, sharding.differences))

    def unsharded(unit: UnshardUnit) -> tuple[PricedMessage, ...]:
        return taken(lambda rank: unit_traffic(unit, dealt.of_parameters, rank))

    rows = [updated(layout) for layout, _ in state_buckets(methods, shapes, dealt)]
    after_s = schedule_jobs(_NOTHING, [_job(one) for one in rows if one]).step_s
    if walk is None or not sharding.takes_parameters:
        return after_s
    gathers = {unit.name: unsharded(unit) for unit in (walk.always, *walk.units)}
    tasks = tasks_of_units(walk, gathers, compute_s, methods.plan.microbatches[0])
    return after_s + play(tasks).end_s - sum(task.seconds for task in tasks if task.on == compute(0))


def _job(messages: tuple[PricedMessage, ...]) -> Job:
    """Return the turns and messages of one bucket whose rows are there: the thread prepares each, and sends it."""
    turns_s = (*(one.start_s for one in messages), 0.0)
    return 0.0, turns_s, tuple((one.link, one.busy_s, one.latency_s, one.hops) for one in messages)


def tasks_of_units(
    walk: UnshardOrder, gathers: Mapping[str, Sequence[PricedMessage]], compute_s: float, microbatches: int
) -> list[TimedTask]:
    """Return the tasks of a step's units, which run one after the other, and of the gathers that each begins.

    `gathers`: the messages of one gather, by the unit's name.
    """
    total = max(1, _numel(walk.always) + sum(map(_numel, walk.units)))
    tasks, there, ran = list[TimedTask](), dict[int, tuple[int, ...]](), tuple[int, ...]()
    _begin(tasks, gathers[walk.always.name], ())
    for visit in walk.visits(microbatches):
        for index in visit.gathered:
            there[index] = _begin(tasks, gathers[walk.units[index].name], ran)
        part = 1 - _BACKWARD if visit.is_forward else _BACKWARD
        seconds = part * compute_s / microbatches * _numel(walk.units[visit.index]) / total
        # What stays for the whole step was begun before the first unit, on the same links.
        tasks.append(TimedTask(compute(0), seconds, (*ran, *there[visit.index])))
        ran = (len(tasks) - 1,)
    return tasks


def _begin(tasks: list[TimedTask], messages: Sequence[PricedMessage], after: tuple[int, ...]) -> tuple[int, ...]:
    """Append a gather, whose messages follow each other; return the task that ends it, or `after` if it has none."""
    for one in messages:
        tasks.append(TimedTask(_THREAD, one.start_s, after))
        begun = (len(tasks) - 1,)
        tasks.append(TimedTask(wire(one.link), one.busy_s, begun, latency_s=one.latency_s * one.hops))
        after = (len(tasks) - 1,)
    return after


def _numel(unit: UnshardUnit) -> int:
    return sum(prod(entry.shape) for layout in unit.layouts for entry in layout.entries)
