"""The plan of a run: made by the planner, or read from a file."""

from __future__ import annotations

from pathlib import Path

import torch

from gossamer import plan as planner
from gossamer.model.unit_config import units_of
from gossamer.plan.data_parallel import DataParallel
from gossamer.run.checkpoint import trainable
from gossamer.sharding import UnshardOrder
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput
from gossamer.spec.plan import Plan
from gossamer.view.run_directory import plan_in


def make_plan(config: RunConfig, module: torch.nn.Module, *, ranks: int, device: torch.device) -> Plan:
    """Make the plan of a run; every rank gets the same. Raises BadInput."""
    shapes = tuple((name, tuple(p.shape)) for name, p in trainable(module).items())
    units = units_of(module, config.plan.units)
    walk = UnshardOrder.of(module, units)
    request = planner.Request(config=config, ranks=ranks, device=device.type, shapes=shapes, units=units, walk=walk)
    return DataParallel().plan(request)


def read_plan(path: Path, *, ranks: int) -> Plan:
    """Read a plan.yaml. Raises BadInput if it cannot be read or is for another number of ranks."""
    plan = plan_in(path)
    if plan.ranks != ranks:
        do = f"start {plan.ranks} ranks, or leave --plan out to make a new plan"
        raise BadInput(f"{path} is a plan for {plan.ranks} ranks, this run has {ranks} ranks: {do}")
    return plan
