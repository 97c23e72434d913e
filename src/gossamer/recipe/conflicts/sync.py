"""The laws of the sync method: local updates, zeroth-order training, a choice that is still open."""

from __future__ import annotations

from collections.abc import Sequence

from gossamer.exchange import Exchange, nested
from gossamer.exchange.static_mask import StaticMask
from gossamer.recipe.conflicts.exchange import exchange_told, method_name
from gossamer.recipe.recipe import OPTIMIZER, Recipe
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.method_config import Exchanges, told
from gossamer.sync import OuterLoopConfig


def optimizer_with_local_updates(recipe: Recipe) -> BadInput | None:
    """Return an error for an optimizer that cannot start in steps whose gradients only one island averages."""
    if recipe.sync.level(0) == "all" or recipe.optimizer.can_start_local:
        return None
    return bad_input(
        wanted="synchronous first steps: this optimizer updates its second moment only in these",
        got=f"plan.sync {told(recipe.plan.sync)}",
        do="set warmup_steps in plan.sync, e.g. to a tenth of train.steps",
        key=OPTIMIZER,
    )


def zeros_with_local_updates(recipe: Recipe) -> BadInput | None:
    """Return an error for an optimizer that sets elements to 0 where parameters are averaged."""
    if recipe.sync.loop is None or not recipe.optimizer.sets_zeros or _keeps_zeros(recipe):
        return None
    return bad_input(
        wanted="plan.sync every_step, as train.optimizer sets weights to exactly 0 and averages of weights are not 0 "
        "(of a static_mask they are, through an exchange without loss)",
        got=f"plan.sync {told(recipe.plan.sync)}",
        do="set plan.sync to every_step, or train.optimizer to the inner optimizer of this one",
        key=OPTIMIZER,
    )


def _keeps_zeros(recipe: Recipe) -> bool:
    """Return whether rounds average zeros that are the same on all islands, through exchanges that keep a zero."""
    loop, optimizer = recipe.sync.loop, recipe.optimizer
    if loop is None or (optimizer.mask is None and not optimizer.keeps_masks):
        return False
    met = [one for one in (loop.exchange, loop.step_exchange) if one is not None]
    return all((one.inner if isinstance(one, StaticMask) else one).traits.lossless for one in met)


def states_with_local_updates(recipe: Recipe) -> BadInput | None:
    """Return an error for an optimizer whose states determine the weights, where rounds change these."""
    if not recipe.optimizer.owns_weights or (recipe.sync.loop is None and recipe.plan.sync != "auto"):
        return None
    return bad_input(
        wanted="plan.sync every_step, as the weights follow from the states of train.optimizer, which rounds do not "
        "change",
        got=f"plan.sync {told(recipe.plan.sync)}",
        do="set plan.sync to every_step, or train.optimizer to adamw",
        key=OPTIMIZER,
    )


def exchange_with_local_updates(recipe: Recipe) -> BadInput | None:
    """Apply `shared_states_apart` to the islands of the plan, as far as they are known."""
    loop = recipe.sync.loop
    return None if loop is None else shared_states_apart(loop, recipe.plan.islands, recipe.exchanges)


def shared_states_apart(
    loop: OuterLoopConfig, islands: Sequence[Sequence[int]], exchanges: Sequence[Exchange]
) -> BadInput | None:
    """Return an error for a gradient exchange that serves the same ranks only, where other ones meet in local steps.

    What all ranks knew of their mean would stay in the means of islands, and what islands have learnt since would keep
    the ranks from agreeing on the next mean of all.
    """
    met = [one for outer in exchanges for one in nested(outer.for_island())]
    wrong = next((one for one in met if one.needs_same_ranks), None)
    are_alike = len(islands) == 1 or all(len(island) == 1 for island in islands)  # the same mean, or none to learn from
    if wrong is None or not loop.warmup.steps or are_alike:
        return None
    return bad_input(
        wanted="local updates from the first step on, or islands of one rank each, with an exchange whose state belongs"
        " to one group of ranks",
        got=f"{method_name(wrong)} in synchronous steps and inside the islands {[list(island) for island in islands]}",
        do="write error_feedback in its place, e.g. {error_feedback: {topk: {fraction: 0.01}}}, or set the synchronous "
        "steps of plan.sync (warmup_steps, var_freeze_step) to 0",
        key="plan.exchange",
    )


