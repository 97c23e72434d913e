"""The laws of sharded model states."""

from __future__ import annotations

from gossamer.recipe.recipe import Recipe
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.method_config import MethodConfig, told

_WHOLE = "leave plan.sharding at none"


def sharding_with_stages(recipe: Recipe) -> BadInput | None:
    """Return an error for sharded states with stages, in zeroth-order training, or with an unsuitable schedule."""
    sharding, schedule = recipe.sharding, recipe.plan.pipeline_schedule
    if not sharding.is_sharded:
        return None
    key, do = "plan.sharding", _WHOLE
    if not recipe.in_stages and sharding.takes_parameters and MethodConfig.parse(schedule).name != "single_stage":
        got = f"plan.pipeline_schedule {told(schedule)}"
        return bad_input(wanted="plan.pipeline_schedule single_stage, for sharded parameters", got=got, do=do, key=key)
    if recipe.in_stages or recipe.sync.probe is not None:
        got = recipe.apart_by
        do = "set plan.sharding.tiers.shard_group to none" if sharding.is_tiered and recipe.in_stages else do
        return bad_input(
            wanted="no pipeline stages and a gradient exchange at every step, for sharded states",
            got=got,
            do=do,
            key=key,
        )
    return None


def sharding_with_local_updates(recipe: Recipe) -> BadInput | None:
    """Check that the sharding keeps states inside each island, as local-update training needs."""
    sharding, loop = recipe.sharding, recipe.sync.loop
    if not sharding.is_sharded or loop is None:
        return None
    key, got = "plan.sharding", told(recipe.plan.sharding)
    if sharding.takes_parameters or sharding.differences is not None:
        return bad_input(
            wanted="zero1 or zero2 with local updates: each rank must hold full parameters",
            got=got,
            do="write plan.sharding: {zero1: {shard_group: island}} or {zero2: {shard_group: island}}, or "
            "plan.sync: every_step",
            key=key,
        )
    if loop.average_second_moments_every:
        return bad_input(
            wanted="optimizer states that are not sharded, to average second moments over islands",
            got=got,
            do="leave average_second_moments_every out of plan.sync, or write plan.sharding: none",
            key=key,
        )
    if not sharding.needs_islands:
        name = MethodConfig.parse(recipe.plan.sharding).name
        return bad_input(
            wanted="states sharded inside each island, with local updates",
            got=f"{got}, over all ranks",
            do=f"write plan.sharding: {{{name}: {{shard_group: island}}}}",
            key=key,
        )
    return None


def sharding_with_policy(recipe: Recipe) -> BadInput | None:
    """Return an error for a policy that measures full mean gradients, with sharded states."""
    if not recipe.sharding.is_sharded or recipe.policy is None:
        return None
    got = f"plan.adapt {told(recipe.config.plan.adapt)}, which measures the full mean gradient"
    wanted = "no policy: with sharded states a rank has the mean gradient of its own rows only"
    return bad_input(wanted=wanted, got=got, do=_WHOLE, key="plan.sharding")


def sharding_with_optimizer(recipe: Recipe) -> BadInput | None:
    """Return an error for states sharded by rows with an optimizer that needs whole parameters."""
    sharding = recipe.sharding
    rule, got = recipe.optimizer, f"train.optimizer {told(recipe.config.train.optimizer)}"
    if not sharding.is_sharded or rule.by_element or (sharding.by_parameter and rule.by_parameter):
        return None
    if not rule.by_parameter:
        wanted = "an optimizer that is the same by rows or by whole parameters, such as adamw or lamb"
        return bad_input(wanted=wanted, got=got, do=_WHOLE, key="plan.sharding")
    written = MethodConfig.parse(recipe.plan.sharding)
    inside = ", ".join(f"{key}: {value}" for key, value in {**written.parameters, "whole": "true"}.items())
    return bad_input(
        wanted="an element-wise optimizer such as adamw, as no rank holds a whole parameter",
        got=got,
        do=f"set plan.sharding to {{{written.name}: {{{inside}}}}}, which gives every parameter one owner",
        key="plan.sharding",
    )


def zeros_with_differences(recipe: Recipe) -> BadInput | None:
    """Return an error for an optimizer that sets elements to 0 where ranks receive rounded weight updates."""
    if recipe.sharding.differences is None or not recipe.optimizer.sets_zeros:
        return None
    return bad_input(
        wanted="a sharding that sends weights as they are, as train.optimizer sets some of them to exactly 0",
        got=f"{told(recipe.plan.sharding)}, which rounds weight updates",
        do="set plan.sharding to zero1 or zero2",
        key="plan.sharding",
    )


def sharding_with_microbatches(recipe: Recipe) -> BadInput | None:
    """Return an error for sharded parameters on replicas with different numbers of micro-batches."""
    counts = recipe.plan.microbatches
    if not recipe.sharding.takes_parameters or len(set(counts)) == 1:
        return None
    return bad_input(
        wanted="the same number of micro-batches on every replica, as all of them gather parameters together",
        got=f"{list(counts)} micro-batches by replica",
        do="make the plan again, or set plan.sharding to zero2",
        key="plan.sharding",
    )
