"""The split points of a model: given in the configuration or in a plan, or balanced."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from gossamer.model.split.dataflow import DataFlow
from gossamer.model.split.split_error import split_error
from gossamer.model.split.split_points import SplitPoints, balanced_split
from gossamer.model.units import block_names
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.plan import Plan


def check_cuts(cuts: SplitPoints, flow: DataFlow, outline: nn.Module, plan: Plan, config: RunConfig) -> None:
    """Raise BadInput if a plan's split points differ from those in the configuration."""
    if config.plan.cuts != "auto" and (asked := split_points(flow, outline, plan, config)[0]) != cuts:
        raise other_than_planned("plan.cuts", cuts.first, asked.first)


def other_than_planned(key: str, has: Sequence[str], asked: Sequence[str]) -> BadInput:
    """Return the error for a key whose value is another one in the plan."""
    return bad_input(
        wanted=f"the value of the plan ({key.partition('.')[2]}: {', '.join(has)})",
        got=f"{', '.join(asked)} in the configuration",
        do="leave the key out, change the plan file, or train without that file",
        key=key,
    )


def split_points(flow: DataFlow, outline: nn.Module, plan: Plan, config: RunConfig) -> tuple[SplitPoints, str]:
    """Return the split points that the configuration asks for, and why these. Raises BadInput."""
    asked, stages = config.plan.cuts, plan.mesh.pipe
    if asked == "auto":
        return balanced_split(flow, stages), f"{stages} stages of as equal work as whole units allow"
    return given_split(asked, stages, flow, outline, plan.units), "given"


def given_split(
    asked: Sequence[int | str], stages: int, flow: DataFlow, outline: nn.Module, units: Sequence[str] = ()
) -> SplitPoints:
    """Return the split points of a list of units, each by its name or the number of its block. Raises BadInput."""
    if len(asked) != stages:
        raise split_error(
            wanted=f"the first unit of each of {stages} stages",
            got=f"{len(asked)} units ({', '.join(map(str, asked))})",
            do=lambda say: f"list {stages} units, one per stage of {say.stages}, the first of them 0",
            about="cuts",
        )
    blocks = block_names(outline, units)
    first = flow.calls[0].name if asked[0] == 0 else _unit(asked[0], blocks)
    return SplitPoints((first, *(_unit(each, blocks) for each in asked[1:])))


def _unit(given: int | str, blocks: Sequence[str]) -> str:
    """Return the name of a unit that is given by name or by the number of its block."""
    if isinstance(given, str):
        return given
    if not 0 <= given < len(blocks):
        raise split_error(
            wanted=f"the number of a block, 0 to {len(blocks) - 1}"
            if blocks
            else "the name of a unit, as the model has no repeated blocks",
            got=str(given),
            do="number the repeated blocks from 0, or name a unit",
            about="cuts",
        )
    return blocks[given]
