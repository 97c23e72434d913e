"""The laws of adaptive compression: what a policy may adapt, and when."""

from __future__ import annotations

from gossamer.recipe.conflicts.exchange import exchange_told
from gossamer.recipe.nearby_settings import RegisteredSettings
from gossamer.recipe.plan_methods import AUTO
from gossamer.recipe.recipe import Recipe
from gossamer.spec.config import PlanSection
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.method_config import told
from gossamer.spec.parameter_rules import lines

_PLAN = PlanSection()


def policy_with_sync(recipe: Recipe) -> BadInput | None:
    """Return an error for a policy for a sync method whose exchange it cannot adapt."""
    if recipe.policy is None or recipe.sync.is_plain:
        return None
    by_paths = recipe.sync.loop is not None and recipe.policy.needs_paths
    if not by_paths:
        every_step = "plan.sync every_step, as"
        return bad_input(
            wanted=f"policy bcrs, or {every_step} other policies adapt the exchange of gradients at every step"
            if recipe.sync.loop
            else f"{every_step} a policy adapts the exchange of gradients at every step",
            got=f"plan.sync {told(recipe.plan.sync)}",
            do="set plan.adapt to none, or plan.sync to every_step",
            key="plan.adapt",
        )
    if not recipe.sync.names_exchange:
        return bad_input(
            wanted="a plan.sync whose exchange between islands can be set, as diloco's can",
            got=f"plan.sync {told(recipe.plan.sync)}",
            do="set plan.adapt to none, or plan.sync to another method, such as diloco",
            key="plan.adapt",
        )
    return None


def policy_with_islands(recipe: Recipe) -> BadInput | None:
    """Return an error for a policy for links between islands that have several ranks."""
    islands = recipe.plan.islands
    if recipe.policy is None or recipe.sync.is_plain or all(len(island) == 1 for island in islands):
        return None
    return bad_input(
        wanted="islands of one rank each, for a policy with local updates",
        got=str([list(island) for island in islands]),
        do="set plan.adapt to none, and write the exchange in plan.sync",
        key="plan.adapt",
    )


def policy_with_stages(recipe: Recipe) -> BadInput | None:
    """Return an error for a policy for stage boundaries without stages, or one for gradients with stages."""
    if recipe.policy is None or recipe.policy.for_links == recipe.in_stages:
        return None
    if recipe.in_stages:
        return bad_input(
            wanted="a policy for the links between stages, ada_topk",
            got=f"{told(recipe.config.plan.adapt)} for a model in {recipe.stages} stages",
            do="set plan.adapt to ada_topk or none, or plan.mesh.pipe to 1",
            key="plan.adapt",
        )
    return bad_input(
        wanted="a policy for gradients",
        got=f"{told(recipe.config.plan.adapt)}, which is for the links between stages of a model (plan.mesh.pipe)",
        do="name another: gossamer methods policy",
        key="plan.adapt",
    )


def policy_with_exchange(recipe: Recipe) -> BadInput | None:
    """Return an error for a policy that has no settings to choose from for an exchange that the user named."""
    policy, is_chosen = recipe.policy, recipe.config.plan.exchange == AUTO
    if policy is None or policy.for_links or policy.needs_paths or is_chosen or not recipe.sync.is_plain:
        return None
    before, near = recipe.plan.adapted_from or recipe.plan.exchange, RegisteredSettings()
    found = lines(before, key="plan.exchange")
    if any(policy.to_measure(line.written, near) for line in found if line.level != "intra"):
        return None
    return bad_input(
        wanted="an exchange with a rank or a codec that the policy can vary",
        got=exchange_told(before),
        do="list candidate exchanges in the policy's settings, this one among them",
        key="plan.adapt",
    )


def policy_with_interval(recipe: Recipe) -> BadInput | None:
    """Check `adapt_every` and `adapt_window`: stage boundaries and exchanges between islands are chosen once, before
    step 1.
    """
    asked, before = recipe.config.plan, recipe.in_stages or recipe.sync.loop is not None
    for key in ("adapt_every", "adapt_window"):
        if before and getattr(asked, key) != getattr(_PLAN, key):
            where = recipe.apart_by
            return bad_input(
                wanted="a policy that chooses during the run",
                got=f"one that chooses before the first step, for {where}",
                do=f"leave plan.{key} out",
                key=f"plan.{key}",
            )
    return None
