"""The laws of static masks: who else has to know them, and what would bring masked weights back."""

from __future__ import annotations

from gossamer.exchange import Exchange, nested
from gossamer.exchange.hierarchical import Hierarchical
from gossamer.exchange.static_mask import StaticMask
from gossamer.exchange.warmup import Warmup
from gossamer.recipe.conflicts.exchange import exchange_told
from gossamer.recipe.recipe import OPTIMIZER, Recipe
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.method_config import told

_EXCHANGE = "plan.exchange"


def mask_with_optimizer(recipe: Recipe) -> BadInput | None:
    """Return an error for an exchange that leaves out gradients which the optimizer uses."""
    drawn = recipe.optimizer.mask
    for one in _masks(_met(recipe)):
        if one.mask != drawn:
            return bad_input(
                wanted=f"train.optimizer static_mask with sparsity {one.sparsity:g}, seed {one.seed} and the same "
                "parameters, as the exchange static_mask leaves out what its masked weights bring",
                got=f"train.optimizer {told(recipe.config.train.optimizer)}",
                do="write the same sparsity, seed and parameters in both, or another exchange such as dense",
                key=_EXCHANGE,
            )
    return None


def mask_with_feedback(recipe: Recipe) -> BadInput | None:
    """Return an error for a masked exchange inside one that keeps what was not sent, or sends something else."""
    for outer in (one for exchange in _met(recipe) for one in nested(exchange)):
        inside = [one for one in nested(outer) if isinstance(one, StaticMask) and one is not outer]
        if inside and not isinstance(outer, (StaticMask, Hierarchical, Warmup)):
            return bad_input(
                wanted="static_mask around other exchanges, apart from hierarchical and warmup: what keeps or "
                "factorizes gradients would keep those of masked weights for ever",
                got=exchange_told(recipe.plan.exchange),
                do="write {static_mask: {inner: ...}} with the other exchange inside",
                key=_EXCHANGE,
            )
    return None


def mask_with_tiers(recipe: Recipe) -> BadInput | None:
    """Return an error for masked weights with states in tiers, whose gradients are taken before they are masked."""
    if not _has_masks(recipe) or not recipe.sharding.is_tiered:
        return None
    return bad_input(
        wanted="an optimizer without static_mask, with model states in tiers, whose norms count all gradients",
        got=f"train.optimizer {told(recipe.config.train.optimizer)}",
        do="leave plan.sharding at none, or set train.optimizer to the inner optimizer of static_mask",
        key=OPTIMIZER,
    )


def mask_with_verification(recipe: Recipe) -> BadInput | None:
    """Return an error for verification, which compares the mean gradient with those of all weights."""
    if not _has_masks(recipe) or not recipe.config.train.verify.every:
        return None
    return bad_input(
        wanted="an optimizer without static_mask with verification, which compares mean gradients of all weights with "
        "those that ranks report",
        got=f"train.optimizer {told(recipe.config.train.optimizer)}",
        do="set train.verify.every to 0",
        key="train.verify.every",
    )


def mask_with_policy(recipe: Recipe) -> BadInput | None:
    """Return an error for a masked exchange that a policy would put others in place of, or in place of others."""
    if recipe.policy is None or not (_masks(_met(recipe)) or "static_mask" in told(recipe.config.plan.adapt)):
        return None
    return bad_input(
        wanted="no policy with the exchange static_mask, as a policy wraps exchanges in feedback or replaces them",
        got=f"plan.adapt {told(recipe.config.plan.adapt)}",
        do="leave plan.adapt out",
        key="plan.adapt",
    )


def _met(recipe: Recipe) -> tuple[Exchange, ...]:
    """Return all exchanges of a run: those of gradients, and those of rounds."""
    loop = recipe.sync.loop
    rounds = () if loop is None else (loop.exchange, loop.step_exchange)
    return (*recipe.exchanges, *(one for one in rounds if one is not None))


def _has_masks(recipe: Recipe) -> bool:
    return recipe.optimizer.mask is not None or recipe.optimizer.keeps_masks


def _masks(exchanges: tuple[Exchange, ...]) -> list[StaticMask]:
    return [one for outer in exchanges for one in nested(outer) if isinstance(one, StaticMask)]
