"""The communication volume of a model in pipeline stages."""

from __future__ import annotations

from gossamer.pipeline.from_plan import schedule_of
from gossamer.plan import Border, Staged, price_of_stages
from gossamer.recipe import PlanMethods
from gossamer.run.batches import Batches, Feed
from gossamer.run.staged_model import StagedModel, boundary_of
from gossamer.spec.config import RunConfig
from gossamer.spec.cost import Cost
from gossamer.spec.plan import Plan


def forecast_of(plan: Plan, cut: StagedModel, batches: Batches, config: RunConfig) -> Cost:
    """Return the communication volume of the first step, from the boundary tensors of its micro-batches."""
    shapes = {name: tuple(p.shape) for name, p in cut.ways.module.named_parameters() if p.requires_grad}
    places = range(plan.width)
    held = tuple(tuple((n, s) for n, s in shapes.items() if any(p in g for g in cut.holders(n))) for p in places)
    borders: list[Border] = []
    for replica in range(plan.mesh.replica):
        for number, piece in Feed(batches, plan, replica, config.train.seed).fetch(0).items():
            flow, parts = cut.ways.of(piece.rows)
            borders += [Border(replica, part.stage, number, boundary_of(flow, part).sends) for part in parts[:-1]]
    maker = PlanMethods.of(plan).schedule
    by_count = {m: schedule_of(plan, plan.microbatches.index(m), maker) for m in set(plan.microbatches)}
    schedules = tuple(by_count[m] for m in plan.microbatches)
    return price_of_stages(plan, Staged(schedules, held, cut.shared()), borders)
