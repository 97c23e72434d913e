"""The laws of adapters: what the optimizer would do to weights through them, and what is not trained without one."""

from __future__ import annotations

from gossamer.model import adapter as adapters
from gossamer.model.quantized_folder import quantized_folder_of
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


def integers_alone(recipe: Recipe) -> BadInput | None:
    """Return an error for a quantized folder of which embeddings, norms and the head would be trained alone.

    Its linear layers are integers, which stay as they are. Who writes `model.freeze` or `model.unfreeze` knows that.
    """
    model = recipe.config.model
    if model.adapter != "none" or model.side != "none" or model.freeze or model.unfreeze:
        return None
    found = quantized_folder_of(model)
    if found is None:
        return None
    return bad_input(
        wanted="an adapter or a side network on a quantized model, whose linear layers are integers and stay",
        got=f"model.adapter none on {found.path}",
        do="set model.adapter to lora or model.side to unipt, name the model in full precision, or say what of the "
        "rest is trained in model.unfreeze",
        key="model.adapter",
    )
