"""The laws of the optimizer: what it needs of the schedule, of the layout and of the sync method."""

from __future__ import annotations

from gossamer.recipe.recipe import OPTIMIZER, Recipe
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.method_config import told


def average_with_schedule(recipe: Recipe) -> BadInput | None:
    """Return an error for a learning rate that falls beside an optimizer whose average replaces the fall."""
    if not recipe.optimizer.has_average or recipe.lr_schedule.never_falls:
        return None
    written = told(recipe.config.train.optimizer)
    return bad_input(
        wanted=f"a learning rate that never falls with {written}, whose average stands in for the fall",
        got=f"train.lr_schedule {told(recipe.config.train.lr_schedule)}",
        do="set train.lr_schedule to {constant: {warmup: 0.02}}: a linear warm-up, then a constant rate",
        key="train.lr_schedule",
    )


def average_with_sync(recipe: Recipe) -> BadInput | None:
    """Return an error for local updates with an averaged point, of which rounds would move one part only."""
    if not recipe.optimizer.has_average or (recipe.sync.is_plain and recipe.plan.sync != "auto"):
        return None
    return bad_input(
        wanted=f"plan.sync every_step with {told(recipe.config.train.optimizer)}, as rounds move the parameters alone "
        "and not the point that they are averaged with",
        got=f"plan.sync {told(recipe.plan.sync)}",
        do="set plan.sync to every_step, or choose another optimizer such as adamw",
        key=OPTIMIZER,
    )


def average_with_differences(recipe: Recipe) -> BadInput | None:
    """Return an error for weights that are sent as coded differences, with an optimizer that has an averaged point."""
    if not recipe.optimizer.has_average or recipe.sharding.differences is None:
        return None
    return bad_input(
        wanted=f"a sharding that sends updated rows as they are with {told(recipe.config.train.optimizer)}, as ranks "
        "would evaluate a coded average",
        got=f"plan.sharding {told(recipe.plan.sharding)}",
        do="set plan.sharding to zero1, zero2 or zero3",
        key="plan.sharding",
    )


def one_clip_with_stages(recipe: Recipe) -> BadInput | None:
    """Return an error for stages with an optimizer that must see all parameters at once."""
    if not recipe.optimizer.has_one_clip or not recipe.in_stages:
        return None
    return bad_input(
        wanted=f"no pipeline stages with {told(recipe.config.train.optimizer)}, which moves all layers under one clip",
        got=f"{recipe.stages} stages, of which a rank knows its own",
        do="set plan.mesh.pipe to 1, or choose another optimizer such as adamw",
        key=OPTIMIZER,
    )


def one_clip_with_sync(recipe: Recipe) -> BadInput | None:
    """Return an error for local updates with an optimizer that must see all parameters at once."""
    if not recipe.optimizer.has_one_clip or (recipe.sync.is_plain and recipe.plan.sync != "auto"):
        return None
    return bad_input(
        wanted=f"plan.sync every_step with {told(recipe.config.train.optimizer)}, which needs means over all ranks",
        got=f"plan.sync {told(recipe.plan.sync)}",
        do="set plan.sync to every_step, or choose another optimizer such as adamw",
        key=OPTIMIZER,
    )
