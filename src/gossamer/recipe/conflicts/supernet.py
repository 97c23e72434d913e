"""The laws of a supernet (model.adapter qfa, train.loss deps), which computes something else in every step."""

from __future__ import annotations

from gossamer.loss.deps import Deps
from gossamer.recipe.recipe import Recipe
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.method_config import MethodConfig, told


def supernet_alone(recipe: Recipe) -> BadInput | None:
    """Return an error for a supernet beside what needs the same graph in every step."""
    config = recipe.config
    if MethodConfig.parse(config.model.adapter).name == "qfa":
        key, who, do = "model.adapter", "the adapter qfa", "leave that out, or train another adapter"
        slices = False
    elif isinstance(recipe.loss_of(config), Deps):
        key, who, do = "train.loss", "the loss deps", "leave that out, or train the network alone"
        slices = True  # of the network's parameters, in calls that no hook of its blocks sees
    else:
        return None
    recompute = next((one for one in recipe.plan.savers if MethodConfig.parse(one).name == "recompute"), None)
    refused = (
        ("a model in one stage", recipe.in_stages, f"{recipe.stages} stages"),
        (
            "parameters that are there all the time",
            recipe.sharding.takes_parameters,
            f"plan.sharding {told(recipe.plan.sharding)}",
        ),
        ("a model that is not compiled", config.model.compile, "model.compile true"),
        ("activations that are kept", slices and recompute is not None, f"plan.savers {told(recompute or '')}"),
    )
    for wanted, is_there, got in refused:
        if is_there:
            return bad_input(wanted=f"{wanted}, with {who}", got=got, do=do, key=key)
    return None
