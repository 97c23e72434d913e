"""The communication volume of a step with pipeline stages, computed by the objects that later send the messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from gossamer.comm.message import Collective, ProcessGroups, Traffic
from gossamer.p2p import TensorSpec
from gossamer.pipeline.p2p import StageTensor
from gossamer.pipeline.schedule import Schedule
from gossamer.pipeline.stage_links import links_of, way_of
from gossamer.pipeline.tied_weights import TiedWeights
from gossamer.plan._traffic import Shapes, agreement, by_link, gradient_buckets
from gossamer.recipe import PlanMethods
from gossamer.spec.cost import Cost
from gossamer.spec.plan import Plan


@dataclass(frozen=True, slots=True)
class Border:
    """The tensors that micro-batch `batch` of a replica sends over the boundary between `stage` and the next."""

    replica: int
    stage: int
    batch: int
    edges: tuple[StageTensor, ...]


@dataclass(frozen=True, slots=True)
class Staged:
    """The placement of a model in pipeline stages.

    `schedules`: one per replica; `held[rank]`: the trained parameters of each rank in a replica; `shared`: tied
    parameters of several stages, with the ranks of these stages in a replica.
    """

    schedules: tuple[Schedule, ...]
    held: tuple[Shapes, ...]
    shared: Mapping[str, tuple[tuple[int, ...], ...]]


def price_of_stages(plan: Plan, staged: Staged, borders: Sequence[Border]) -> Cost:
    """Return the communication volume of a step, in payload bytes.

    Counts activations and their gradients, the gradient exchange between replicas, and the gradients of tied
    parameters.
    """
    levels, methods = ProcessGroups.of(plan.axes), PlanMethods.of(plan)
    links = by_link(
        levels,
        lambda rank: (
            *agreement(levels, levels.whole, rank),
            *_crossing(methods, staged, borders, levels, rank),
            *_gradients(methods, staged, levels, rank),
        ),
    )
    sent = tuple(sum(n for link, n in links.items() if link.startswith(f"{r}>")) for r in levels.everyone)
    return Cost(wire_bytes=links, sent_bytes=sent)


def _crossing(
    methods: PlanMethods, staged: Staged, borders: Sequence[Border], levels: ProcessGroups, rank: int
) -> list[Traffic]:
    replica, _ = methods.plan.axes.place(rank)
    links = links_of(methods.plan, levels, staged.schedules[replica], replica, methods.activation)
    found: list[Traffic] = []
    for border in borders:
        link = links.get((border.stage, border.batch))
        if link is None or border.replica != replica or rank not in (link.source, link.target):
            continue
        for edge in border.edges:
            way = way_of(link, edge.form)
            found.append(way.traffic(edge.form, rank))
            found += [way.traffic(edge.form, rank, back=True)] if edge.needs_grad else []
    return found


def _gradients(methods: PlanMethods, staged: Staged, levels: ProcessGroups, rank: int) -> list[Traffic]:
    plan, mesh = methods.plan, methods.plan.axes
    replica, place = mesh.place(rank)
    shapes = staged.held[place]
    exchange = methods.exchange.by_name(name for name, _ in shapes)
    found: list[Traffic] = []
    for layout, one in gradient_buckets(shapes, exchange, plan):
        found += one.traffic(layout, levels, rank)
        if methods.sharding.is_tiered and not any(entry.name in staged.shared for entry in layout.entries):
            found.append(Traffic(Collective.SUM, len(layout.entries), 4))  # who has a gradient of each
    holders = {name: mesh.of_replica(replica, places) for name, places in staged.shared.items()}
    tied = TiedWeights(rank, levels, holders)
    forms = {name: TensorSpec(shape, torch.float32) for name, shape in shapes}
    return [*found, *tied.traffic(forms)]
