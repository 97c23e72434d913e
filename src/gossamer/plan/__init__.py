"""Planners: turn a configuration, a model outline and a number of ranks into a plan. Pure: no device, no process.

One planner per file. A planner resolves the `auto` values that need neither a measurement nor a trace of the model, and
every decision leaves a reason.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from gossamer.comm.message import ProcessGroups
from gossamer.plan._gather_wait import gather_wait_seconds
from gossamer.plan._sharding_groups import ShardingPlace, least_wait, places_of_states
from gossamer.plan._stage_traffic import Border, Staged, price_of_stages
from gossamer.plan._traffic import (
    Shapes,
    gather_bytes,
    mark_bytes,
    probe_bytes,
    round_bytes,
    share_bytes,
    state_buckets,
    state_bytes,
    step_bytes,
    walk_bytes,
    word_bytes,
)
from gossamer.recipe import PlanMethods
from gossamer.sharding import RowPartition, UnshardOrder
from gossamer.spec.config import RunConfig
from gossamer.spec.cost import Cost
from gossamer.spec.plan import Plan
from gossamer.spec.registry import Registry
from gossamer.sync import OuterLoopConfig, ZerothOrderConfig


@dataclass(frozen=True, slots=True)
class Request:
    """The input of a planner: the configuration, the number of ranks and the model outline.

    If known, `shapes`: the trainable parameters in the model's order; `units`: the modules that are never divided;
    `walk`: the order in which units are unsharded if parameters are sharded.
    """

    config: RunConfig
    ranks: int
    device: str = "cpu"
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    units: tuple[str, ...] = ()
    walk: UnshardOrder | None = None


class Planner(ABC):
    """A planner: a frozen dataclass of settings with one method, `plan`."""

    @abstractmethod
    def plan(self, request: Request) -> Plan:
        """Return the plan. Raises BadInput for a configuration that cannot be planned, NoPlan if nothing fits."""


def price_of(
    methods: PlanMethods,
    shapes: Shapes,
    levels: ProcessGroups,
    *,
    walk: UnshardOrder | None = None,
    deal: RowPartition | None = None,
) -> Cost:
    """Return the communication volume of a synchronous step: bytes per link, and bytes that each rank sends.

    `walk`: required for sharded parameters, which are gathered for each of a rank's micro-batches. `deal`: the rows of
    each rank, where states are dealt already; None: as the process groups suggest.
    """
    sharding = methods.sharding
    deal = deal or sharding.deal(levels)
    buckets = state_buckets(methods, shapes, deal)
    links = Counter(step_bytes(buckets, levels))
    if sharding.takes_parameters and sharding.is_tiered:
        assert walk is not None, "the gathers of a step follow from what runs one after the other"
        links.update(share_bytes(walk, deal.of_parameters, methods.plan.microbatches[0]))
    elif sharding.takes_parameters:
        assert walk is not None, "the gathers of a step follow from what runs one after the other"
        links.update(walk_bytes(walk, deal.of_parameters, methods.plan.microbatches[0]))
    if sharding.is_sharded:
        links.update(gather_bytes(buckets, deal, sharding.differences))
    if sharding.is_tiered:
        links.update(mark_bytes(buckets, levels))
    return _cost(links, levels)


def price_apart(loop: OuterLoopConfig, methods: PlanMethods, shapes: Shapes, levels: ProcessGroups) -> Cost:
    """Return the mean communication volume of a step in local-update training, rounds included, rounded down.

    Raises BadInput for a gradient exchange that cannot run inside an island.
    """
    plan, sharding, deal = methods.plan, methods.sharding, methods.sharding.deal(levels)
    buckets = state_buckets(methods, shapes, deal)
    island = levels.only("island")
    buckets = [(layout, one.for_island()) for layout, one in buckets]
    for layout, one in buckets:
        one.check(layout, island)
    islands = levels.groups["island"]
    part = {r: n / loop.sync_every for ranks, n in zip(islands, loop.steps_of(islands), strict=True) for r in ranks}
    inside = Counter(step_bytes(buckets, levels, meets="island"))  # of a step, of which some islands make a part
    inside.update(gather_bytes(buckets, deal, sharding.differences) if sharding.is_sharded else {})
    links = Counter({link: int(sent * part[int(link.partition(">")[0])]) for link, sent in inside.items()})
    for link, sent in round_bytes(loop, shapes, levels, units=plan.units, bucket_bytes=plan.bucket_bytes).items():
        links[link] += sent // loop.cycle
    links.update(word_bytes(loop, levels))
    return _cost(links, levels)


def price_probed(probe: ZerothOrderConfig, levels: ProcessGroups) -> Cost:
    """Return the communication volume of a zeroth-order step."""
    return _cost(probe_bytes(probe, levels), levels)


def _cost(links: Mapping[str, int], levels: ProcessGroups) -> Cost:
    ranks = sorted(r for group in levels.groups["all"] for r in group)
    sent = tuple(sum(n for link, n in links.items() if link.startswith(f"{r}>")) for r in ranks)
    return Cost(wire_bytes=dict(links), sent_bytes=sent)


__all__ = [
    "Border",
    "ShardingPlace",
    "Planner",
    "Request",
    "Staged",
    "build",
    "gather_wait_seconds",
    "least_wait",
    "names",
    "places_of_states",
    "price_apart",
    "price_of",
    "price_of_stages",
    "price_probed",
    "state_bytes",
]
REGISTRY: Registry[Planner] = Registry(__name__, Planner)
names = REGISTRY.names
build = REGISTRY.build
