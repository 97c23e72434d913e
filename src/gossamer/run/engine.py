"""The model of one rank, ready to run: its forward and backward pass, its stages, pipeline and tied parameters."""

from __future__ import annotations

import numpy as np
from torch import nn

from gossamer.comm.message import ProcessGroups
from gossamer.model.compiled import compile_units
from gossamer.model.forward_adapter import ForwardAdapter, caller_of
from gossamer.model.precision import precision_of
from gossamer.model.unit_seeds import UnitSeeds, unit_seeds
from gossamer.pipeline.from_plan import forward_only_of, schedule_of
from gossamer.pipeline.schedule import Schedule
from gossamer.pipeline.stage_links import StageLinks, links_of
from gossamer.run.batches import moved
from gossamer.run.checkpoint import trainable
from gossamer.run.forward import Pipeline
from gossamer.run.parts import Parts
from gossamer.run.staged_model import StagedModel, StagePart
from gossamer.run.step_runner import ModelPart, ModelRuntime, UnsplitModel
from gossamer.saver import Site, install_all
from gossamer.sharding import Holding, holdings, shapes_of
from gossamer.spec.errors import bad_input


def engine_of(parts: Parts) -> ModelRuntime:
    """Return the model with its loss, savers, precision and random state. Compiles units, so call it once per run."""
    config, module = parts.config, parts.module
    module.train()
    if config.model.compile and parts.cut is None:  # stages are already compiled
        compile_units(module, parts.plan.units)
    caller = caller_of(module, parts.train.batch(np.zeros(1, np.int64)))
    if config.data.isolate and config.data.factory is None:
        check_isolates(module, caller)
    randomness = unit_seeds(module, parts.units, seed=config.train.seed)
    installed = install_all(parts.recipe.methods.savers, module, _site(parts, randomness))
    return ModelRuntime(
        module=module,
        caller=caller,
        objective=installed.objective,
        precision=precision_of(config.train.precision),
        randomness=randomness,
        device=parts.device,
        without_savers=installed.remove,
        told=installed.told,
        tiled=installed.tiled,
    )


def _site(parts: Parts, randomness: UnitSeeds) -> Site:
    """Return where savers are installed on this rank, with the first rows of the training data."""
    plan = parts.plan
    rows = max(-(-rows // counts) for rows, counts in zip(plan.rows, plan.microbatches, strict=True))
    first = moved(parts.train.batch(np.arange(parts.train.together)), parts.device) if plan.savers else None
    return Site(
        units=parts.units,
        objective=parts.objective,
        in_stages=parts.cut is not None,
        elsewhere=frozenset() if parts.cut is None else frozenset(parts.units) - _units_here(parts.cut),
        batch=first,
        rows=max(1, rows // parts.train.together),
        drawing=lambda: randomness.at(0, 0),
        computing=lambda: precision_of(parts.config.train.precision).autocast(parts.device),
    )


def _units_here(cut: StagedModel) -> frozenset[str]:
    """Return the names of the units that the stages of this rank run."""
    parts = [(stage.flow, stage.part) for stage in cut.stages.values()]
    return frozenset(call.unit for flow, part in parts for call in flow.calls[part.low : part.high])


def check_isolates(module: nn.Module, caller: ForwardAdapter, whose: str = "") -> None:
    """Raise BadInput for a model that is not told where documents begin: in it they would attend to each other.

    `whose`: says which model it is, "" for the one that is trained.
    """
    if not takes_positions(caller):
        raise bad_input(
            wanted=f"a forward {whose}with a parameter position_ids, which restart at every document",
            got=f"{type(module).__name__}.forward without one",
            do="add it to forward, with attention within a document alone, or leave data.isolate out",
            key="data.isolate",
        )


def takes_positions(caller: ForwardAdapter) -> bool:
    """Return whether a forward is told the position of each token."""
    return caller.takes_all or "position_ids" in caller.takes


def pieces_of(parts: Parts, engine: ModelRuntime) -> dict[int, ModelPart]:
    """Return the stages of this rank by stage number; stage 0 is the full model without pipeline parallelism."""
    if parts.cut is None:
        return {0: UnsplitModel(engine)}
    return {number: StagePart(engine, parts.cut.ways, stage) for number, stage in parts.cut.stages.items()}


def pipeline_of(parts: Parts, rank: int, levels: ProcessGroups) -> Pipeline:
    """Return this rank's pipeline: its schedule of a step and its stage links. Raises BadInput."""
    plan, methods = parts.plan, parts.recipe.methods
    replica, place = plan.axes.place(rank)
    made = schedule_of(plan, replica, methods.schedule)

    def evaluating(microbatches: int) -> tuple[Schedule, StageLinks]:
        forward_only = forward_only_of(plan, made, microbatches)
        return forward_only, links_of(plan, levels, forward_only, replica, methods.activation)

    links = links_of(plan, levels, made, replica, methods.activation)
    return Pipeline(rank=place, schedule=made, links=links, evaluating=evaluating)


def holdings_of(parts: Parts, rank: int, levels: ProcessGroups) -> dict[str, Holding]:
    """Return what a rank holds of the parameters that it trains; tied ones are those of several stages."""
    shared, mesh = {} if parts.cut is None else parts.cut.parameters_on_several_stages(), parts.plan.axes
    replica, _ = mesh.place(rank)
    added = {name: mesh.of_replica(replica, places) for name, places in shared.items()}
    deal = parts.recipe.sharding.deal(levels)
    return holdings(deal, shapes_of(trainable(parts.module)), rank, added=added)
