"""The forecast of a step with pipeline stages: its communication volume, and what is known of its time and memory."""

from __future__ import annotations

from collections.abc import Sequence

from gossamer.model.split.dataflow import DataFlow
from gossamer.model.split.split_points import StageSpec, work_of
from gossamer.pipeline.from_plan import schedule_of
from gossamer.pipeline.schedule import StageCosts
from gossamer.pipeline.schedule_tasks import cost_of_schedule
from gossamer.plan import Border, Staged, price_of_stages
from gossamer.recipe import PlanMethods
from gossamer.run.batches import Batches, Feed
from gossamer.run.staged_model import StagedModel, boundary_of
from gossamer.spec.action import Op
from gossamer.spec.config import RunConfig
from gossamer.spec.cost import Cost
from gossamer.spec.plan import Plan


def forecast_of(plan: Plan, cut: StagedModel, batches: Batches, config: RunConfig) -> Cost:
    """Return the communication volume of the first step, from the boundary tensors of its micro-batches."""
    shapes = {name: tuple(p.shape) for name, p in cut.ways.module.named_parameters() if p.requires_grad}
    places = range(plan.axes.width)
    held = tuple(tuple((n, s) for n, s in shapes.items() if any(p in g for g in cut.holders(n))) for p in places)
    borders: list[Border] = []
    for replica in range(plan.mesh.replica):
        for number, piece in Feed(batches, plan, replica, config.train.seed).fetch(0).items():
            flow, parts = cut.ways.of(piece.rows)
            borders += [Border(replica, part.stage, number, boundary_of(flow, part).sends) for part in parts[:-1]]
    maker = PlanMethods.of(plan).schedule
    by_count = {m: schedule_of(plan, plan.microbatches.index(m), maker) for m in set(plan.microbatches)}
    schedules = tuple(by_count[m] for m in plan.microbatches)
    return price_of_stages(plan, Staged(schedules, held, cut.parameters_on_several_stages()), borders)


def bubble_reason(plan: Plan, flow: DataFlow, parts: Sequence[StageSpec]) -> str:
    """Return the bubble of a step and the micro-batches under way, as far as the traced work tells, and what is missing
    to know its seconds and bytes.

    The clock plays the schedule of the replica with most micro-batches, in flop for seconds; a backward is the work of
    two forwards.
    """
    most = max(range(plan.mesh.replica), key=plan.microbatches.__getitem__)
    schedule = schedule_of(plan, most, PlanMethods.of(plan).schedule)
    played = cost_of_schedule(schedule, [_traced_costs(flow, part) for part in parts])
    bubble = f"{100 * played.bubble_s / played.step_s:.0f}% of a step" if played.step_s > 0 else "not known"
    live = ", ".join(map(str, played.peak_bytes))
    return (
        f"bubble: {bubble} where stages take time as their traced work and messages none; at most {live} micro-batches "
        "under way on the ranks of a replica. Not measured, so without seconds and peak bytes: the seconds of each "
        "stage's forward and backward, what it keeps of a micro-batch, the rates of the links"
    )


def _traced_costs(flow: DataFlow, part: StageSpec) -> StageCosts:
    """Return the costs of a stage in flop for seconds; it keeps 1 of every micro-batch."""
    work = sum(work_of(call) for call in flow.calls[part.low : part.high])
    halves = dict.fromkeys((Op.F, Op.B_INPUT, Op.B_WEIGHT, Op.RECOMPUTE), work)
    return StageCosts(seconds={**halves, Op.B: 2 * work}, live_bytes=1, kept_bytes=1)
