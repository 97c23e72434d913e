"""The laws of model states in tiers: what they are not combined with, each in one sentence."""

from __future__ import annotations

from collections.abc import Callable

from gossamer.exchange.dense import Dense
from gossamer.recipe.recipe import Recipe
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.method_config import told

_OTHERS: tuple[tuple[str, Callable[[Recipe], bool], Callable[[Recipe], str]], ...] = (
    ("a model in one stage", lambda r: r.in_stages, lambda r: f"{r.stages} stages"),
    ("one process", lambda r: r.plan.ranks > 1, lambda r: f"{r.plan.ranks} processes"),
    (
        "plan.sync every_step",
        lambda r: r.sync.loop is not None or r.sync.probe is not None,
        lambda r: f"plan.sync {told(r.plan.sync)}",
    ),
    (
        "plan.exchange auto or dense",
        lambda r: not all(isinstance(one, Dense) for one in r.exchanges),
        lambda r: f"plan.exchange {told(r.plan.exchange)}",
    ),
    ("no policy", lambda r: r.policy is not None, lambda r: f"plan.adapt {told(r.config.plan.adapt)}"),
    (
        "the pipeline schedule single_stage",
        lambda r: told(r.plan.pipeline_schedule) != "single_stage",
        lambda r: f"plan.pipeline_schedule {told(r.plan.pipeline_schedule)}",
    ),
    (
        "no verification",
        lambda r: r.config.train.verify.every > 0,
        lambda r: f"train.verify.every {r.config.train.verify.every}",
    ),
    (
        "a model without an adapter",
        lambda r: r.config.model.adapter != "none",
        lambda r: f"model.adapter {told(r.config.model.adapter)}",
    ),
    (
        "a model without a side network",
        lambda r: r.config.model.side != "none",
        lambda r: f"model.side {told(r.config.model.side)}",
    ),
    ("a model that is not compiled", lambda r: r.config.model.compile, lambda r: "model.compile true"),
    (
        "an optimizer that updates each parameter by itself",
        lambda r: not r.optimizer.by_parameter,
        lambda r: f"train.optimizer {told(r.config.train.optimizer)}",
    ),
    (
        "an optimizer that is evaluated at its parameters",
        lambda r: r.optimizer.has_average,
        lambda r: f"train.optimizer {told(r.config.train.optimizer)}",
    ),
    (
        "no adversarial training",
        lambda r: r.config.train.adversarial.epsilon > 0,
        lambda r: f"train.adversarial.epsilon {r.config.train.adversarial.epsilon}",
    ),
)


def tiers_alone(recipe: Recipe) -> BadInput | None:
    """Return an error for states in tiers beside a method that needs them in memory."""
    if not recipe.sharding.is_tiered:
        return None
    for wanted, is_other, got in _OTHERS:
        if is_other(recipe):
            return bad_input(
                wanted=f"{wanted}, with model states in tiers",
                got=got(recipe),
                do="leave that out, or leave plan.sharding at none",
                key="plan.sharding",
            )
    return None
