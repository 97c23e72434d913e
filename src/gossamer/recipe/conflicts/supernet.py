"""The laws of supernets, whose layers have other widths in every step: model.adapter qfa, and train.loss deps."""

from __future__ import annotations

from gossamer.recipe.conflicts._beside import COMPILED, SHARDED, STAGES, Beside, refused_beside
from gossamer.recipe.recipe import Recipe
from gossamer.saver.activation_swap import ActivationSwap
from gossamer.saver.recompute import Recompute
from gossamer.saver.tiling import Tiling
from gossamer.spec.errors import BadInput
from gossamer.spec.method_config import MethodConfig, told

_OF_ANY = (STAGES, SHARDED)
_OF_QFA = (*_OF_ANY, COMPILED)
_OF_DEPS = (
    *_OF_ANY,
    Beside(
        "units that keep their activations, as the slices of a subnet are gone when they would be computed again",
        lambda r: any(
            isinstance(one, Recompute) or (isinstance(one, ActivationSwap) and one.may_recompute)
            for one in r.methods.savers
        ),
        lambda r: f"plan.savers {', '.join(told(one) for one in r.plan.savers)}",
    ),
    Beside(
        "layers that are not tiled, as they run in slices of their weights",
        lambda r: any(isinstance(one, Tiling) for one in r.methods.savers),
        lambda r: f"plan.savers {', '.join(told(one) for one in r.plan.savers)}",
    ),
    Beside(
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


def _beside(recipe: Recipe, table: tuple[Beside, ...], what: str, instead: str, key: str) -> BadInput | None:
    return refused_beside(recipe, table, why=f", with {what}", do=instead, key=key)
