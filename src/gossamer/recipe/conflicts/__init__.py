"""The laws of combination in the order of their checks: each asks a plan's methods what they declare of themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from gossamer.recipe.conflicts import (
    adaptation,
    adapters,
    adversarial,
    distillation,
    exchange,
    layout,
    masks,
    optimizer,
    savers,
    sharding,
    side,
    supernet,
    sync,
    tiers,
    verification,
)
from gossamer.recipe.conflicts.exchange import clipped, exchange_told
from gossamer.recipe.conflicts.sync import not_used_inside, shared_states_apart
from gossamer.recipe.recipe import Recipe
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput
from gossamer.spec.plan import Plan
from gossamer.spec.unread_keys import check_given

Law: TypeAlias = Callable[[Recipe], BadInput | None]

LAWS: tuple[Law, ...] = (
    layout.layout_with_ranks,
    layout.islands_with_ranks,
    layout.microbatches_with_loss,
    layout.boundaries_with_stages,
    layout.sync_with_stages,
    sync.optimizer_with_local_updates,
    sync.zeros_with_local_updates,
    sync.states_with_local_updates,
    sync.exchange_with_local_updates,
    sync.auto_sync_with_exchange,
    sync.zeroth_order_with_exchange,
    exchange.clipping_with_exchange,
    exchange.clipping_with_policy,
    layout.islands_with_stages,
    adaptation.policy_with_sync,
    adaptation.policy_with_stages,
    sharding.sharding_with_stages,
    sharding.sharding_with_local_updates,
    sharding.sharding_with_policy,
    savers.savers_with_each_other,
    savers.savers_with_layout,
    tiers.tiers_alone,
    supernet.supernet_alone,
    adaptation.policy_with_islands,
    sharding.sharding_with_optimizer,
    sharding.zeros_with_differences,
    sharding.sharding_with_microbatches,
    sync.zeroth_order_with_optimizer,
    sync.zeroth_order_with_fp16,
    sync.second_moments_with_optimizer,
    optimizer.average_with_schedule,
    optimizer.average_with_sync,
    optimizer.average_with_differences,
    optimizer.one_clip_with_stages,
    optimizer.one_clip_with_sync,
    adapters.decay_with_scales,
    adapters.integers_alone,
    verification.verification_with_replicas,
    adversarial.adversarial_with_layout,
    adversarial.adversarial_with_training,
    adversarial.adversarial_ahead,
    side.side_alone,
    side.tokens_with_loss,
    distillation.teacher_with_training,
    distillation.teacher_with_ranks,
    distillation.course_with_training,
    distillation.hidden_states_alone,
    distillation.experts_alone,
    sync.proof_with_sync,
    sync.time_limit_with_sync,
    adaptation.policy_with_exchange,
    adaptation.policy_with_interval,
    exchange.lossy_with_layout,
    exchange.residuals_with_exchange,
    masks.mask_with_optimizer,
    masks.mask_with_feedback,
    masks.mask_with_policy,
    masks.mask_with_tiers,
    masks.mask_with_verification,
)


def check(config: RunConfig, plan: Plan) -> Recipe:
    """Build the methods of a plan and its configuration, check that they can be combined, and return them.

    Raises BadInput that names the key at fault: for an unknown method, for two methods that exclude each other, or for
    a key that has no effect.
    """
    check_given(config)
    recipe = Recipe.of(config, plan)
    for law in LAWS:
        if (error := law(recipe)) is not None:
            raise error
    return recipe


__all__ = ["LAWS", "Law", "check", "clipped", "exchange_told", "not_used_inside", "shared_states_apart"]
