"""The laws of model states in tiers: what they are not combined with, each in one sentence."""

from __future__ import annotations

from gossamer.exchange.dense import Dense
from gossamer.recipe.conflicts._beside import ADAPTER, ADVERSARIAL, COMPILED, SIDE, Beside, refused_beside
from gossamer.recipe.recipe import Recipe
from gossamer.saver.tiling import Tiling
from gossamer.spec.errors import BadInput
from gossamer.spec.method_config import told

_OTHERS = (
    Beside(
        "plan.sync every_step",
        lambda r: r.sync.loop is not None or r.sync.probe is not None,
        lambda r: f"plan.sync {told(r.plan.sync)}",
    ),
    Beside(
        "plan.exchange auto or dense",
        lambda r: not all(isinstance(one, Dense) for one in r.exchanges),
        lambda r: f"plan.exchange {told(r.plan.exchange)}",
    ),
    Beside("no policy", lambda r: r.policy is not None, lambda r: f"plan.adapt {told(r.config.plan.adapt)}"),
    Beside(
        "a pipeline schedule without split_backward",
        lambda r: r.methods.schedule.splits_backward,
        lambda r: f"plan.pipeline_schedule {told(r.plan.pipeline_schedule)}",
    ),
    Beside(
        "no verification",
        lambda r: r.config.train.verify.every > 0,
        lambda r: f"train.verify.every {r.config.train.verify.every}",
    ),
    ADAPTER,
    SIDE,
    COMPILED,
    Beside(
        "an optimizer that updates each parameter by itself",
        lambda r: not r.optimizer.by_parameter,
        lambda r: f"train.optimizer {told(r.config.train.optimizer)}",
    ),
    Beside(
        "an optimizer that is evaluated at its parameters",
        lambda r: r.optimizer.has_average,
        lambda r: f"train.optimizer {told(r.config.train.optimizer)}",
    ),
    ADVERSARIAL,
    Beside(
        "plan.sharding.tiers.shard_group none",
        lambda r: r.sharding.is_sharded and any(isinstance(one, Tiling) for one in r.methods.savers),
        lambda r: "shard_group all beside the saver tiling, which reads tiles from a rank's own file",
    ),
)


def tiers_alone(recipe: Recipe) -> BadInput | None:
    """Return an error for states in tiers beside a method that needs them in memory."""
    if not recipe.sharding.is_tiered:
        return None
    return refused_beside(
        recipe, _OTHERS, why=", with model states in tiers", do="leave plan.sharding at none", key="plan.sharding"
    )