def auto_sync_with_exchange(recipe: Recipe) -> BadInput | None:
    """Return an error for a sync method to be chosen beside an exchange that is given."""
    if recipe.plan.sync != "auto" or recipe.plan.exchange == "auto":
        return None
    return bad_input(
        wanted="plan.exchange: auto with plan.sync: auto, as both are chosen together",
        got=exchange_told(recipe.plan.exchange),
        do="leave plan.exchange at auto, or name a method of `gossamer methods sync`",
        key="plan.sync",
    )


def zeroth_order_with_exchange(recipe: Recipe) -> BadInput | None:
    """Return an error for a gradient exchange in zeroth-order training, which has no gradients."""
    if recipe.sync.probe is None or recipe.plan.exchange in ("auto", "dense"):
        return None
    return bad_input(
        wanted="no gradient exchange with zeroth-order training, which sends no gradients",
        got=exchange_told(recipe.plan.exchange),
        do="leave plan.exchange at auto",
        key="plan.exchange",
    )


def zeroth_order_with_optimizer(recipe: Recipe) -> BadInput | None:
    """Return an error for an optimizer other than plain SGD in zeroth-order training."""
    if recipe.sync.probe is None or recipe.optimizer.is_plain:
        return None
    return bad_input(
        wanted="sgd without momentum and weight decay with zeroth-order training, as ranks exchange only scalars",
        got=told(recipe.config.train.optimizer),
        do="set train.optimizer to {sgd: {lr: 1e-4}}; rates are much smaller than for gradients",
        key=OPTIMIZER,
    )


def zeroth_order_with_fp16(recipe: Recipe) -> BadInput | None:
    """Return an error for fp16 in zeroth-order training, which has no backward pass to scale a loss for."""
    if recipe.sync.probe is None or recipe.config.train.precision != "fp16":
        return None
    return bad_input(
        wanted="fp32 or bf16 with zeroth-order training, which has no backward pass to scale a loss for",
        got="fp16",
        do="set train.precision to fp32: the differences of losses are small",
        key="train.precision",
    )


def second_moments_with_optimizer(recipe: Recipe) -> BadInput | None:
    """Return an error for an averaging of second moments with an optimizer that has none."""
    try:
        recipe.optimizer_with(1.0)
    except BadInput as error:
        return error
    return None


def proof_with_sync(recipe: Recipe) -> BadInput | None:
    """Return an error for a proof of gradients in zeroth-order training, which has none."""
    if recipe.config.train.prove != "always" or recipe.sync.probe is None:
        return None
    return bad_input(
        wanted="a sync method with gradients, which the proof compares with those of one process",
        got=f"plan.sync {told(recipe.plan.sync)}, which computes no gradients",
        do="set train.prove to auto",
        key="train.prove",
    )


def time_limit_with_sync(recipe: Recipe) -> BadInput | None:
    """Return an error for a time limit in a run whose ranks do not all take part in every step."""
    if not recipe.config.train.seconds or (recipe.plan.sync != "auto" and recipe.sync.is_plain):
        return None
    return bad_input(
        wanted="synchronous training with a time limit, as all ranks must stop after the same step",
        got=f"plan.sync {told(recipe.plan.sync)}",
        do="set train.seconds to 0 and give train.steps, or set plan.sync to every_step",
        key="train.seconds",
    )


def not_used_inside(loop: OuterLoopConfig, islands: Sequence[Sequence[int]], exchange: Exchanges) -> str:
    """Return why the gradient exchange is never used in local-update training; "" if it is used."""
    if exchange == "dense" or not loop.apart(0) or not islands or any(len(island) > 1 for island in islands):
        return ""
    return f"{exchange_told(exchange)} is not used: every island is one rank, so there is no exchange inside of it"
