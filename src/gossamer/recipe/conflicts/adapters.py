"""The laws of adapters: what the optimizer would do to weights through them."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

from gossamer.model import adapter as adapters
from gossamer.optimizer import Optimizer
from gossamer.recipe.recipe import OPTIMIZER, Recipe
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.method_config import MethodConfig, told


def decay_with_scales(recipe: Recipe) -> BadInput | None:
    """Return an error for weight decay on an adapter whose factors multiply weights: it would draw these to 0."""
    written = recipe.config.model.adapter
    if written == "none" or not adapters.REGISTRY.type(MethodConfig.parse(written).name, key=adapters.KEY).is_scale:
        return None
    if not _decays(recipe.optimizer):
        return None
    return bad_input(
        wanted=f"no weight decay with model.adapter {told(written)}, whose matrices multiply the weights: it would "
        "draw these to 0",
        got=f"train.optimizer {told(recipe.config.train.optimizer)}",
        do="write train.optimizer: {adamw: {weight_decay: 0}}",
        key=OPTIMIZER,
    )


def _decays(rule: Optimizer) -> bool:
    """Return whether a rule, or one inside of it, has a weight decay."""
    if not is_dataclass(rule):
        return False
    for one in fields(rule):
        value = getattr(rule, one.name)
        if (one.name == "weight_decay" and value) or (isinstance(value, Optimizer) and _decays(value)):
            return True
    return False
