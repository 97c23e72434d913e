"""The laws of supernets, whose layers have other widths in every step: model.adapter qfa, and train.loss deps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from gossamer.recipe.recipe import Recipe
from gossamer.saver.recompute import Recompute
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.method_config import MethodConfig, told

_Other: TypeAlias = tuple[str, Callable[[Recipe], bool], Callable[[Recipe], str]]

_OF_ANY: tuple[_Other, ...] = (
    ("a model in one stage", lambda r: r.in_stages, lambda r: f"{r.stages} stages"),
    (
        "parameters that are there all the time",
        lambda r: r.sharding.takes_parameters,
        lambda r: f"plan.sharding {told(r.plan.sharding)}",
    ),
)
_OF_QFA: tuple[_Other, ...] = (
    *_OF_ANY,
    ("a model that is not compiled", lambda r: r.config.model.compile, lambda r: "model.compile true"),
)
_OF_DEPS: tuple[_Other, ...] = (
    *_OF_ANY,
    (
        "units that keep their activations, as the slices of a subnet are gone when they would be computed again",
        lambda r: any(isinstance(one, Recompute) for one in r.methods.savers),
        lambda r: f"plan.savers {', '.join(told(one) for one in r.plan.savers)}",
    ),
    (
        "an optimizer that follows gradients alone, as layers see the inputs of several subnets",
        lambda r: r.optimizer.has_one_clip,
        lambda r: f"train.optimizer {told(r.config.train.optimizer)}",
    ),
)


def supernet_alone(recipe: Recipe) -> BadInput | None:
    """Return an error for a supernet beside what needs the same graph in every step."""
    if MethodConfig.parse(recipe.config.model.adapter).name == "qfa":
        return _beside(recipe, _OF_QFA, "the adapter qfa", "train another adapter", "model.adapter")
    if recipe.loss_of(recipe.config).needs_subnets:
        loss = f"train.loss {told(recipe.config.train.loss)}"
        return _beside(recipe, _OF_DEPS, loss, "train the network without subnets", "train.loss")
    return None


def _beside(recipe: Recipe, others: tuple[_Other, ...], what: str, instead: str, key: str) -> BadInput | None:
    for wanted, is_there, got in others:
        if is_there(recipe):
            do = f"leave that out, or {instead}"
            return bad_input(wanted=f"{wanted}, with {what}", got=got(recipe), do=do, key=key)
    return None
