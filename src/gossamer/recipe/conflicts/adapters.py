"""The laws of adapters: what the optimizer would do to weights through them."""

from __future__ import annotations

from gossamer.model import adapter as adapters
from gossamer.recipe.recipe import OPTIMIZER, Recipe
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.method_config import MethodConfig, told


def decay_with_scales(recipe: Recipe) -> BadInput | None:
    """Return an error for weight decay, or a penalty, on an adapter whose factors multiply weights: it would draw these
    to 0.
    """
    written = recipe.config.model.adapter
    if written == "none" or not adapters.REGISTRY.type(MethodConfig.parse(written).name, key=adapters.KEY).is_scale:
        return None
    if not recipe.optimizer.draws_to_zero:
        return None
    return bad_input(
        wanted=f"no weight decay and no penalty with model.adapter {told(written)}, whose matrices multiply the "
        "weights: it would draw these to 0",
        got=f"train.optimizer {told(recipe.config.train.optimizer)}",
        do="write train.optimizer: {adamw: {weight_decay: 0}}",
        key=OPTIMIZER,
    )
